"""Swin, CSwin and DeiT: any size, every option, windows and stripes against an explicit mask."""
import math

import pytest
import torch
import torch.nn.functional as F

from mminline.models import InLineCSwin, InLineDeiT, InLineSwin
from mminline.models.layers import PatchEmbed, StripeBranch, WindowAttention
from mminline.models.pretrained import load_pretrained

PYRAMID = dict(embed_dims=(16, 32, 64, 64), num_heads=(2, 2, 4, 4), depths=(1, 2, 2, 1))
KINDS = {
    'default': ('inline', 'inline', 'softmax', 'softmax'),
    'softmax': ('softmax',) * 4,
    'linear': ('linear',) * 4,
    'per_block': ('linear', ('inline', 'softmax'), ('softmax', 'inline'), 'inline'),
}
FAMILIES = {
    'swin': lambda **options: InLineSwin({**PYRAMID, 'attn_types': KINDS['default']}, **options),
    'cswin': lambda **options: InLineCSwin({**PYRAMID, 'attn_types': KINDS['default']}, **options),
    'deit': lambda **options: InLineDeiT(
        dict(embed_dims=32, num_heads=2, depth=3, pretrain_img_size=64), **{'out_indices': (0, 2), **options}),
}
STRIDES = dict(swin=(4, 8, 16, 32), cswin=(4, 8, 16, 32), deit=(16, 16))


@pytest.mark.parametrize('size', [(448, 448), (447, 321), (65, 33), (2048, 96), (1, 1)], ids=str)
@pytest.mark.parametrize('family', FAMILIES)
def test_any_size_and_every_gradient(family, size):
    torch.manual_seed(0)
    backbone = FAMILIES[family]().train()
    maps = backbone(torch.randn(2, 3, *size))
    assert [m.shape[2:] for m in maps] == [
        (math.ceil(size[0] / s), math.ceil(size[1] / s)) for s in STRIDES[family]]
    assert all(m.is_contiguous() for m in maps)  # mmcv's RoIAlign reads any other layout wrongly
    sum(m.square().mean() for m in maps).backward()
    missing = [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
    assert not missing
    backbone.eval()
    assert all(torch.isfinite(m).all() for m in backbone(torch.randn(2, 3, *size)))


@pytest.mark.parametrize('kinds', KINDS)
@pytest.mark.parametrize('family', ['swin', 'cswin'])
def test_attention_kinds(family, kinds):
    backbone = FAMILIES[family](attn_types=KINDS[kinds])
    maps = backbone(torch.randn(1, 3, 100, 68))
    sum(m.square().mean() for m in maps).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())


@pytest.mark.parametrize('kind', ['softmax', 'linear', ('inline', 'linear', 'softmax')], ids=str)
def test_deit_attention_kinds(kind):
    backbone = FAMILIES['deit'](attn_types=(kind,))
    assert backbone(torch.randn(1, 3, 40, 90))[-1].shape == (1, 32, 3, 6)


@pytest.mark.parametrize('with_cp', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
def test_with_cp_and_batch_independence(family, with_cp):
    torch.manual_seed(0)
    backbone = FAMILIES[family](with_cp=with_cp).train()
    images = torch.randn(3, 3, 52, 90)
    for batch, alone in zip(backbone(images), backbone(images[1:2])):
        assert (batch[1:2] - alone).norm() < 1e-5 * alone.norm()


@pytest.mark.parametrize(('family', 'frozen_stages', 'still_trained'), [
    ('swin', 0, 'layers.0.blocks.0.norm1.weight'), ('swin', 2, 'layers.2.blocks.0.norm1.weight'),
    ('cswin', 0, 'stage1.0.norm1.weight'), ('cswin', 3, 'stage4.0.norm1.weight'),
    ('deit', 0, 'blocks.0.norm1.weight'), ('deit', 2, 'blocks.2.norm1.weight'),
])
def test_frozen_stages(family, frozen_stages, still_trained):
    backbone = FAMILIES[family](frozen_stages=frozen_stages).train()
    names = list(dict(backbone.named_parameters()))
    norms = [name for name in names if name.startswith('norm')]
    first_trained = names.index(still_trained)
    for index, (name, parameter) in enumerate(backbone.named_parameters()):
        if name not in norms:
            assert parameter.requires_grad == (index >= first_trained), name


def explicit_windows(attention, x, hw_shape, shift):
    """Attention token by token: who shares a window, by the definition of padded and shifted windows."""
    height, width = hw_shape
    size = attention.window_size
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij')
    rows, columns = rows.flatten(), columns.flatten()
    padded = [-(-length // size) * size for length in hw_shape]

    def place(position, length):
        """Position in the rolled map, and the side of the roll it came from."""
        return (position - shift) % length, (position < shift).long()

    (row, row_side), (column, column_side) = place(rows, padded[0]), place(columns, padded[1])
    window = torch.stack([row // size, column // size, row_side, column_side])
    together = (window[:, :, None] == window[:, None, :]).all(0)
    offset_row, offset_column = row[:, None] - row[None] + size - 1, column[:, None] - column[None] + size - 1
    index = (offset_row * (2 * size - 1) + offset_column).clamp(0, (2 * size - 1) ** 2 - 1)
    bias = attention.relative_position_bias_table[index].permute(2, 0, 1)
    q, k, v = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in attention.project(x))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias
    weights = scores.masked_fill(~together, float('-inf')).softmax(-1)
    return attention.proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize('hw_shape', [(8, 12), (9, 13), (5, 6), (3, 2), (4, 9), (4, 4)], ids=str)
@pytest.mark.parametrize('shifted', [False, True])
def test_windows_equal_an_explicit_mask(hw_shape, shifted):
    torch.manual_seed(0)
    attention = WindowAttention(16, 2, window_size=4, shifted=shifted).double()
    torch.nn.init.normal_(attention.relative_position_bias_table)
    x = torch.randn(2, hw_shape[0] * hw_shape[1], 16, dtype=torch.float64)
    shift = 2 if shifted and min(hw_shape) > 4 else 0
    expected = torch.cat([explicit_windows(attention, image[None], hw_shape, shift) for image in x])
    torch.testing.assert_close(attention(x, hw_shape), expected)


@pytest.mark.parametrize('hw_shape', [(9, 13), (3, 2), (4, 8)], ids=str)
@pytest.mark.parametrize('vertical', [False, True])
def test_stripes_equal_an_explicit_loop(hw_shape, vertical):
    torch.manual_seed(0)
    height, width = hw_shape
    branch = StripeBranch(16, 2, split_size=4, vertical=vertical).double()
    q, k, v = torch.randn(3, 2, height * width, 16, dtype=torch.float64)
    expected = torch.empty(2, height, width, 16, dtype=torch.float64)
    for start in range(0, width if vertical else height, 4):
        stripe = (slice(None), slice(None), slice(start, start + 4)) if vertical else \
            (slice(None), slice(start, start + 4), slice(None))
        parts = [part.unflatten(1, hw_shape)[stripe] for part in (q, k, v)]
        shape = parts[0].shape[1:3]
        heads = [part.flatten(1, 2).unflatten(-1, (2, 8)).transpose(1, 2) for part in parts]
        weights = (heads[0] @ heads[1].transpose(-2, -1) / 8 ** 0.5).softmax(-1)
        out = (weights @ heads[2]).transpose(1, 2).flatten(2).unflatten(1, shape)
        # The stripe at the border is padded up to its thickness with zeros: no bias beyond the map is seen.
        local = F.conv2d(parts[2].permute(0, 3, 1, 2), branch.get_v.weight, branch.get_v.bias, padding=1, groups=16)
        expected[stripe] = out + local.permute(0, 2, 3, 1)
    torch.testing.assert_close(branch(q, k, v, hw_shape, None), expected.flatten(1, 2))


def test_patches_of_a_padded_image():
    embed = PatchEmbed(3, 8, 4, None)
    x, hw_shape = embed(torch.randn(1, 3, 9, 5))
    assert x.shape == (1, 6, 8)
    assert hw_shape == (3, 2)


@pytest.mark.parametrize('family', ['swin', 'cswin', 'deit'])
def test_official_file(tmp_path, family):
    """The final norm goes to the last output; index tables and masks are left out."""
    source = FAMILIES[family]()
    names = {own: official for official, own in source.official_names().items()}
    weights = {names.get(name, name): torch.randn(value.shape) for name, value in source.named_parameters()
               if name.split('.')[0] not in ('norm0', 'norm1', 'norm2')}
    weights['layers.3.blocks.0.attn.relative_position_index'] = torch.zeros(49, 49)
    torch.save(dict(model=weights), tmp_path / 'official.pth')
    backbone = FAMILIES[family]()
    report = load_pretrained(backbone, str(tmp_path / 'official.pth'))
    last_norm = backbone.norm if family == 'deit' else backbone.norm3
    assert torch.equal(last_norm.weight.data, weights['norm.weight'])
    assert set(report.missing) <= {f'norm{i}.{part}' for i in range(3) for part in ('weight', 'bias')}
    assert report.unexpected == ()


def test_bias_tables_of_another_window_are_resized(tmp_path):
    torch.manual_seed(0)
    source = FAMILIES['swin'](window_size=7)
    torch.save(source.state_dict(), tmp_path / 'window7.pth')
    backbone = FAMILIES['swin'](window_size=12)
    report = load_pretrained(backbone, str(tmp_path / 'window7.pth'))
    name = 'layers.3.blocks.0.attn.relative_position_bias_table'
    assert name in report.resized
    old = source.get_parameter(name)
    new = backbone.get_parameter(name)
    assert new.shape == (23 * 23, 4)
    # The centre, where a token looks at itself, stays the centre.
    torch.testing.assert_close(new[23 * 11 + 11], old[13 * 6 + 6], rtol=0.05, atol=5e-3)


@pytest.mark.parametrize(('build', 'message'), [
    (lambda: InLineSwin('huge'), "arch must be one of .*got 'huge'"),
    (lambda: InLineSwin(window_size=0), 'window_size must be positive, got 0'),
    (lambda: InLineCSwin(split_size=-1), 'split_size must be positive, got -1'),
    (lambda: InLineSwin(attn_types=('inline', 'inline', ('inline', 'softmax'), 'softmax')),
     r"one word or 6, one per block, got \('inline', 'softmax'\)"),
    (lambda: InLineCSwin({**PYRAMID, 'num_heads': (3, 2, 4, 4), 'attn_types': KINDS['default']}),
     'num_heads must divide embed_dims=16, got 3'),
    (lambda: InLineDeiT(out_indices=(12,)), r'out_indices must be ascending indices in \[0, 12\), got \(12,\)'),
    (lambda: InLineDeiT(frozen_stages=13), r'frozen_stages must be in \[-1, 12\], got 13'),
    (lambda: InLineDeiT(drop_path_rate=-0.1), r'drop_path_rate must be in \[0, 1\), got -0.1'),
])
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
