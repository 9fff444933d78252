"""tools/infer.py and mminline.apis.infer: agree with the toolboxes' own inference, lose nothing, say what is wrong."""
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmdet.apis import inference_detector, init_detector
from mmengine.config import Config
from mmseg.apis import inference_model, init_model
from PIL import Image
from pycocotools import mask as coco_mask

from mminline import apis
from mminline.apis import find_images, infer
from mminline.build import build_model
from mminline.datasets import make_shapes
from mminline.preflight import RunError

ROOT = Path(__file__).parents[1]
TOOL = ROOT / 'tools/infer.py'
CLASSES = ('circle', 'square', 'triangle')

# Narrow, and hardly sure of anything: weights are random.
CONFIGS = {
    'detection': f"""
_base_ = {str(ROOT / 'configs/demo/inline_pvt_maskrcnn_shapes.py')!r}
model = dict(
    backbone=dict(arch=dict(
        embed_dims=(32, 32, 64, 64), num_heads=(1, 1, 2, 2), depths=(1, 1, 1, 1), mlp_ratios=(2, 2, 2, 2))),
    neck=dict(in_channels=[32, 32, 64, 64]),
    test_cfg=dict(rpn=dict(max_per_img=20), rcnn=dict(score_thr=0.0, max_per_img=6)))
""",
    'segmentation': f"""
_base_ = {str(ROOT / 'configs/demo/inline_swin_upernet_shapes.py')!r}
model = dict(
    backbone=dict(arch=dict(embed_dims=(32, 32, 64, 64), num_heads=(2, 2, 4, 4), depths=(1, 1, 1, 1))),
    decode_head=dict(in_channels=[32, 32, 64, 64], channels=32),
    auxiliary_head=dict(in_channels=64, channels=32))
""",
}


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp('data') / 'shapes'
    make_shapes(root, num_images=4)
    return root / 'coco/train'


def make_model(folder: Path, kind: str) -> SimpleNamespace:
    """A config file and a checkpoint with random weights."""
    config, checkpoint = folder / f'{kind}.py', folder / f'{kind}.pth'
    config.write_text(CONFIGS[kind])
    cfg = Config.fromfile(config)
    torch.manual_seed(0)
    model = build_model(cfg)
    model.init_weights()
    classes = CLASSES if kind == 'detection' else ('background', *CLASSES)
    torch.save(dict(meta=dict(dataset_meta=dict(classes=classes)), state_dict=model.state_dict()), checkpoint)
    return SimpleNamespace(config=config, cfg=cfg, checkpoint=checkpoint)


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp('detector'), 'detection')


@pytest.fixture(scope='module')
def segmentor(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp('segmentor'), 'segmentation')


def half_an_image(source: Path, path: Path) -> Path:
    data = source.read_bytes()
    path.write_bytes(data[:len(data) // 2])
    return path


# ---- as a command -------------------------------------------------------------------------------------
def test_detection_as_a_command(detector, shapes, tmp_path):
    """A folder, a pattern, a file of the same name as another, a half-written one and one that is not there."""
    (tmp_path / 'other').mkdir()
    shutil.copy(shapes / '000003.jpg', tmp_path / 'other/000001.jpg')
    half_an_image(shapes / '000002.jpg', tmp_path / 'other/half.jpg')
    result = subprocess.run(
        [sys.executable, TOOL, detector.config, detector.checkpoint, 'other', f'{shapes}/00000[12].jpg', 'gone.jpg',
         '--out-dir', 'out', '--score-thr', '0.2', '--batch-size', '2', '--device', 'cpu'],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert result.returncode == 1, result.stderr
    assert 'inference' in result.stdout and '3 image(s)' in result.stdout
    assert '2 image(s) could not be read' in result.stderr
    assert re.search('gone.jpg: no such file', result.stderr) and re.search('other/half.jpg: .+', result.stderr)
    assert 'Traceback' not in result.stderr

    results = json.loads((tmp_path / 'out/results.json').read_text())
    assert [entry['file'] for entry in results] == ['other/000001.jpg', *(f'{shapes}/00000{n}.jpg' for n in (1, 2))]
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == ['overlays', 'results.json']
    assert len({entry['overlay'] for entry in results}) == 3
    for entry in results:
        source = cv2.imread(str(tmp_path / entry['file']))
        assert (entry['height'], entry['width']) == source.shape[:2]
        overlay = cv2.imread(str(tmp_path / 'out' / entry['overlay']))
        factor = overlay.shape[0] // source.shape[0]
        assert overlay.shape == (source.shape[0] * factor, source.shape[1] * factor, 3)
        plain = cv2.resize(source, overlay.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        assert np.abs(overlay.astype(int) - plain).max() > 50  # something is drawn
    detections = [detection for entry in results for detection in entry['detections']]
    assert detections and all(detection['score'] >= 0.2 for detection in detections)


BAD = {
    'no config': (['gone.py', 'CHECKPOINT', 'IMAGE'], 'gone.py: no such config file'),
    'no checkpoint': (['CONFIG', 'gone.pth', 'IMAGE'], 'there is no checkpoint file gone.pth'),
    'no checkpoint inside': (['CONFIG', 'IMAGE', 'IMAGE'], 'cannot be read as a checkpoint'),
    'no images': (['CONFIG', 'CHECKPOINT', 'gone/*.jpg'], 'there are no images: gone/*.jpg: no such file'),
    'no such device': (['CONFIG', 'CHECKPOINT', 'IMAGE', '--device', 'warp'], 'cannot use the device warp'),
    'batch of nothing': (['CONFIG', 'CHECKPOINT', 'IMAGE', '--batch-size', '0'], 'must be at least 1, got 0'),
    'score': (['CONFIG', 'CHECKPOINT', 'IMAGE', '--score-thr', '30'], 'must be from 0 to 1, got 30.0'),
    'a file in the way': (['CONFIG', 'CHECKPOINT', 'IMAGE', '--out-dir', 'CONFIG'], 'cannot write: '),
}


@pytest.mark.parametrize('args, message', BAD.values(), ids=BAD)
def test_bad_input_ends_in_one_message(detector, shapes, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    named = dict(CONFIG=detector.config, CHECKPOINT=detector.checkpoint, IMAGE=shapes / '000001.jpg')
    monkeypatch.setattr(sys, 'argv', ['infer.py', *(str(named.get(arg, arg)) for arg in args)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(TOOL), run_name='__main__')
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- against the toolboxes ----------------------------------------------------------------------------
def test_detections_are_those_of_the_toolbox(detector, shapes, tmp_path):
    [found] = infer(detector.config, detector.checkpoint, shapes / '000001.jpg', tmp_path, device='cpu',
                    score_thr=0).results
    model = init_detector(str(detector.config), str(detector.checkpoint), device='cpu')
    expected = inference_detector(model, str(shapes / '000001.jpg')).pred_instances
    assert [detection['class'] for detection in found['detections']] == [CLASSES[n] for n in expected.labels]
    for index, detection in enumerate(found['detections']):
        assert detection['score'] == pytest.approx(expected.scores[index].item(), abs=6e-5)
        assert detection['box'] == pytest.approx(expected.bboxes[index].tolist(), abs=6e-3)
        np.testing.assert_array_equal(coco_mask.decode(detection['mask']), expected.masks[index].numpy())
    assert len(found['detections']) == 6


def test_no_detections(detector, shapes, tmp_path):
    [found] = infer(detector.config, detector.checkpoint, shapes / '000001.jpg', tmp_path, device='cpu',
                    score_thr=1).results
    assert found['detections'] == []
    assert cv2.imread(str(tmp_path / found['overlay'])).shape[1] % found['width'] == 0


def test_label_map_is_that_of_the_toolbox(segmentor, shapes, tmp_path):
    images = sorted(shapes.iterdir())
    found = infer(segmentor.config, segmentor.checkpoint, shapes, tmp_path, batch_size=4, device='cpu').results
    model = init_model(str(segmentor.config), str(segmentor.checkpoint), device='cpu')
    assert [Path(entry['file']) for entry in found] == images
    for entry in found:
        label_map = cv2.imread(str(tmp_path / entry['label_map']), cv2.IMREAD_UNCHANGED)
        expected = inference_model(model, entry['file']).pred_sem_seg.data[0].numpy()
        assert label_map.dtype == np.uint8 and label_map.shape == (entry['height'], entry['width'])
        # Images of one size share a batch: on a tie between classes, rounding decides.
        assert (label_map == expected).mean() > 0.999
        assert entry['classes'] == ['background', *CLASSES]
        overlay = cv2.imread(str(tmp_path / entry['overlay']))
        factor = overlay.shape[1] // entry['width']
        legend = overlay[entry['height'] * factor:]
        assert 10 < len(legend) < 100 and legend.min() < 100 < legend.max()


def test_images_are_read_as_the_toolbox_reads_them(segmentor, tmp_path):
    """Turned as EXIF says, and a grey one as three equal channels."""
    pixels = np.random.default_rng(0).integers(256, size=(48, 80), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held upright
    Image.fromarray(pixels).convert('RGB').save(tmp_path / 'turned.jpg', exif=exif)
    Image.fromarray(pixels).save(tmp_path / 'grey.png')
    grey, turned = infer(segmentor.config, segmentor.checkpoint, tmp_path, tmp_path / 'out', device='cpu').results
    assert (grey['width'], grey['height']) == (80, 48) and (turned['width'], turned['height']) == (48, 80)
    assert Image.open(tmp_path / 'out' / turned['label_map']).size == (48, 80)


# ---- nothing is lost, nothing is run ------------------------------------------------------------------
def test_results_up_to_a_failure_are_kept(segmentor, shapes, tmp_path, monkeypatch):
    predict = apis._predict

    def fails_on_the_third(model, batch):
        if batch[0].file.endswith('3.jpg'):
            raise KeyboardInterrupt
        return predict(model, batch)

    monkeypatch.setattr(apis, '_predict', fails_on_the_third)
    with pytest.raises(KeyboardInterrupt):
        infer(segmentor.cfg, segmentor.checkpoint, shapes, tmp_path, device='cpu')
    entries = json.loads((tmp_path / 'results.json').read_text())
    assert [Path(entry['file']).name for entry in entries] == ['000001.jpg', '000002.jpg']


def test_an_image_is_not_replaced_by_its_result(detector, shapes, tmp_path):
    (tmp_path / 'overlays').mkdir()
    shutil.copy(shapes / '000001.jpg', tmp_path / 'overlays')
    with pytest.raises(RunError, match='is where results would be written'):
        infer(detector.config, detector.checkpoint, tmp_path / 'overlays', tmp_path)


def test_names_of_results_differ():
    names = apis._output_names(['a/cat.jpg', 'b/Cat.jpg', 'a/cat_2.png', 'a/dog.png'])
    assert list(names.values()) == ['cat', 'Cat_2', 'cat_2_2', 'dog']


def test_find_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('b.JPG', 'a.png', 'notes.txt', '[1].jpg'):
        (tmp_path / name).touch()
    (tmp_path / 'empty').mkdir()
    files, nothing = find_images(['[1].jpg', '.', 'a.*', 'empty'])
    assert files == ['[1].jpg', 'a.png', 'b.JPG']
    assert nothing == {'empty': 'no images in this folder'}


class Harmful:
    def __reduce__(self):
        return os.mkdir, ('trace',)


def test_harmful_checkpoint_is_refused(detector, shapes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(dict(state_dict={}, meta=Harmful()), 'harmful.pth')
    with pytest.raises(RunError, match='was not loaded, for safety'):
        infer(detector.cfg, 'harmful.pth', shapes, 'out')
    assert not (tmp_path / 'trace').exists() and not (tmp_path / 'out').exists()


def test_weights_of_another_model_are_refused(detector, segmentor, shapes, tmp_path):
    with pytest.raises(RunError, match='are not those of the model of'):
        infer(detector.cfg, segmentor.checkpoint, shapes, tmp_path)


@pytest.mark.parametrize('option', [dict(batch_size=0), dict(score_thr=1.5)])
def test_options_out_of_range(detector, shapes, tmp_path, option):
    [(name, value)] = option.items()
    with pytest.raises(ValueError, match=f'{name} must be .*, got {value}'):
        infer(detector.cfg, detector.checkpoint, shapes, tmp_path, **option)


def test_classes_of_the_config_where_the_checkpoint_names_none(segmentor, shapes, tmp_path):
    content = torch.load(segmentor.checkpoint, weights_only=True)
    torch.save(dict(state_dict=content['state_dict']), tmp_path / 'bare.pth')
    [entry] = infer(segmentor.cfg, tmp_path / 'bare.pth', shapes / '000001.jpg', tmp_path, device='cpu').results
    assert entry['classes'] == ['background', *CLASSES]
