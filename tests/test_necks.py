"""SimplePyramid: sizes and strides at any map size, its place in the toolboxes' registries, clear errors."""
import math

import pytest
import torch
from torch import nn

from mminline.models import SimplePyramid
from mminline.models.necks import LayerNorm2d


@pytest.mark.parametrize('hw_shape', [(14, 14), (7, 9), (1, 1), (3, 20)], ids=str)
@pytest.mark.parametrize('num_outs', [4, 5, 6])
def test_any_size_and_every_gradient(hw_shape, num_outs):
    neck = SimplePyramid(in_channels=16, out_channels=8, num_outs=num_outs)
    maps = neck((torch.randn(2, 5, 1, 1), torch.randn(2, 16, *hw_shape)))  # only the last map is looked at
    assert [m.shape for m in maps] == [
        (2, 8, *(math.ceil(length * factor) for length in hw_shape))
        for factor in (4, 2, 1, 1 / 2, 1 / 4, 1 / 8)[:num_outs]]
    assert all(m.is_contiguous() for m in maps)
    sum(m.square().sum() for m in maps).backward()
    assert all(parameter.grad is not None for parameter in neck.parameters())


def test_positions_stay_in_place():
    """What changes in one position of the map changes every scale there (and one 3x3 convolution around it)."""
    torch.manual_seed(0)
    neck = SimplePyramid(in_channels=16, out_channels=8)
    x = torch.randn(1, 16, 8, 10)
    changed = x.clone()
    changed[..., 2, 6] += 10
    for stride, before, after in zip((4, 8, 16, 32), neck((x,)), neck((changed,))):
        for position, indices in zip((2, 6), (before != after).any(1)[0].nonzero().t()):
            first, end = 16 * position // stride, math.ceil(16 * (position + 1) / stride)
            assert indices.min() == first - 1 and indices.max() == end, stride


def test_extra_maps_are_the_last_one_subsampled():
    maps = SimplePyramid(in_channels=16, out_channels=8, num_outs=5)((torch.randn(1, 16, 6, 10),))
    assert torch.equal(maps[4], maps[3][:, :, ::2, ::2])


def test_norms():
    x = torch.randn(2, 6, 3, 5)
    torch.testing.assert_close(LayerNorm2d(6)(x), (x - x.mean(1, True)) / (x.var(1, False, keepdim=True) + 1e-5).sqrt())
    count = {norm: sum(isinstance(module, kind) for module in SimplePyramid(16, 8, norm_cfg=norm_cfg).modules())
             for norm, kind, norm_cfg in (('LN', LayerNorm2d, dict(type='mminline.LayerNorm2d')),
                                          ('BN', nn.BatchNorm2d, dict(type='BN')), ('none', LayerNorm2d, None))}
    assert count == {'LN': 9, 'BN': 9, 'none': 0}


@pytest.mark.parametrize('toolbox', ['mmdet', 'mmseg'])
def test_builds_from_the_toolboxes(toolbox):
    registry = pytest.importorskip(f'{toolbox}.registry').MODELS
    neck = registry.build(dict(type='mminline.SimplePyramid', in_channels=16, out_channels=8, num_outs=5))
    assert type(neck) is SimplePyramid
    neck.init_weights()


@pytest.mark.parametrize('options, message', [
    (dict(in_channels=18), 'in_channels must be a multiple of 4, got 18'),
    (dict(in_channels=0), 'in_channels must be a multiple of 4, got 0'),
    (dict(out_channels=0), 'out_channels must be positive, got 0'),
    (dict(num_outs=3), 'num_outs must be at least 4, got 3'),
])
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SimplePyramid(**{'in_channels': 16, 'out_channels': 8, **options})


def test_bad_inputs_are_named():
    neck = SimplePyramid(16, 8)
    with pytest.raises(TypeError, match=r'a tuple of maps, got a tensor of shape \(1, 16, 4, 4\)'):
        neck(torch.randn(1, 16, 4, 4))
    with pytest.raises(ValueError, match=r'maps \(B, 16, H, W\), got \(1, 8, 4, 4\)'):
        neck((torch.randn(1, 8, 4, 4),))
