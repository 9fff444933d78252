"""The parts of the demo: scores, curves, pictures, and its exit status; and a short one as a whole."""
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.structures import PixelData
from mmseg.evaluation import IoUMetric
from mmseg.structures import SegDataSample
from rich.console import Console

from mminline.analysis import curves, pictures, scores

ROOT = Path(__file__).parents[1]
RESULTS = {
    'coco/bbox_mAP': 0.81, 'coco/bbox_mAP_50': 0.953, 'coco/bbox_mAP_75': 0.902,
    'coco/segm_mAP': 0.79, 'coco/segm_mAP_50': 0.951, 'coco/segm_mAP_75': 0.888,
}
SEGMENTATION_RESULTS = {'aAcc': 97.12, 'mIoU': 86.4, 'mAcc': 91.05, 'time': 0.1}
METAINFO = dict(classes=('circle', 'square'), palette=[(255, 0, 0), (0, 0, 255)])


@pytest.fixture(scope='module')
def demo():
    spec = importlib.util.spec_from_file_location('demo', ROOT / 'tools/demo.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- scores -------------------------------------------------------------------------------------------
def test_latest_test_results_are_read(tmp_path):
    for timestamp, value in (('20260102_000000', 0.6), ('20260101_000000', 0.5)):
        folder = tmp_path / timestamp
        folder.mkdir()
        (folder / f'{timestamp}.json').write_text(json.dumps({'coco/bbox_mAP': value}))
        (folder / 'other.json').write_text('not results')
    assert scores.read_test_results(tmp_path) == {'coco/bbox_mAP': 0.6}


def test_missing_test_results_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match='no results of a test'):
        scores.read_test_results(tmp_path)


def printed_words(results, scope):
    """The words in each line of the table of scores."""
    output = io.StringIO()
    Console(file=output, width=80).print(scores.score_table(results, scope, title='Scores'))
    return [re.findall(r'[\w.]+', line) for line in output.getvalue().splitlines()]


def test_score_table():
    words = printed_words(RESULTS, 'mmdet')
    assert ['mAP', 'AP50', 'AP75'] in words
    assert ['box', '0.810', '0.953', '0.902'] in words
    assert ['mask', '0.790', '0.951', '0.888'] in words


def test_score_table_turns_percent_into_fractions():
    words = printed_words(SEGMENTATION_RESULTS, 'mmseg')
    assert ['mIoU', 'mAcc', 'aAcc'] in words
    assert ['label', 'map', '0.864', '0.910', '0.971'] in words


def test_what_mmsegmentation_reports_is_understood():
    """Its metric, on one image whose scores are known: IoU 1/2 and 2/3, accuracy 1/2 and 1, 3 of 4 pixels right."""
    metric = IoUMetric()
    metric.dataset_meta = METAINFO
    metric.process({}, [segmentation_sample([[0, 0], [1, 1]], [[0, 1], [1, 1]]).to_dict()])
    results = metric.evaluate(size=1)
    row, = scores.REPORTED['mmseg'].values()
    fractions = {column: score.fraction(results) for column, score in row.items()}
    assert fractions == pytest.approx(dict(mIoU=7 / 12, mAcc=0.75, aAcc=0.75), abs=1e-4)


def test_score_that_was_not_reported_is_an_error():
    with pytest.raises(ValueError, match='no coco/segm_mAP was reported, only: coco/bbox_mAP'):
        scores.too_low({'coco/bbox_mAP': 0.8}, 'mmdet', 0.75)


def test_unknown_toolbox_is_an_error():
    with pytest.raises(ValueError, match="mmdet, mmseg, got default_scope='mmpose'"):
        scores.main_scores('mmpose')


@pytest.mark.parametrize('minimum, labels', [(0.79, []), (0.8, ['mask']), (0.9, ['box', 'mask'])])
def test_scores_below_the_minimum_are_named(minimum, labels):
    sentences = scores.too_low(RESULTS, 'mmdet', minimum)
    assert [sentence.split()[0] for sentence in sentences] == labels


@pytest.mark.parametrize('minimum, labels', [(0.86, []), (0.87, ['label map mIoU'])])
def test_minimum_for_percent_is_a_fraction(minimum, labels):
    sentences = scores.too_low(SEGMENTATION_RESULTS, 'mmseg', minimum)
    assert [sentence.partition(' is ')[0] for sentence in sentences] == labels


def test_nan_is_too_low():
    sentence, = scores.too_low({**RESULTS, 'coco/bbox_mAP': float('nan')}, 'mmdet', 0.0)
    assert sentence.startswith('box mAP is nan')


# ---- curves -------------------------------------------------------------------------------------------
def training_record(iteration, loss):
    return dict(lr=0.1, loss=loss, loss_cls=loss / 2, iter=iteration, step=iteration)


def write_scalars(work_dir, timestamp, records, rest=''):
    folder = work_dir / timestamp / 'vis_data'
    folder.mkdir(parents=True)
    lines = [json.dumps(record) + '\n' for record in records]
    (folder / 'scalars.json').write_text(''.join(lines) + rest)


def test_scores_get_the_iteration_they_were_measured_at(tmp_path):
    write_scalars(tmp_path, '1', [
        training_record(50, 2.0), training_record(100, 1.0), {'coco/bbox_mAP': 0.3, 'step': 1},
        training_record(150, 0.5), training_record(200, 0.2), {'coco/bbox_mAP': 0.6, 'step': 2}])
    records = curves.read_scalars(tmp_path)
    assert [(r['iter'], r['coco/bbox_mAP']) for r in records if 'coco/bbox_mAP' in r] == [(100, 0.3), (200, 0.6)]
    assert [(r['iter'], r['loss']) for r in records if 'loss' in r] == [(50, 2.0), (100, 1.0), (150, 0.5), (200, 0.2)]


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    write_scalars(tmp_path, '20260101_000000', [training_record(i, 1.0) for i in (10, 20, 30, 40)],
                  rest='{"lr": 0.')  # killed here, and started again from iteration 20
    write_scalars(tmp_path, '20260102_000000', [training_record(i, 0.5) for i in (30, 40, 50)])
    write_scalars(tmp_path, '20260103_000000', [])  # complete already
    records = curves.read_scalars(tmp_path)
    assert [(r['iter'], r['loss']) for r in records] == [(10, 1.0), (20, 1.0), (30, 0.5), (40, 0.5), (50, 0.5)]


@pytest.mark.parametrize('records', [None, [], [{'coco/bbox_mAP': 0.5, 'step': 0}]],
                         ids=['no file', 'empty file', 'only a test'])
def test_no_training_records_are_an_error(tmp_path, records):
    if records is not None:
        write_scalars(tmp_path, '1', records)
    with pytest.raises(ValueError, match='no records of training'):
        curves.read_scalars(tmp_path)


def test_broken_line_is_an_error(tmp_path):
    write_scalars(tmp_path, '1', [training_record(10, 1.0)], rest='oops\n')
    with pytest.raises(ValueError, match="line 2: expected a JSON object, got 'oops'"):
        curves.read_scalars(tmp_path)


def test_curves_show_every_loss_term_rate_and_score(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(curves, 'Figure', lambda **kwargs: figures.append(Figure(**kwargs)) or figures[-1])
    records = [training_record(10, 1.0), training_record(20, 0.5), {'coco/bbox_mAP': 0.4, 'mIoU': 70.0, 'iter': 20}]
    out_file = tmp_path / 'curves.png'
    curves.draw_curves(records, {**scores.main_scores('mmdet'), **scores.main_scores('mmseg')}, out_file)

    losses, rates, points = ([(line.get_label(), line.get_xydata().tolist()) for line in axes.lines]
                             for axes in figures[0].axes)
    assert losses == [('loss (sum of all terms)', [[10, 1.0], [20, 0.5]]), ('loss_cls', [[10, 0.5], [20, 0.25]])]
    assert [data for _, data in rates] == [[[10, 0.1], [20, 0.1]]]
    assert points == [('box mAP', [[20, 0.4]]), ('mask mAP', []), ('label map mIoU', [[20, 0.7]])]
    assert cv2.imread(str(out_file)).std() > 0


# ---- pictures -----------------------------------------------------------------------------------------
def one_object(height=60, width=80, scores=None):
    """A square object (class 1) in the columns 20 to 60 and rows 10 to 50."""
    masks = np.zeros((1, height, width), bool)
    masks[0, 10:50, 20:60] = True
    return pictures.Objects(np.array([[20., 10, 60, 50]]), masks, np.array([1]), scores)


def test_objects_are_drawn_where_they_are():
    image = np.full((60, 80, 3), 100, np.uint8)
    drawn = pictures.draw_objects(image, one_object(), METAINFO).astype(int)
    scale = pictures.ENLARGE
    assert drawn.shape == (60 * scale, 80 * scale, 3) and scale > 1

    is_blue = drawn[..., 2] - drawn[..., 0] > 20
    rows, columns = np.nonzero(is_blue)
    # Lines are two or three pixels wide.
    np.testing.assert_allclose((columns.min(), columns.max()), (20 * scale, 60 * scale), atol=3)
    np.testing.assert_allclose((rows.min(), rows.max()), (10 * scale, 50 * scale), atol=3)
    is_beyond = np.ones(drawn.shape[:2], bool)
    is_beyond[10 * scale - 3:50 * scale + 4, 20 * scale - 3:60 * scale + 4] = False
    assert (drawn[is_beyond] == 100).all()
    inside = drawn[15 * scale, 25 * scale]  # 0.4 of (0, 0, 255) and 0.6 of the image
    np.testing.assert_allclose(inside, (60, 60, 162), atol=2)
    outline = drawn[30 * scale, 20 * scale + 2]
    np.testing.assert_allclose(outline, (0, 0, 255), atol=2)


def test_box_is_drawn_apart_from_the_mask():
    image = np.full((60, 80, 3), 100, np.uint8)
    objects = one_object()._replace(boxes=np.array([[5., 5, 75, 55]]))
    drawn = pictures.draw_objects(image, objects, METAINFO).astype(int)
    left_edge = drawn[:, 5 * pictures.ENLARGE]
    is_blue = left_edge[:, 2] - left_edge[:, 0] > 20
    assert 0.4 < is_blue[5 * pictures.ENLARGE:55 * pictures.ENLARGE].mean() < 0.9  # dashed
    assert not is_blue[:4 * pictures.ENLARGE].any()


def test_score_makes_the_label_taller():
    image = np.full((60, 80, 3), 100, np.uint8)
    heights = []
    for values in (None, np.array([0.87])):
        drawn = pictures.draw_objects(image, one_object(scores=values), METAINFO)
        is_white = (drawn > 180).all(axis=-1)
        heights.append(np.ptp(np.flatnonzero(is_white.any(axis=1))))
    assert heights[1] > 1.5 * heights[0]


def test_image_without_objects_is_only_enlarged():
    image = np.full((6, 8, 3), 100, np.uint8)
    nothing = pictures.Objects(np.zeros((0, 4)), np.zeros((0, 6, 8), bool), np.zeros(0, int))
    drawn = pictures.draw_objects(image, nothing, METAINFO)
    assert drawn.shape == (6 * pictures.ENLARGE, 8 * pictures.ENLARGE, 3) and (drawn == 100).all()


def test_label_of_a_lone_object_is_in_its_middle():
    masks = one_object().masks
    np.testing.assert_allclose(pictures.place_labels(masks, (12, 6)), [(40, 30)], atol=1)


def test_labels_neither_overlap_nor_leave_the_image():
    masks = np.zeros((8, 120, 160), bool)
    masks[:6, 100:, :20] = True  # six objects of one place, and two more in another corner
    masks[6:, :15, 150:] = True
    width, height = 40, 20
    centres = pictures.place_labels(masks, (width, height))
    assert centres.shape == (8, 2)
    assert ((centres >= (width / 2, height / 2)) & (centres <= (160 - width / 2, 120 - height / 2))).all()
    apart = abs(centres[:, None] - centres[None]) >= (width, height)
    np.testing.assert_array_equal(apart.any(axis=-1), ~np.eye(8, dtype=bool))


def segmentation_sample(truth, predicted):
    """A tested sample with two label maps."""
    truth, predicted = (PixelData(data=torch.tensor(label_map)[None]) for label_map in (truth, predicted))
    return SegDataSample(gt_sem_seg=truth, pred_sem_seg=predicted)


def test_label_maps_are_drawn_where_they_are():
    """The ground truth is a square (class 1) amid pixels without a label, the prediction is class 0 everywhere."""
    image = np.full((60, 80, 3), 100, np.uint8)
    truth = np.full((60, 80), 255)
    truth[10:50, 20:60] = 1
    sample = segmentation_sample(truth, np.zeros((60, 80), int))
    truth, prediction = pictures.draw_segmentation(image, sample, METAINFO)
    scale = pictures.ENLARGE
    assert truth.shape == prediction.shape == (60 * scale, 80 * scale, 3)

    is_square = np.zeros(truth.shape[:2], bool)
    is_square[10 * scale:50 * scale, 20 * scale:60 * scale] = True
    np.testing.assert_array_equal((truth != 100).any(axis=-1), is_square)
    np.testing.assert_allclose(truth[30 * scale, 40 * scale], (40, 40, 193), atol=2)  # 0.6 of (0, 0, 255)
    np.testing.assert_allclose(truth[30 * scale, 20 * scale], (0, 0, 255), atol=2)  # outline
    np.testing.assert_allclose(prediction, np.broadcast_to((193, 40, 40), prediction.shape), atol=2)


def test_neighbouring_classes_are_both_outlined():
    label_map = np.zeros((60, 80), int)
    label_map[:, 40:] = 1
    drawn = pictures.draw_label_map(np.full((60, 80, 3), 100, np.uint8), label_map, METAINFO)
    edge = 40 * pictures.ENLARGE
    np.testing.assert_allclose(drawn[:, edge - 1], np.broadcast_to((255, 0, 0), (len(drawn), 3)), atol=2)
    np.testing.assert_allclose(drawn[:, edge], np.broadcast_to((0, 0, 255), (len(drawn), 3)), atol=2)


def test_label_map_without_labels_only_enlarges_the_image():
    drawn = pictures.draw_label_map(np.full((6, 8, 3), 100, np.uint8), np.full((6, 8), 255), METAINFO)
    assert drawn.shape == (6 * pictures.ENLARGE, 8 * pictures.ENLARGE, 3) and (drawn == 100).all()


@pytest.mark.parametrize('num_pairs', [1, 3])
def test_grid_shows_every_pair(tmp_path, num_pairs):
    pairs = [pictures.Pair(f'{i}.jpg', *(np.full((40, 50, 3), colour, np.uint8)
                                         for colour in ((10, 200, 30 * i), (200, 10, 30 * i))))
             for i in range(num_pairs)]
    out_file = tmp_path / 'grid.png'
    pictures.draw_grid(pairs, METAINFO, 'title', 'explanation', out_file)
    grid = cv2.imread(str(out_file))[..., ::-1]
    middles = []
    for pair in pairs:
        truth, prediction = (np.argwhere((grid == image[0, 0]).all(axis=-1)) for image in pair[1:])
        assert len(truth) == pytest.approx(len(prediction), rel=0.02) and len(truth) > 10_000
        assert truth[:, 1].max() < prediction[:, 1].min()  # the truth is to the left
        middles.append(tuple(truth.mean(axis=0) // 10))
    assert len(set(middles)) == num_pairs
    for colour in METAINFO['palette']:  # the legend
        assert (grid == colour).all(axis=-1).sum() > 100


def test_pictures_of_another_toolbox_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got default_scope='mmpose'"):
        pictures.draw_predictions(Config(dict(default_scope='mmpose')), 'none.pth', tmp_path / 'none.png')


# ---- the demo -----------------------------------------------------------------------------------------
@pytest.fixture
def run_demo(demo, monkeypatch, tmp_path):
    """Runs the demo with steps that only leave what theirs would, and returns the commands."""
    commands = []

    def run(command):
        commands.append(command)
        tool = Path(command[1]).name
        if tool == 'train.py':
            (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_1.pth'))
        elif tool == 'test.py':
            folder = tmp_path / 'test/20260101_000000'
            folder.mkdir(parents=True)
            (folder / f'{folder.name}.json').write_text(json.dumps(RESULTS))
        return demo.subprocess.CompletedProcess(command, 3 if tool == run.failing else 0)

    def start(*options, failing=None):
        run.failing = failing
        config = tmp_path / 'config.py'
        config.write_text("default_scope = 'mmdet'\n")
        demo.main([str(config), '--work-dir', str(tmp_path), *options])
        return commands

    monkeypatch.setattr(demo.subprocess, 'run', run)
    monkeypatch.setattr(demo, 'draw_predictions', lambda cfg, checkpoint, out_file: None)
    monkeypatch.setattr(demo, 'read_scalars', lambda work_dir: [])
    monkeypatch.setattr(demo, 'draw_curves', lambda records, main_scores, out_file: None)
    return start


def test_demo_runs_the_tools_and_prints_the_scores(run_demo, tmp_path, capsys):
    commands = run_demo()
    assert [Path(command[1]).name for command in commands] == ['make_shapes.py', 'train.py', 'test.py']
    assert commands[1][2:] == [str(tmp_path / 'config.py'), '--work-dir', str(tmp_path), '--resume']
    assert Path(commands[2][3]).resolve() == tmp_path / 'epoch_1.pth'
    printed = capsys.readouterr().out
    for text in ('0.810', '0.790', 'training', 'predictions.png', 'curves.png'):
        assert text in printed


def test_demo_fails_below_the_minimum(run_demo, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_demo('--min-score', '0.8')
    # A message as exit code: Python prints it to stderr and exits with status 1.
    assert stopped.value.code == 'Not good enough: mask mAP is 0.790, at least 0.8 is asked for.'
    assert '0.790' in capsys.readouterr().out  # the table comes first


def test_demo_stops_where_a_step_fails(run_demo):
    with pytest.raises(SystemExit, match='train.py ended with exit status 3'):
        run_demo(failing='train.py')


@pytest.mark.parametrize('target, scope', [('demo', 'mmdet'), ('demo-seg', 'mmseg')])
def test_make_starts_the_demo(demo, target, scope):
    commands = subprocess.run(['make', '-n', target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command, = (shlex.split(line) for line in commands.splitlines() if 'tools/demo.py' in line)
    args = demo.parse_args(command[2:])
    assert Config.fromfile(ROOT / args.config).default_scope == scope


SMALL_SEGMENTOR = f"""
_base_ = {str(ROOT / 'configs/demo/inline_swin_upernet_shapes.py')!r}
model = dict(
    backbone=dict(arch=dict(embed_dims=(16, 16, 16, 16), num_heads=(1, 1, 1, 1), depths=(1, 1, 1, 1))),
    decode_head=dict(in_channels=[16, 16, 16, 16], channels=16),
    auxiliary_head=dict(in_channels=16, channels=16))
train_dataloader = dict(batch_size=2)
val_dataloader = dict(dataset=dict(indices=2))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=4, val_interval=2)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
"""


@pytest.mark.slow
@pytest.mark.xdist_group('whole runs')
def test_segmentation_demo(tmp_path):
    (tmp_path / 'small.py').write_text(SMALL_SEGMENTOR)
    result = subprocess.run(
        [sys.executable, ROOT / 'tools/demo.py', 'small.py', '--work-dir', 'run', '--min-score', '0'], cwd=tmp_path,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout[-3000:]

    validations = [record for record in curves.read_scalars(tmp_path / 'run') if 'mIoU' in record]
    assert [record['iter'] for record in validations] == [record['step'] for record in validations] == [2, 4]
    results = scores.read_test_results(tmp_path / 'run/test')
    assert results['mIoU'] == validations[-1]['mIoU']  # of the last checkpoint, on the same images
    table = re.search(r'label map\W+([\d.]+)', result.stdout)
    assert float(table.group(1)) == pytest.approx(results['mIoU'] / 100, abs=6e-4)
    for name in ('predictions.png', 'curves.png'):
        assert cv2.imread(str(tmp_path / 'run' / name)).std() > 0
