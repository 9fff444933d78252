"""InLinePVT: any size, every option, clear errors."""
import math

import pytest
import torch

from mminline.models import InLinePVT
from mminline.models.layers import LinearAttention, SoftmaxAttention

NARROW = dict(embed_dims=(32, 32, 64, 64), num_heads=(1, 1, 2, 2), depths=(1, 2, 1, 1), mlp_ratios=(2, 2, 2, 2))
MIXED = ('inline', 'linear', 'softmax', 'inline')


def build(**options) -> InLinePVT:
    torch.manual_seed(0)
    return InLinePVT(**{'arch': NARROW, 'pretrain_img_size': 64, **options})


@pytest.mark.parametrize('size', [(448, 448), (447, 321), (33, 57), (2048, 64), (1, 1), (5, 200)], ids=str)
@pytest.mark.parametrize('attn_types', [('inline',) * 4, MIXED, ('softmax',) * 4], ids=['inline', 'mixed', 'softmax'])
def test_any_size_and_every_gradient(size, attn_types):
    backbone = build(attn_types=attn_types).train()
    maps = backbone(torch.randn(2, 3, *size))
    strides = (4, 8, 16, 32)
    assert [m.shape for m in maps] == [
        (2, c, math.ceil(size[0] / s), math.ceil(size[1] / s)) for c, s in zip(NARROW['embed_dims'], strides)]
    assert all(m.is_contiguous() for m in maps)  # mmcv's RoIAlign reads any other layout wrongly
    sum(m.square().mean() for m in maps).backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_official_size_takes_448():
    """The authors' code compares stage 2's table with stage 1's token count and stops here."""
    maps = InLinePVT('tiny').eval()(torch.randn(1, 3, 448, 448))
    assert [tuple(m.shape[1:]) for m in maps] == [(64, 112, 112), (128, 56, 56), (320, 28, 28), (512, 14, 14)]


def test_an_image_does_not_see_its_batch():
    backbone = build().eval()
    images = torch.randn(3, 3, 52, 90)
    for batch, alone in zip(backbone(images), backbone(images[1:2])):
        assert (batch[1:2] - alone).norm() < 1e-5 * alone.norm()


def test_padding_happens_at_the_bottom_and_right():
    backbone = build(out_indices=(0,)).eval()
    image = torch.randn(1, 3, 61, 90)
    padded = torch.nn.functional.pad(image, (0, 2, 0, 3))
    assert torch.equal(backbone(image)[0], backbone(padded)[0])


def test_out_indices_leave_later_stages_out():
    backbone = build(out_indices=(0, 2))
    maps = backbone(torch.randn(1, 3, 64, 64))
    assert [m.shape[1] for m in maps] == [32, 64]
    assert not hasattr(backbone, 'block4')


@pytest.mark.parametrize('frozen_stages', range(-1, 5))
def test_frozen_stages(frozen_stages):
    backbone = build(frozen_stages=frozen_stages).train()
    frozen = {name for name, parameter in backbone.named_parameters() if not parameter.requires_grad}
    expected = set()
    for name, _ in backbone.named_parameters():
        stage = int(name.split('.')[0][-1])
        first_embedding = name.startswith(('patch_embed1', 'pos_embed1'))
        if stage <= frozen_stages or (first_embedding and frozen_stages == 0):
            expected.add(name)
    assert frozen == expected
    if frozen_stages > 0:
        assert not getattr(backbone, f'block{frozen_stages}').training


def test_drop_path_ramps_up():
    backbone = build(drop_path_rate=0.4)
    blocks = [block for stage in range(1, 5) for block in getattr(backbone, f'block{stage}')]
    assert [block.drop_path.drop_prob for block in blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    images = torch.randn(1, 3, 64, 64)
    backbone.train()
    assert not torch.equal(backbone(images)[3], backbone(images)[3])
    backbone.eval()
    assert torch.equal(backbone(images)[3], backbone(images)[3])


def test_with_cp_gives_the_same_gradients():
    gradients = []
    for with_cp in (False, True):
        backbone = build(with_cp=with_cp, attn_types=MIXED).train()
        backbone(torch.ones(1, 3, 64, 64))[3].square().sum().backward()
        gradients.append([parameter.grad for parameter in backbone.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_initialised_as_the_authors_do():
    backbone = InLinePVT('tiny')
    assert backbone.block3[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert backbone.pos_embed1.std().item() == pytest.approx(0.02, rel=0.05)
    assert not backbone.block3[0].mlp.fc1.bias.any()
    assert [backbone.patch_embed1.norm.eps, backbone.block1[0].norm1.eps] == [1e-5, 1e-6]


def test_init_cfg_as_a_list():
    backbone = build(init_cfg=[dict(type='Constant', layer='Linear', val=0.5),
                               dict(type='Constant', layer='Conv1d', val=0)])
    backbone.init_weights()
    assert (backbone.block1[0].attn.q.weight == 0.5).all()
    assert not backbone.block1[0].attn.residual[0].weight.any()


def test_softmax_equals_the_quadratic_formula():
    torch.manual_seed(0)
    attention = SoftmaxAttention(32, 2).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in attention.project(x))
    weights = (q @ k.transpose(-2, -1) / 4).softmax(-1)
    expected = attention.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, (3, 4)), expected)


def test_linear_equals_the_quadratic_formula():
    torch.manual_seed(0)
    attention = LinearAttention(32, 2).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in attention.project(x))
    scores = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).transpose(-2, -1)
    expected = attention.proj((scores / scores.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, (3, 4)), expected)


@pytest.mark.parametrize('options, message', [
    (dict(arch='tinny'), r"got 'tinny'; did you mean 'tiny'\?"),
    (dict(arch=dict(embed_dims=(1, 2, 3, 4))), r"exactly the keys .*'num_heads'.*got \['embed_dims'\]"),
    (dict(arch={**NARROW, 'depths': (1, 1)}), r'depths must have 4 values, one per stage, got \(1, 1\)'),
    (dict(arch={**NARROW, 'num_heads': (3, 1, 2, 2)}), 'num_heads must divide embed_dims=32, got 3'),
    (dict(attn_types=('inline',)), 'attn_types must have 4 values'),
    (dict(attn_types='inline'), "attn_types must have 4 values, one per stage, got 'inline'"),
    (dict(attn_types=('inline', 'full', 'inline', 'inline')), "got 'full'"),
    (dict(out_indices=(3, 4)), r'out_indices must be ascending indices in \[0, 4\), got \(3, 4\)'),
    (dict(out_indices=()), 'out_indices'),
    (dict(frozen_stages=5), r'frozen_stages must be in \[-1, 4\], got 5'),
    (dict(drop_path_rate=1.0), r'drop_path_rate must be in \[0, 1\), got 1.0'),
    (dict(pretrain_img_size=-224), 'pretrain_img_size must be a positive int'),
    (dict(pretrain_img_size=(224,)), 'pretrain_img_size'),
])
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_unknown_argument_raises():
    with pytest.raises(TypeError, match='drop_path'):
        build(drop_path=0.1)
