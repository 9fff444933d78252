"""Multiply-adds and parameters: against figures from elsewhere, against counts by hand, and the command line."""
import json
import os
import re
import runpy
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.hub import get_config
from mmengine.registry import MODELS
from torch import nn

from mminline.analysis.flops import analyse_config, analyse_model, count_multiply_adds, default_shape
from mminline.analysis.model_zoo import PRETRAINED

ROOT = Path(__file__).parents[1]
MASK_RCNN = ROOT / 'configs/inline_pvt_maskrcnn.py'
NUM_CLASSES = 1000


def on_meta(backbone: str, **settings) -> nn.Module:
    with torch.device('meta'):
        return nn.Sequential(OrderedDict(backbone=MODELS.build(dict(type=f'mminline.{backbone}', **settings))))


@pytest.fixture(scope='module')
def mask_rcnn():
    return analyse_config(Config.fromfile(MASK_RCNN), (64, 96))


def by_kind(complexity, value: str = 'multiply_adds') -> dict:
    return {part.kind: getattr(part, value) for part in complexity.parts if part.module == 'backbone'}


@pytest.mark.parametrize('reported', PRETRAINED, ids=lambda entry: f'{entry.backbone}-{entry.arch}-{entry.image_size}')
def test_backbone_against_the_paper(reported):
    """With a classifier, as there; its figures have two or three digits."""
    model = on_meta(reported.backbone, arch=reported.arch, **dict(reported.settings))
    size = reported.image_size
    complexity = analyse_model(model, (size, size), with_growth=False)
    classifier = NUM_CLASSES * model(torch.empty(1, 3, 32, 32, device='meta'))[-1].shape[1]
    assert (complexity.multiply_adds + classifier) / 1e9 == pytest.approx(reported.multiply_adds, rel=0.03)
    assert (complexity.parameters + classifier) / 1e6 == pytest.approx(reported.parameters, rel=0.03)


# What is known of models with softmax attention: config, image, multiply-adds in G, parameters in M.
SOFTMAX = {
    'MMDetection counts PVT-T, Mask R-CNN': ('inline_pvt_maskrcnn', (800, 1280), 240, 32.9),
    'reported with Swin, Cascade Mask R-CNN': ('inline_swin_cascade', (800, 1280), 745, 86),
    'reported with Swin, UperNet': ('inline_swin_upernet', (512, 2048), 945, 60),
}


@pytest.mark.parametrize('case', SOFTMAX)
def test_softmax_models(case):
    name, shape, multiply_adds, parameters = SOFTMAX[case]
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    cfg.model.backbone.attn_types = ['softmax'] * 4
    complexity = analyse_config(cfg, shape, with_growth=False)
    assert complexity.multiply_adds / 1e9 == pytest.approx(multiply_adds, rel=0.01)
    assert complexity.parameters / 1e6 == pytest.approx(parameters, rel=0.01)
    if name == 'inline_pvt_maskrcnn':
        cost = {module: sum(part.multiply_adds for part in complexity.parts if part.module == module) / 1e9
                for module in ('backbone', 'neck', 'rpn_head')}
        assert cost['backbone'] == pytest.approx(69.5, rel=0.01)
        assert cost['neck'] + cost['rpn_head'] == pytest.approx(102.8, rel=0.01)


def test_parts_by_hand():
    """One block of each kind counted by hand: N tokens, C channels, d of them per head."""
    channels, heads, ratio, size = 24, 3, 2, 8
    tokens, head_dim = size * size, channels // heads
    arch = dict(embed_dims=(channels, 8, 8, 8), num_heads=(heads, 1, 1, 1), depths=(1, 1, 1, 1),
                mlp_ratios=(ratio, 1, 1, 1))
    model = on_meta('InLinePVT', arch=arch, out_indices=(0, ), pretrain_img_size=32)
    kinds = by_kind(analyse_model(model, (4 * size, 4 * size)))
    kernels = channels * head_dim + 9 * channels * head_dim  # two grouped 1x1 convolutions of one token
    assert kinds == {
        'patch embedding, merging': tokens * channels * 3 * 4 * 4,
        'projections': 4 * tokens * channels * channels,
        'attention, global': 2 * tokens * channels * head_dim,
        'attention, local': 9 * tokens * channels + kernels,
        'MLP': 2 * tokens * channels * ratio * channels,
        'other': 0,
    }


@pytest.mark.parametrize('backbone, kind, growth', [
    ('InLinePVT', 'inline', 2), ('InLinePVT', 'linear', 2), ('InLinePVT', 'softmax', 4),
    ('InLineSwin', 'softmax', 2), ('InLineCSwin', 'inline', 2),
])
def test_growth_of_global_attention(backbone, kind, growth):
    """From N to 2N tokens: linear kinds and windows double, global softmax becomes four times as expensive."""
    model = on_meta(backbone, attn_types=(kind, ) * 4)
    complexity = analyse_model(model, (448, 448))
    assert by_kind(complexity, 'growth')['attention, global'] == pytest.approx(growth, rel=0.01)
    assert by_kind(complexity, 'growth')['MLP'] == 2


@pytest.mark.parametrize('backbone', ['InLinePVT', 'InLineSwin', 'InLineCSwin', 'InLineDeiT'])
def test_every_multiplication_has_a_kind(backbone):
    kinds = by_kind(analyse_model(on_meta(backbone), (64, 96)))
    assert kinds.pop('other') == 0
    assert len(kinds) == 5 and min(kinds.values()) > 0


@pytest.mark.parametrize('backend', ['aten', 'cuda', 'reference'])
def test_same_number_for_every_backend(backend, monkeypatch):
    model = on_meta('InLinePVT')
    expected = count_multiply_adds(model, (64, 64))
    monkeypatch.setenv('MMINLINE_BACKEND', backend)
    assert count_multiply_adds(model, (64, 64)) == expected
    assert os.environ['MMINLINE_BACKEND'] == backend


def test_heads_do_not_depend_on_the_image(mask_rcnn):
    """The RoI heads get the same number of boxes at any size; the RPN's cost goes with the pixels."""
    growth = {part.module: part.growth for part in mask_rcnn.parts if part.module != 'backbone'}
    assert growth == pytest.approx(
        {'neck': 2, 'rpn_head': 2, 'roi_head.bbox_head': 1, 'roi_head.mask_head': 1}, rel=0.01)


def test_cascade_counts_every_stage():
    heads = []
    for name in ('cascade_rcnn/cascade-mask-rcnn', 'mask_rcnn/mask-rcnn'):
        complexity = analyse_config(get_config(f'mmdet::{name}_r50_fpn_1x_coco.py'), (64, 64), with_growth=False)
        heads.append({part.module: part.multiply_adds for part in complexity.parts})
    cascade, single = heads
    # Boxes of a cascade are of no class: four outputs per RoI, not four per class.
    fewer_outputs = 1000 * 1024 * (4 * 80 - 4)
    assert cascade['roi_head.bbox_head'] == 3 * (single['roi_head.bbox_head'] - fewer_outputs)
    assert cascade['roi_head.mask_head'] == 3 * single['roi_head.mask_head']


def test_unknown_roi_head_is_refused():
    cfg = get_config('mmdet::double_heads/dh-faster-rcnn_r50_fpn_1x_coco.py')
    with pytest.raises(NotImplementedError, match='got DoubleHeadRoIHead'):
        analyse_config(cfg)


@pytest.mark.parametrize('scope, model, pipeline, expected', [
    ('mmdet', {}, [dict(type='Resize', scale=(1333, 800))], (800, 1280)),
    ('mmdet', {}, [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(176, 144))], (144, 176)),
    ('mmdet', {}, [], (800, 1280)),
    ('mmseg', dict(data_preprocessor=dict(size=(640, 320))), [dict(type='Resize', scale=(2048, 512))], (640, 320)),
    ('mmseg', {}, [], (512, 512)),
])
def test_default_shape(scope, model, pipeline, expected):
    assert default_shape(ConfigDict(default_scope=scope, model=model, test_pipeline=pipeline)) == expected


# ---- the command line ---------------------------------------------------------------------------------
def get_flops(monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, 'argv', ['get_flops.py', *map(str, args)])
    runpy.run_path(str(ROOT / 'tools/analysis/get_flops.py'), run_name='__main__')


def test_table_and_last_line(mask_rcnn, monkeypatch, capsys):
    get_flops(monkeypatch, MASK_RCNN, '--shape', 64, 96)
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert 'One image of 96x64 pixels' in lines[0]
    for label in ('backbone', 'attention, global', 'neck', 'rpn_head', 'roi_head.mask_head'):
        assert any(label in line for line in lines), label
    assert max(map(len, lines)) <= 80
    match = re.fullmatch(r'total: (\d+\.\d) G multiply-adds, (\d+\.\d) M parameters', lines[-1])
    assert float(match[1]) == pytest.approx(mask_rcnn.multiply_adds / 1e9, abs=0.05)
    assert float(match[2]) == pytest.approx(mask_rcnn.parameters / 1e6, abs=0.05)


def test_json(mask_rcnn, monkeypatch, capsys):
    get_flops(monkeypatch, MASK_RCNN, '--shape', 64, 96, '--json', '--cfg-options', 'model.backbone.arch=small')
    result = json.loads(capsys.readouterr().out)
    assert result['shape'] == [64, 96]
    assert result['multiply_adds'] == sum(part['multiply_adds'] for part in result['parts'])
    assert result['parameters'] == sum(part['parameters'] for part in result['parts'])
    assert result['parameters'] > mask_rcnn.parameters


@pytest.mark.parametrize('args, message', [
    (['nowhere.py'], 'no such config file'),
    ([MASK_RCNN, '--shape', 0, 64], r'positive height and width in pixels, got \(0, 64\)'),
    ([MASK_RCNN, '--cfg-options', 'model.backbone.type=mminline.InLinePTV'], 'did you mean mminline.InLinePVT'),
    ([MASK_RCNN, '--cfg-options', 'model.neck.type=ChannelMaper'], 'did you mean ChannelMapper'),
    ([MASK_RCNN, '--cfg-options', 'model.backbone.arch=smal'], "did you mean 'small'"),
])
def test_refused(args, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        get_flops(monkeypatch, *args)
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)
