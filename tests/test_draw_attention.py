"""Attention maps: weights times values give the layer's output, in every family; and the command."""
import os
import runpy
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from mminline.analysis import attention_maps
from mminline.analysis.attention_maps import Sight, explain, record_calls, weight_maps
from mminline.datasets import make_shapes
from mminline.models import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin
from mminline.ops import inline_attention

ROOT = Path(__file__).parents[1]
DETECTION = ROOT / 'configs/demo/inline_pvt_maskrcnn_shapes.py'
SEGMENTATION = ROOT / 'configs/demo/inline_swin_upernet_shapes.py'

PYRAMID = dict(embed_dims=(16, 16, 32, 32), num_heads=(2, 2, 2, 2), depths=(2, 2, 1, 1))
INLINE, LINEAR, SOFTMAX = (('inline',) * 4, ('linear',) * 4, ('softmax',) * 4)
# Backbone, and the (stage, block) to look at in an image of 90 x 70 pixels.
CASES = {
    'pvt inline': (lambda: InLinePVT({**PYRAMID, 'mlp_ratios': (2,) * 4}), 0, 1),
    'pvt inline, not centred, not local': (
        lambda: InLinePVT({**PYRAMID, 'mlp_ratios': (2,) * 4}, center=False, local_term=False), 1, 0),
    'pvt linear': (lambda: InLinePVT({**PYRAMID, 'mlp_ratios': (2,) * 4}, attn_types=LINEAR), 0, 0),
    'pvt reduced softmax': (lambda: InLinePVT({**PYRAMID, 'mlp_ratios': (2,) * 4}, attn_types=SOFTMAX), 1, 1),
    'pvt softmax': (lambda: InLinePVT({**PYRAMID, 'mlp_ratios': (2,) * 4}, attn_types=SOFTMAX), 3, 0),
    'swin inline': (lambda: InLineSwin({**PYRAMID, 'attn_types': INLINE}), 0, 0),
    'swin windows': (lambda: InLineSwin({**PYRAMID, 'attn_types': SOFTMAX}), 0, 0),
    'swin shifted windows': (lambda: InLineSwin({**PYRAMID, 'attn_types': SOFTMAX}), 0, 1),
    'cswin inline': (lambda: InLineCSwin({**PYRAMID, 'attn_types': INLINE}), 0, 0),
    'cswin linear': (lambda: InLineCSwin({**PYRAMID, 'attn_types': LINEAR}), 1, 0),
    'cswin stripes': (lambda: InLineCSwin({**PYRAMID, 'attn_types': SOFTMAX}, split_size=3), 2, 0),
    'deit inline': (lambda: InLineDeiT(dict(embed_dims=32, num_heads=2, depth=2, pretrain_img_size=64),
                                       out_indices=(1,)), 0, 1),
    'deit softmax': (lambda: InLineDeiT(dict(embed_dims=32, num_heads=2, depth=2, pretrain_img_size=64),
                                        attn_types=('softmax',), out_indices=(1,)), 0, 1),
}


def build(case):
    make, stage, block = CASES[case]
    torch.manual_seed(0)
    backbone = make().eval()
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if '.weight' in name and parameter.dim() > 1:
                parameter.mul_(4)  # random weights start so small that all queries are alike
            elif 'relative_position_bias_table' in name:
                parameter.normal_()
    return backbone, stage, block


@pytest.mark.parametrize('case', CASES)
def test_weights_times_values_are_the_output(case):
    backbone, stage, block = build(case)
    calls = record_calls(backbone, torch.randn(1, 3, 90, 70), stage, block)
    height, width = calls[0].arguments['hw_shape']
    corners = [0, width - 1, (height - 1) * width, height * width - 1]
    queries = torch.tensor([*corners, height // 2 * width + width // 2])
    rows, error = explain(calls, queries)
    assert error < 1e-5
    maps = weight_maps(rows)
    if 'not centred' not in case:
        last_key = maps.get('global', maps.get('weights')).sum(axis=(1, 2))
        assert np.allclose(last_key, 1, atol=0.2 if 'deit' in case else 1e-5)  # DeiT's class token has the rest
    patch = 4 if 'reduced' in case else 1
    for values in maps.values():
        assert values.shape == (5, height // patch, width // patch)
    assert not any(module._forward_hooks for module in backbone.modules())  # the backbone is as it was


def test_padding_is_no_part_of_the_map():
    """A backbone that was told an image's valid size attends inside of it only."""
    backbone, stage, block = build('deit inline')
    image = torch.randn(1, 3, 96, 96)
    image.mminline_valid_size = [(64, 48)]
    calls = record_calls(backbone, image, stage, block)
    assert calls[0].arguments['hw_shape'] == (4, 3)
    rows, error = explain(calls, torch.tensor([0, 11]))
    assert error < 1e-5 and weight_maps(rows)['sum'].shape == (2, 4, 3)


def test_parts():
    """The local part is where the query's neighbours are, and nowhere else; the parts are of one head or of all."""
    backbone, stage, block = build('pvt inline')
    calls = record_calls(backbone, torch.randn(1, 3, 90, 70), stage, block)
    height, width = calls[0].arguments['hw_shape']
    rows, _ = explain(calls, torch.tensor([width + 1, 0]))
    maps = weight_maps(rows)
    assert list(maps) == ['global', 'local', 'sum']
    inside = np.zeros((height, width), bool)
    inside[:3, :3] = True
    assert (maps['local'][0][inside] != 0).all() and (maps['local'][0][~inside] == 0).all()
    assert (maps['local'][1] != 0).sum() == 4  # of a corner
    assert np.allclose(maps['sum'], maps['global'] + maps['local'])
    heads = [weight_maps(rows, head)['sum'] for head in range(2)]
    assert np.allclose(np.mean(heads, axis=0), maps['sum'], atol=1e-6)
    with pytest.raises(ValueError, match=r'head must be in 0 ... 1, got 2'):
        weight_maps(rows, 2)


def test_weights_are_the_derivatives_of_the_op():
    """The op is linear in v: what it says about d out / d v are its weights."""
    backbone, stage, block = build('pvt inline')
    [call] = record_calls(backbone.double(), torch.randn(1, 3, 36, 28).double(), stage, block)
    layer, x, hw_shape = call.layer, call.arguments['x'], call.arguments['hw_shape']
    q, k, v = (part.detach() for part in layer.project(x))
    v.requires_grad_()
    out = inline_attention(q, k, v, 2, local_weight=layer.residual(x.mean(1)), hw_shape=hw_shape)
    query = 3 * hw_shape[1] + 2
    [derivatives] = torch.autograd.grad(out[0, query].sum(), v)  # channels do not mix: (1, N, C)
    [rows], _ = explain([call], torch.tensor([query]))
    expected = derivatives[0].detach().unflatten(1, (2, -1)).mean(2).mean(1).reshape(hw_shape)
    assert np.allclose(weight_maps([rows])['sum'][0], expected, atol=1e-12)


def test_other_weights_are_refused():
    backbone, stage, block = build('pvt inline')
    [call] = record_calls(backbone, torch.randn(1, 3, 64, 64), stage, block)
    with pytest.raises(ArithmeticError, match='differ from the output of InLineAttention by'):
        explain([call._replace(output=call.output * 1.1)], torch.tensor([5]))


@pytest.mark.parametrize('stage, block, message', [
    (4, 0, 'stage must be in 0 ... 3, got 4'), (-1, 0, 'got -1'), (2, 1, 'block must be in 0 ... 0 in stage 2, got 1')])
def test_block_that_is_not_there(stage, block, message):
    backbone, _, _ = build('pvt inline')
    with pytest.raises(ValueError, match=message):
        attention_maps.find_block(backbone, stage, block)


# ---- pixels and tokens --------------------------------------------------------------------------------
@pytest.mark.parametrize('config, size', [(DETECTION, (100, 300)), (DETECTION, (200, 70)), (SEGMENTATION, (65, 130))],
                         ids=['wide, resized', 'tall, resized', 'not resized'])
def test_pixel_lands_in_its_token(tmp_path, config, size):
    """A white spot in a black image comes out of the pipeline in the token that is said."""
    cfg = Config.fromfile(config)
    height, width = size
    with attention_maps.DefaultScope.overwrite_default_scope(cfg.default_scope):
        preprocessor = MODELS.build(cfg.model.data_preprocessor)
    for x, y in ((10, 13), (width - 9, height - 7), (width // 2, height // 3)):
        image = np.zeros((height, width, 3), np.uint8)
        image[y - 1:y + 2, x - 1:x + 2] = 255
        cv2.imwrite(str(tmp_path / 'spot.png'), image)
        batch, original, scale = attention_maps.load_image(cfg, preprocessor, tmp_path / 'spot.png')
        assert (original == image).all()
        input_height, input_width = batch.shape[2:]
        sight = Sight(original, scale, 8, (-(-input_height // 8), -(-input_width // 8)))
        brightest = batch[0].sum(0).argmax().item()
        row, column = divmod(sight.token_at(x, y), sight.hw_shape[1])
        assert abs(row * 8 + 3.5 - brightest // input_width) <= 5
        assert abs(column * 8 + 3.5 - brightest % input_width) <= 5


# ---- the command --------------------------------------------------------------------------------------
@pytest.fixture(scope='module')
def given(tmp_path_factory):
    """A folder with image.jpg, and the checkpoints det.pth and seg.pth of the demo's models as they begin."""
    folder = tmp_path_factory.mktemp('given')
    make_shapes(folder / 'shapes', num_images=2)
    image = next((folder / 'shapes/coco').rglob('*.jpg'))
    cv2.imwrite(str(folder / 'image.jpg'), cv2.imread(str(image))[:128, :128])
    for name, config in (('det', DETECTION), ('seg', SEGMENTATION)):
        torch.manual_seed(0)
        backbone = MODELS.build({**Config.fromfile(config).model.backbone, 'init_cfg': None})
        torch.save(dict(state_dict={f'backbone.{key}': value for key, value in backbone.state_dict().items()}),
                   folder / f'{name}.pth')
    return folder


def test_command(given, tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / 'tools/analysis/draw_attention.py', DETECTION, given / 'det.pth', given / 'image.jpg',
         '--stage', '1', '--block', '1', '--query', '30,40', '100,2', '--device', 'cpu', '--out', tmp_path],
        env=dict(os.environ, OMP_NUM_THREADS='1'), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 'InLineAttention, a map of 20x20 tokens: weights times values give its output to' in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'image_stage1_block1.png', *(f'image_stage1_block1_{part}.npy' for part in ('global', 'local', 'sum'))]
    maps = {part: np.load(tmp_path / f'image_stage1_block1_{part}.npy') for part in ('global', 'local', 'sum')}
    assert maps['global'].shape == (2, 20, 20)
    assert np.allclose(maps['global'].sum(axis=(1, 2)), 1, atol=1e-4)
    assert [(part != 0).sum() for part in maps['local']] == [9, 6]  # the second query is at the upper border
    row, column = np.argwhere(maps['local'][0]).mean(axis=0)
    scale = 144 / 128  # of the test pipeline
    assert abs(row - (40 * scale / 8 - 0.5)) <= 0.5 and abs(column - (30 * scale / 8 - 0.5)) <= 0.5
    picture = cv2.imread(str(tmp_path / 'image_stage1_block1.png'))
    assert picture.shape[0] > 700 and picture.shape[1] > 1500
    blue, red = picture[..., 0].astype(int), picture[..., 2].astype(int)
    assert (red - blue > 60).sum() > 1000 and (blue - red > 60).sum() > 1000  # weights of both signs


def draw_attention(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['draw_attention.py', *map(str, args)])
    runpy.run_path(str(ROOT / 'tools/analysis/draw_attention.py'), run_name='__main__')


def test_windows_of_a_segmentor(given, tmp_path, monkeypatch):
    draw_attention(monkeypatch, SEGMENTATION, given / 'seg.pth', given / 'image.jpg', '--stage', 0, '--block', 1,
                   '--head', 0, '--query', '64,64', '--out', tmp_path, '--device', 'cpu', '--cfg-options',
                   'model.backbone.attn_types=softmax,softmax,softmax,softmax')
    weights = np.load(tmp_path / 'image_stage0_block1_weights.npy')
    assert weights.shape == (1, 32, 32)
    assert weights.sum() == pytest.approx(1, abs=1e-5)
    rows, columns = np.nonzero(weights[0])
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 16, 10, 16)  # windows of 7, shifted by 3
    assert (tmp_path / 'image_stage0_block1.png').stat().st_size > 20_000


@pytest.mark.parametrize('change, message', [
    (dict(config='nowhere.py'), 'no such config file'),
    (dict(checkpoint='gone.pth'), 'gone.pth'),
    (dict(checkpoint='{given}/seg.pth'), 'these weights do not fit InLinePVT'),
    (dict(image='gone.jpg'), 'gone.jpg cannot be read as an image'),
    (dict(image='{given}/half.jpg'), 'half.jpg cannot be read as an image'),
    (dict(query='500,3'), 'inside the image of 128x128 pixels, got 500,3'),
    (dict(query='3'), "expected X,Y in pixels, got '3'"),
    (dict(options=['--stage', '7']), 'stage must be in 0 ... 3, got 7'),
    (dict(options=['--head', '9']), 'head must be in 0 ... 0, got 9'),
], ids=str)
def test_refused(given, tmp_path, monkeypatch, capsys, change, message):
    (given / 'half.jpg').write_bytes((given / 'image.jpg').read_bytes()[:300])
    args = dict(config=DETECTION, checkpoint=given / 'det.pth', image=given / 'image.jpg', query='30,40', options=[])
    args.update({key: value.format(given=given) if isinstance(value, str) else value
                 for key, value in change.items()})
    with pytest.raises(SystemExit) as end:
        draw_attention(monkeypatch, args['config'], args['checkpoint'], args['image'], '--query', args['query'],
                       '--out', tmp_path / 'out', '--device', 'cpu', *args['options'])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
