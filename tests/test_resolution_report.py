"""The resolution report as a command on small images, for detection and segmentation, and what it works out."""
import csv
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
from mmengine.config import Config

from mminline.analysis import resolution_report as report
from mminline.analysis.measure import available_bytes, crossover, growth_exponent

ROOT = Path(__file__).parents[1]
DETECTION = ROOT / 'configs/demo/inline_pvt_maskrcnn_shapes.py'
SEGMENTATION = ROOT / 'configs/demo/inline_swin_upernet_shapes.py'
NARROW = dict(embed_dims=(16, 16, 16, 16), num_heads=(1, 1, 1, 1), depths=(1, 1, 1, 1))


def resolution_report(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['resolution_report.py', *map(str, args)])
    runpy.run_path(str(ROOT / 'tools/analysis/resolution_report.py'), run_name='__main__')


def read_rows(path):
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


def test_detection(tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / 'tools/analysis/resolution_report.py', DETECTION, '--sizes', '64', '32', '--seconds',
         '0', '--train-batch', '1', '--device', 'cpu', '--out', tmp_path, '--cfg-options',
         'model.backbone.arch.depths=1,1,1,1', 'model.test_cfg.rcnn.max_per_img=5'],
        env=dict(os.environ, OMP_NUM_THREADS='1'), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 'training step: time' in result.stdout and 'Left out' not in result.stdout
    rows = read_rows(tmp_path / 'table.csv')
    assert [(row['edge'], row['part'], row['attention']) for row in rows] == [
        (edge, part, kind) for edge in ('32', '64') for part in report.PARTS for kind in report.KINDS]
    memory = {(row['edge'], row['part'], row['attention']): int(row['peak_bytes']) for row in rows}
    for row in rows:
        assert float(row['seconds']) > 0 and (row['attention'] != 'inline' or float(row['ratio_to_inline']) == 1)
        assert row['attn_types'] == str((row['attention'],) * 4)
    for kind in report.KINDS:
        assert memory['64', 'backbone', kind] > memory['32', 'backbone', kind]
        assert memory['64', 'training step', kind] > memory['64', 'backbone', kind] > 100_000
    picture = cv2.imread(str(tmp_path / 'report.png'))
    assert picture.shape[0] > 900 and picture.shape[1] > 1300
    assert len(set(map(tuple, picture.reshape(-1, 3)[::7]))) > 20


def test_segmentation_and_limits(tmp_path, monkeypatch, capsys):
    """Batch norm and crops of training are no obstacle; what does not fit is named, and its size and all larger ones
    are not in the table."""
    options = ['--cfg-options', 'model.backbone.arch.depths=1,1,1,1']
    resolution_report(monkeypatch, SEGMENTATION, '--sizes', 32, 64, 96, '--attention', 'inline', 'softmax', '--parts',
                      'inference', 'training step', '--seconds', 0, '--device', 'cpu', '--max-memory', 0.001,
                      '--out', tmp_path, *options)
    rows = read_rows(tmp_path / 'table.csv')
    assert {row['edge'] for row in rows if row['part'] == 'training step'} == {'32'}
    assert {row['images'] for row in rows if row['part'] == 'training step'} == {'2'}
    assert {row['attn_types'] for row in rows} == {
        "('inline', 'inline', 'inline', 'softmax')", "('softmax', 'softmax', 'softmax', 'softmax')"}
    out = capsys.readouterr().out
    for edge in (64, 96):
        assert f'Left out: softmax, training step, at {edge}x{edge}: it would need about' in out


@pytest.mark.parametrize('args, message', [
    (['nowhere.py'], 'no such config file'),
    ([DETECTION, '--sizes', '100'], "expected a multiple of 32 pixels, got '100'"),
    ([DETECTION, '--attention', 'quadratic'], "invalid choice: 'quadratic'"),
    ([DETECTION, '--cfg-options', 'model.backbone.attn_types=linear,linear,linear,softmax'],
     'the config has no inline attention'),
    ([DETECTION, '--cfg-options', 'model.backbone.type=ResNet'], 'the report is for the backbones mminline.InLinePVT'),
])
def test_refused(args, message, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        resolution_report(monkeypatch, *args, '--out', tmp_path / 'out')
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


# ---- variants -----------------------------------------------------------------------------------------
@pytest.mark.parametrize('backbone, expected', [
    (dict(type='mminline.InLinePVT'), ('linear',) * 4),
    (dict(type='mminline.InLineSwin'), ('linear', 'linear', 'linear', 'softmax')),
    (dict(type='mminline.InLineSwin', arch='base'), (
        'linear', 'linear', ('linear',) * 2 + ('softmax',) * 16, 'softmax')),
    (dict(type='mminline.InLineDeiT'), ('linear',)),
    (dict(type='mminline.InLineCSwin', attn_types=('inline', 'linear', 'softmax', 'softmax')), (
        'linear', 'linear', 'softmax', 'softmax')),
])
def test_only_inline_blocks_get_another_attention(backbone, expected):
    assert report.replace_inline(report.configured_attn_types(backbone), 'linear') == expected


def test_models_find_objects_and_keep_their_weights():
    cfg = Config.fromfile(DETECTION)
    cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint='gone.pth')
    cfg.model.backbone.arch.depths = (1, 1, 1, 1)
    subject = report.Subject(report.make_variants(cfg, ['softmax'])['softmax'], torch.device('cpu'))
    before = {name: value.clone() for name, value in subject.model.named_parameters()}
    subject.work('training step', 32, 1)()
    assert all(torch.equal(before[name], value) for name, value in subject.model.named_parameters())
    [sample] = subject.work('inference', 128, 1)()
    assert len(sample.pred_instances) > 20 and sample.pred_instances.masks.shape[1:] == (128, 128)
    assert set(sample.pred_instances.labels.tolist()) == {0}


@pytest.mark.parametrize('name, softmax', [
    ('inline_swin_upernet', 'softmax: in windows of 7 tokens'),
    ('inline_cswin_upernet', 'softmax: in stripes of 1, 2, 7 tokens, stage 4 on the whole map'),
    ('inline_deit_upernet', 'softmax: every token to every token')])
def test_softmax_is_called_what_it_is(name, softmax):
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    attn_types = report.configured_attn_types(cfg.model.backbone)
    with torch.device('meta'):
        backbone = report.FAMILIES[cfg.model.backbone.type](arch=cfg.model.backbone.arch)
    assert report.describe('softmax', backbone, attn_types) == softmax
    inline = report.describe('inline', backbone, attn_types)
    assert inline == 'inline' or inline.startswith('inline: the last stages stay softmax')


# ---- figures ------------------------------------------------------------------------------------------
def row(kind, edge, seconds, peak=1):
    return report.Row('', '', kind, '', 'backbone', edge, 1, seconds, 1., peak)


def test_growth_and_crossover():
    rows = [row('inline', 256, 2.), row('inline', 512, 1.), row('inline', 1024, 4.), row('inline', 2048, 16.),
            row('softmax', 512, .5), row('softmax', 1024, 8.)]
    assert report.growth(rows, 'inline', 'backbone', 'seconds') == pytest.approx(1)
    assert report.growth(rows, 'softmax', 'backbone', 'seconds') == pytest.approx(2)
    assert report.growth(rows, 'linear', 'backbone', 'seconds') is None
    assert report.find_crossover(rows, 'backbone', 'seconds') == pytest.approx(512 * 2 ** 0.5)
    assert report.find_crossover(rows, 'inference', 'seconds') is None
    assert 'softmax is faster up to 724 px' in report.sentences(rows)[0]


@pytest.mark.parametrize('ratios, expected', [({1: 2., 4: 3.}, 0), ({1: .5, 4: .9}, math.inf), ({1: .5, 4: 2.}, 2)])
def test_crossover(ratios, expected):
    assert crossover(ratios) == pytest.approx(expected)


def test_estimates():
    assert growth_exponent([(1, 3), (4, 12), (16, 48)]) == pytest.approx(1)
    limits = report.Limits(memory=1000, call_seconds=10)
    assert report.reason_to_leave_out([], 4096, limits) is None
    assert report.reason_to_leave_out([row('inline', 512, 1., 100)], 1024, limits) is None
    assert 'about 16 s' in report.reason_to_leave_out([row('softmax', 512, 1., 1)], 1024, limits)
    twice = [row('linear', 256, 1., 10), row('linear', 512, 1., 160)]  # 16 times for 4 times the pixels
    assert report.estimate(twice, 'peak_bytes', 1024) == pytest.approx(2560)
    assert report.estimate(twice, 'seconds', 1024) == pytest.approx(4)  # with the pixels at least
    assert 'memory' in report.reason_to_leave_out(twice, 1024, limits)


def test_available_memory():
    assert 2 ** 26 < available_bytes(torch.device('cpu')) < 2 ** 46
