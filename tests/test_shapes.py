import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from mminline.datasets import CATEGORY_IDS, CLASSES, SEG_CLASSES, SEG_PALETTE, draw_scene, make_shapes, shapes

ROOT = Path(__file__).parents[1]
SPLITS = pytest.mark.parametrize('coco_name, ade_name', [('train', 'training'), ('val', 'validation')])


@pytest.fixture(scope='module')
def data_root(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp('data') / 'shapes'
    assert make_shapes(out_dir, num_images=60, seed=3)
    return out_dir


def read_tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def draw_scenes(num_scenes, num_objects, height=128, width=160):
    return [draw_scene(np.random.default_rng((7, i)), height, width, num_objects) for i in range(num_scenes)]


# ---- scenes -------------------------------------------------------------------------------------------
def test_scene_shapes_and_types():
    for image, instances in draw_scenes(20, num_objects=6, height=112, width=176):
        assert image.shape == (112, 176, 3) and image.dtype == np.uint8
        assert 1 <= len(instances) <= 6
        assert all(mask.shape == (112, 176) and mask.dtype == bool for _, mask in instances)
        assert sum(mask.astype(int) for _, mask in instances).max() == 1, 'visible parts overlap'


def test_scene_without_objects():
    image, instances = draw_scene(np.random.default_rng(0), 128, 128, 0)
    assert image.shape == (128, 128, 3) and instances == []


def test_outline_is_that_of_the_class():
    """An object's share of the smallest (rotated) rectangle around it tells circle, square and triangle."""
    shares = {name: [] for name in CLASSES}
    for _, [(label, mask)] in draw_scenes(40, num_objects=1, height=256, width=256):
        if mask[[0, -1]].any() or mask[:, [0, -1]].any():
            continue  # cut off by the image
        points = np.argwhere(mask).astype(np.float32)
        rows, columns = cv2.minAreaRect(points)[1]
        shares[CLASSES[label]].append(mask.sum() / ((rows + 1) * (columns + 1)))
    assert min(map(len, shares.values())) >= 5
    for name, share in (('circle', np.pi / 4), ('square', 1), ('triangle', 1 / 2)):
        np.testing.assert_allclose(shares[name], share, atol=0.1, err_msg=name)


def test_objects_stand_out():
    for image, instances in draw_scenes(40, num_objects=5):
        image = image.astype(float)
        for _, mask in instances:
            near, far = (cv2.dilate(mask.astype(np.uint8), np.ones((size, size))) > 0 for size in (3, 7))
            contrast = np.linalg.norm(image[far & ~near] - image[mask].mean(axis=0), axis=-1)
            assert np.median(contrast) > 45  # of 80 at full light


def classify_by_colour(colours, labels):
    """Accuracy, on the second half, of a quadratic least-squares classifier fitted to the first half."""
    terms = np.hstack([np.ones((len(colours), 1)), colours / 255, (colours / 255)**2])
    half = len(colours) // 2
    weights = np.linalg.lstsq(terms[:half], np.eye(len(CLASSES))[labels[:half]], rcond=None)[0]
    return np.mean((terms[half:] @ weights).argmax(axis=1) == labels[half:])


def test_neither_colour_nor_area_tells_the_class():
    objects = [(label, image[mask].mean(axis=0), mask.sum())
               for image, instances in draw_scenes(250, num_objects=6) for label, mask in instances]
    labels, colours, areas = map(np.array, zip(*objects))
    # Chance is 1/3; a run of 600 test objects has a standard deviation of 0.02 around it.
    assert len(labels) > 1200
    assert classify_by_colour(colours, labels) < 0.4
    tint = 25 * np.eye(len(CLASSES))[labels]
    assert classify_by_colour(colours + tint, labels) > 0.4, 'this test would not notice a tint'
    mean_areas = [areas[labels == label].mean() for label in range(len(CLASSES))]
    assert max(mean_areas) < 1.15 * min(mean_areas)
    assert min(Counter(labels.tolist()).values()) > 0.8 * len(labels) / len(CLASSES)


# ---- files --------------------------------------------------------------------------------------------
def test_same_seed_gives_same_bytes(data_root, tmp_path):
    make_shapes(tmp_path / 'again', num_images=60, seed=3)
    assert read_tree(tmp_path / 'again') == read_tree(data_root)


def test_larger_set_begins_with_the_smaller_one(data_root, tmp_path):
    make_shapes(tmp_path / 'small', num_images=10, seed=3)
    small, large = read_tree(tmp_path / 'small'), read_tree(data_root)
    pictures = [path for path in small if path.suffix in ('.jpg', '.png')]
    assert len(pictures) == 3 * (10 + 2)
    assert all(small[path] == large[path] for path in pictures)


def test_images_of_splits_and_seeds_differ(data_root, tmp_path):
    make_shapes(tmp_path / 'other', num_images=10, seed=4)
    paths = [*data_root.glob('coco/*/*.jpg'), *tmp_path.glob('other/coco/*/*.jpg')]
    assert len(paths) == 60 + 12 + 10 + 2
    assert len({path.read_bytes() for path in paths}) == len(paths)


@SPLITS
def test_both_layouts_hold_the_same_images(data_root, coco_name, ade_name):
    images = read_tree(data_root / 'coco' / coco_name)
    assert len(images) == {'train': 60, 'val': 12}[coco_name]
    assert images == read_tree(data_root / 'ade/images' / ade_name)


@SPLITS
def test_coco_annotations(data_root, coco_name, ade_name):
    coco = COCO(data_root / f'coco/annotations/{coco_name}.json')
    assert [(c['id'], c['name']) for c in coco.loadCats(coco.getCatIds())] == list(zip(CATEGORY_IDS, CLASSES))
    assert CATEGORY_IDS[0] > 1 and max(np.diff(CATEGORY_IDS)) > 1, 'ids should have gaps'
    assert min(coco.anns) == 1 and len(coco.anns) == len(coco.dataset['annotations'])
    assert {ann['category_id'] for ann in coco.anns.values()} == set(CATEGORY_IDS)
    empty = [image_id for image_id in coco.imgs if not coco.getAnnIds(image_id)]
    assert len(empty) == len([i for i in range(len(coco.imgs)) if i % 20 == 10]) > 0

    assert len({(image['height'], image['width']) for image in coco.imgs.values()}) == len(shapes.SIZES)
    for image in coco.imgs.values():
        height, width = image['height'], image['width']
        picture = cv2.imread(data_root / 'coco' / coco_name / image['file_name'])
        assert picture.shape == (height, width, 3)
        for ann in coco.loadAnns(coco.getAnnIds(image['id'])):
            assert ann['iscrowd'] == 0
            x, y, w, h = ann['bbox']
            assert x >= 0 and y >= 0 and w > 0 and h > 0 and x + w <= width and y + h <= height
            mask = coco.annToMask(ann)
            assert mask.sum() == ann['area']
            rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
            assert [columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]] == ann['bbox']


@SPLITS
def test_label_maps_agree_with_coco_masks(data_root, coco_name, ade_name):
    coco = COCO(data_root / f'coco/annotations/{coco_name}.json')
    assert len(SEG_CLASSES) == len(SEG_PALETTE) == 4
    for image in coco.imgs.values():
        expected = np.full((image['height'], image['width']), 1 + SEG_CLASSES.index('background'))
        for ann in coco.loadAnns(coco.getAnnIds(image['id'])):
            name = CLASSES[CATEGORY_IDS.index(ann['category_id'])]
            expected[coco.annToMask(ann) > 0] = 1 + SEG_CLASSES.index(name)
        path = (data_root / 'ade/annotations' / ade_name / image['file_name']).with_suffix('.png')
        label_map = cv2.imread(path, cv2.IMREAD_UNCHANGED)
        assert label_map.dtype == np.uint8
        np.testing.assert_array_equal(label_map, expected)


def test_some_object_is_in_several_pieces_and_one_polygon_each(data_root):
    """Else the agreement of masks above would say nothing about such objects."""
    annotations = json.loads((data_root / 'coco/annotations/train.json').read_text())['annotations']
    assert any(len(ann['segmentation']) > 1 for ann in annotations)


def test_mmdet_reads_the_masks(data_root):
    pytest.importorskip('mmdet', reason='reads the data with MMDetection')
    from mmcv.transforms import LoadImageFromFile
    from mmdet.datasets import CocoDataset
    from mmdet.datasets.transforms import LoadAnnotations
    dataset = CocoDataset(
        ann_file='coco/annotations/val.json', data_root=str(data_root), data_prefix=dict(img='coco/val/'),
        metainfo=dict(classes=CLASSES), test_mode=True,
        pipeline=[LoadImageFromFile(), LoadAnnotations(with_bbox=True, with_mask=True)])
    assert len(dataset) == 12
    for results in dataset:
        name = Path(results['img_path']).with_suffix('.png').name
        painted = np.ones(results['img_shape'], np.uint8)
        for label, mask in zip(results['gt_bboxes_labels'], results['gt_masks'].masks):
            painted[mask > 0] = 2 + label
        label_map = cv2.imread(data_root / 'ade/annotations/validation' / name, cv2.IMREAD_UNCHANGED)
        np.testing.assert_array_equal(painted, label_map)


def test_mmseg_reads_the_label_maps(data_root):
    pytest.importorskip('mmseg', reason='reads the data with MMSegmentation')
    from mmseg.datasets import BaseSegDataset
    from mmseg.datasets.transforms import LoadAnnotations
    dataset = BaseSegDataset(
        data_root=str(data_root), img_suffix='.jpg', seg_map_suffix='.png', reduce_zero_label=True,
        data_prefix=dict(img_path='ade/images/training', seg_map_path='ade/annotations/training'),
        metainfo=dict(classes=SEG_CLASSES, palette=SEG_PALETTE),
        pipeline=[LoadAnnotations()])
    assert len(dataset) == 60
    found = {int(value) for results in dataset for value in np.unique(results['gt_seg_map'])}
    assert found == set(range(len(SEG_CLASSES)))


# ---- nothing is lost ----------------------------------------------------------------------------------
def interrupt_after(monkeypatch, num_calls):
    write = shapes._write_image
    calls = iter(range(num_calls))

    def write_or_stop(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(shapes, '_write_image', write_or_stop)


def test_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, num_calls=7)
    with pytest.raises(KeyboardInterrupt):
        make_shapes(tmp_path / 'shapes', num_images=5)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_overwrite_keeps_the_old_set(tmp_path, monkeypatch):
    make_shapes(tmp_path / 'shapes', num_images=2)
    before = read_tree(tmp_path)
    interrupt_after(monkeypatch, num_calls=7)
    with pytest.raises(KeyboardInterrupt):
        make_shapes(tmp_path / 'shapes', num_images=5, overwrite=True)
    assert read_tree(tmp_path) == before


def test_failed_write_raises_oserror(tmp_path):
    with pytest.raises(OSError, match='missing'):
        shapes._write_image(np.zeros((4, 4, 3), np.uint8), tmp_path / 'missing/1.jpg')


def test_link_is_followed(tmp_path):
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'shapes').symlink_to(tmp_path / 'disk')
    make_shapes(tmp_path / 'shapes', num_images=1)
    assert (tmp_path / 'shapes').is_symlink() and (tmp_path / 'disk/shapes.json').is_file()


@pytest.mark.parametrize('arguments', [dict(num_images=0), dict(num_images=2.5), dict(seed=-1)], ids=str)
def test_bad_values_are_quoted(tmp_path, arguments):
    [(name, value)] = arguments.items()
    with pytest.raises(ValueError, match=f'{name} must be .* got {value}'):
        make_shapes(tmp_path / 'shapes', **arguments)
    assert list(tmp_path.iterdir()) == []


# ---- the command --------------------------------------------------------------------------------------
def run_tool(*arguments):
    command = [sys.executable, ROOT / 'tools/make_shapes.py', *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_command_makes_keeps_and_replaces(tmp_path):
    out_dir = tmp_path / 'deep/shapes'
    assert run_tool(out_dir, '--images', 6, '--seed', 1).returncode == 0
    assert [len(list(out_dir.glob(f'coco/{split}/*.jpg'))) for split in ('train', 'val')] == [6, 1]
    times = {path: path.stat().st_mtime_ns for path in out_dir.rglob('*')}

    again = run_tool(out_dir, '--images', 6, '--seed', 1)
    assert again.returncode == 0 and 'already there' in again.stdout
    refused = run_tool(out_dir, '--images', 7, '--seed', 1)
    assert refused.returncode == 2 and '--overwrite' in refused.stderr and 'Traceback' not in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in out_dir.rglob('*')} == times

    assert run_tool(out_dir, '--images', 7, '--seed', 1, '--overwrite').returncode == 0
    assert len(list(out_dir.glob('coco/train/*.jpg'))) == 7
    assert list(out_dir.parent.iterdir()) == [out_dir]


@pytest.mark.parametrize('content', ['photo.jpg', 'shapes.json'])
def test_command_leaves_foreign_folder_alone(tmp_path, content):
    (tmp_path / content).write_text('mine')
    result = run_tool(tmp_path, '--images', 2, '--overwrite')
    assert result.returncode == 2 and 'no shapes data set' in result.stderr
    assert 'Traceback' not in result.stderr
    assert read_tree(tmp_path) == {Path(content): b'mine'}


@pytest.mark.parametrize('option, value', [('--images', '0'), ('--seed', '-1')])
def test_command_refuses_bad_values(tmp_path, option, value):
    result = run_tool(tmp_path / 'shapes', option, value)
    assert result.returncode == 2 and value in result.stderr and 'Traceback' not in result.stderr
    assert list(tmp_path.iterdir()) == []
