"""tools/check_dataset.py finds each kind of damage and nothing else; tools/browse_dataset.py draws training data."""
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image

from mminline.analysis.browse import browse_dataset
from mminline.analysis.dataset_check import LabelRange, check_coco, check_datasets, check_label_maps, read_image
from mminline.analysis.overlays import _legend, build_visualizer, draw_overlay
from mminline.datasets import CLASSES, make_shapes
from mminline.preflight import RunError
from mminline.runs import read_config

ROOT = Path(__file__).parents[1]
DETECTION = ROOT / 'configs/demo/inline_pvt_maskrcnn_shapes.py'
SEGMENTATION = ROOT / 'configs/demo/inline_swin_upernet_shapes.py'


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp('data') / 'shapes'
    make_shapes(root, num_images=6)
    return root


@pytest.fixture
def damaged(shapes, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(shapes, tmp_path / 'shapes'))


def run_command(tool, *args, cwd):
    return subprocess.run([sys.executable, ROOT / f'tools/{tool}.py', *map(str, args)], cwd=cwd, capture_output=True,
                          text=True, env={**os.environ, 'OMP_NUM_THREADS': '1', 'COLUMNS': '100'})


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs a tool in this process; returns its exit status, stdout and stderr."""

    def run(tool, *args):
        monkeypatch.setattr(sys, 'argv', [f'{tool}.py', *map(str, args)])
        status = 0
        try:
            runpy.run_path(str(ROOT / f'tools/{tool}.py'), run_name='__main__')
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[:len(data) // 2])


def edit(path):
    """The content of a JSON file, to be changed, and a function that writes it back."""
    content = json.loads(path.read_text())
    return content, lambda: path.write_text(json.dumps(content))


# ---- check_dataset as a command -------------------------------------------------------------------------
def test_damaged_detection_set_as_a_command(damaged, tmp_path):
    root = damaged / 'coco'
    (root / 'train/000001.jpg').unlink()
    cut(root / 'train/000002.jpg')
    content, write = edit(root / 'annotations/train.json')
    box, mask = content['annotations'][-2:]
    box['bbox'][0] = 150
    mask['segmentation'] = []
    write()
    result = run_command('check_dataset', DETECTION, '--out', 'problems.json', '--cfg-options', f'data_root={root}',
                         cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert 'Traceback' not in result.stderr and 'train: images' in result.stdout
    problems = json.loads((tmp_path / 'problems.json').read_text())
    assert [(problem['kind'], problem['data_set']) for problem in problems] == [
        ('missing image', 'train'), ('half-written image', 'train'), ('box outside the image', 'train'),
        ('empty mask', 'train')]
    assert problems[2]['where'].endswith(f'train/000006.jpg, annotation {box["id"]}')
    assert re.search(r'box \[150, .*\] \(x, y, width, height\) in \d+x\d+', problems[2]['what'])
    for problem in problems:
        assert problem['where'] in result.stdout
        assert re.search(rf'{problem["kind"]} +│ +1 │ +0', result.stdout)


def test_clean_sets(run_here, shapes):
    """Every image, object and pixel is counted, and nothing is reported."""
    status, output, _ = run_here('check_dataset', DETECTION, '--cfg-options', f'data_root={shapes}/coco')
    content = json.loads((shapes / 'coco/annotations/train.json').read_text())
    names = {category['id']: category['name'] for category in content['categories']}
    assert status == 0 and 'No problems.' in output
    assert re.search(r'images +│ +6 │ +1', output)
    for name in CLASSES:
        count = sum(names[annotation['category_id']] == name for annotation in content['annotations'])
        assert re.search(rf'objects: {name} +│ +{count} ', output)

    status, output, _ = run_here('check_dataset', SEGMENTATION, '--split', 'train', '--cfg-options',
                                 f'data_root={shapes}/ade')
    maps = [cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in (shapes / 'ade/annotations/training').iterdir()]
    assert status == 0 and 'No problems.' in output
    for value, name in enumerate(('background', *CLASSES), 1):
        count = sum((label_map == value).sum() for label_map in maps)
        assert re.search(rf'pixels: {name} +│ +{count} ', output)


def test_damaged_segmentation_set(run_here, damaged):
    images, maps = damaged / 'ade/images/training', damaged / 'ade/annotations/training'
    (images / '000001.jpg').unlink()
    (maps / '000002.png').unlink()
    cut(images / '000003.jpg')
    cut(maps / '000004.png')
    label_map = cv2.imread(str(maps / '000005.png'), cv2.IMREAD_UNCHANGED)
    label_map[:2] = 9
    cv2.imwrite(str(maps / '000005.png'), label_map)
    cv2.imwrite(str(maps / '000006.png'), np.zeros((40, 30), np.uint8))
    status, output, _ = run_here('check_dataset', SEGMENTATION, '--cfg-options', f'data_root={damaged}/ade')
    assert status == 1
    for kind, name in {
            'missing image': '000001.jpg', 'missing label map': '000002.png', 'half-written image': '000003.jpg',
            'half-written label map': '000004.png', 'label out of range': '000005.png',
            'label map of another size': '000006.png', 'empty label map': '000006.png'}.items():
        assert re.search(rf'\n{kind}: 1\n  \S+/{name}', output), kind
        assert re.search(rf'{kind} +│ +1 │ +0', output), kind
    assert f'{label_map.shape[1] * 2} pixels of 9; 4 classes from 1' in output


REFUSED = {
    'no config': (['gone.py'], 'gone.py: no such config file'),
    'no annotation file': ([DETECTION, '--cfg-options', 'data_root=gone'],
                           'gone/annotations/train.json cannot be read: [Errno 2]'),
    'no image folder': ([SEGMENTATION, '--cfg-options', 'data_root=gone'], 'gone/images/training: no such folder'),
    'no such split': ([DETECTION, '--split', 'all'], "invalid choice: 'all'"),
    'another format': ([DETECTION, '--cfg-options', 'train_dataloader.dataset.type=VOCDataset'],
                       'data sets in the format of COCO can be looked at, got VOCDataset'),
}


@pytest.mark.parametrize('args, message', REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_looked_at(run_here, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    status, _, error = run_here('check_dataset', *args)
    assert status == 2 and message in error, error


def test_other_storage_is_not_looked_at():
    dataset = dict(type='CocoDataset', ann_file='a.json', backend_args=dict(backend='petrel'))
    with pytest.raises(RunError, match="only local files can be looked at, got backend_args={'backend': 'petrel'}"):
        check_datasets(Config(dict(default_scope='mmdet', train_dataloader=dict(dataset=dataset))), ['train'])


def test_unwritable_report(run_here, shapes, tmp_path):
    status, _, error = run_here('check_dataset', SEGMENTATION, '--out', tmp_path, '--cfg-options',
                                f'data_root={shapes}/ade')
    assert status == 2 and 'cannot write: ' in error


def test_many_problems_of_a_kind_are_shortened(run_here, damaged):
    for path in (damaged / 'coco/train').iterdir():
        path.write_bytes(b'')
    status, output, _ = run_here('check_dataset', DETECTION, '--split', 'train', '--shown', '2', '--cfg-options',
                                 f'data_root={damaged}/coco')
    assert status == 1 and 'unreadable image: 6\n' in output and 'and 4 more, all of them: --out FILE' in output
    assert output.count('the file is empty') == 2


# ---- its parts ------------------------------------------------------------------------------------------
@pytest.mark.parametrize('suffix', ['.jpg', '.png', '.bmp', '.webp', '.tif'])
@pytest.mark.parametrize('share', [0.3, 0.95])
def test_half_written_images_are_found(tmp_path, suffix, share):
    pixels = cv2.resize(np.random.default_rng(0).integers(256, size=(12, 16, 3), dtype=np.uint8), (160, 120))
    data = cv2.imencode(suffix, pixels)[1].tobytes()
    path = tmp_path / f'image{suffix}'
    path.write_bytes(data)
    read, problem = read_image(path)
    assert problem is None and read.shape == (120, 160, 3)
    path.write_bytes(data[:int(share * len(data))])
    read, problem = read_image(path)
    assert read is None and problem.kind in ('half-written image', 'unreadable image')
    assert problem.kind == 'half-written image' or suffix in ('.webp', '.tif')


def test_images_turned_by_exif_have_the_size_that_is_trained_on(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new('RGB', (80, 48)).save(tmp_path / 'turned.jpg', exif=exif)
    assert read_image(tmp_path / 'turned.jpg')[0].shape == (80, 48, 3)
    (tmp_path / 'text.jpg').write_text('no image')
    assert read_image(tmp_path / 'text.jpg')[1].kind == 'unreadable image'
    assert read_image(tmp_path)[1].kind == 'unreadable image'


SQUARE = [10, 10, 20, 10, 20, 20, 10, 20]
DAMAGES = {
    'none': (dict(), []),
    'box at the edge': (dict(bbox=[0, 0, 40.4, 30]), []),
    'box over the edge': (dict(bbox=[30, 10, 11, 5]), ['box outside the image']),
    'box left of the image': (dict(bbox=[-5, 10, 4, 5]), ['box outside the image']),
    'box without a width': (dict(bbox=[5, 5, 0, 5]), ['empty box']),
    'box of three numbers': (dict(bbox=[5, 5, 5]), ['malformed box']),
    'box of NaN': (dict(bbox=[5, 5, float('nan'), 5]), ['malformed box']),
    'no mask': (dict(segmentation=[]), ['empty mask']),
    'mask without area': (dict(segmentation=[[5, 5, 5, 5, 5, 5]]), ['empty mask']),
    'mask outside the image': (dict(segmentation=[[x + 100 for x in SQUARE]]), ['empty mask']),
    'mask of two points': (dict(segmentation=[SQUARE, [1, 2, 3, 4]]), ['malformed mask']),
    'mask of words': (dict(segmentation=[['a'] * 6]), ['malformed mask']),
    'RLE': (dict(segmentation=dict(size=[30, 40], counts=[600, 30, 570])), []),
    'RLE without a pixel': (dict(segmentation=dict(size=[30, 40], counts=[1200])), ['empty mask']),
    'RLE of another size': (dict(segmentation=dict(size=[40, 30], counts=[600, 30, 570])), ['mask of another size']),
    'no such image': (dict(image_id=5), ['annotation without an image']),
    'no such category': (dict(category_id=9), ['annotation without a category']),
}


def write_coco(folder, **changes):
    """A set of one image, 40 wide and 30 high, and one annotation."""
    cv2.imwrite(str(folder / 'a.png'), np.zeros((30, 40, 3), np.uint8))
    annotation = dict(id=1, image_id=0, category_id=3, bbox=[10, 10, 10, 10], segmentation=[SQUARE])
    content = dict(images=[dict(id=0, file_name='a.png', width=40, height=30)],
                   categories=[dict(id=3, name='cat'), dict(id=4, name='dog')], annotations=[annotation])
    annotation.update(changes)
    (folder / 'set.json').write_text(json.dumps(content))
    return edit(folder / 'set.json')


@pytest.mark.parametrize('changes, kinds', DAMAGES.values(), ids=DAMAGES)
def test_annotations(tmp_path, changes, kinds):
    write_coco(tmp_path, **changes)
    report = check_coco(tmp_path / 'set.json', tmp_path, ('cat', 'dog'), True, 'train')
    assert [problem.kind for problem in report.problems] == kinds
    assert report.sizes == [(40, 30)] and (report.counts['cat'] == 1) == ('category_id' not in changes
                                                                          and 'image_id' not in changes)


def test_masks_do_not_matter_to_a_detector_of_boxes(tmp_path):
    write_coco(tmp_path, segmentation=[])
    assert not check_coco(tmp_path / 'set.json', tmp_path, ('cat', 'dog'), False, 'train').problems


def test_lists_that_contradict(tmp_path):
    content, write = write_coco(tmp_path)
    content['images'][0]['width'] = 41
    content['annotations'].append(dict(content['annotations'][0]))
    write()
    report = check_coco(tmp_path / 'set.json', tmp_path, ('dog', 'horse'), True, 'train')
    assert [problem.kind for problem in report.problems] == [
        'double id', 'class without a category', 'image of another size']
    assert report.remarks == ['1 images without objects',
                              "2 objects of the category 'cat', which is none of the config's classes"]


@pytest.mark.parametrize('text, message', [
    ('{"images": [', 'cannot be read'), ('[]', "has no list 'images'"),
    ('{"images": [{"id": 1}], "categories": [], "annotations": []}', r"images\[0\] has no 'file_name'")])
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / 'set.json').write_text(text)
    with pytest.raises(RunError, match=message):
        check_coco(tmp_path / 'set.json', tmp_path, ('cat', ), True, 'train')


@pytest.mark.parametrize('reduce_zero_label, label_map', [(False, None), (True, None), (False, {0: 0, 1: 255, 2: 1})])
def test_labels_are_those_that_the_toolbox_makes(tmp_path, reduce_zero_label, label_map):
    from mmseg.datasets.transforms import LoadAnnotations
    values = np.arange(256, dtype=np.uint8)
    Image.fromarray(np.stack([values, values])).save(tmp_path / 'map.png')
    loaded = LoadAnnotations()(dict(seg_map_path=str(tmp_path / 'map.png'), seg_fields=[], label_map=label_map,
                                    reduce_zero_label=reduce_zero_label))['gt_seg_map'][0]
    num_classes = 2 if label_map else 4
    labels = LabelRange(num_classes, reduce_zero_label, label_map).labels(values)
    is_known = (loaded < num_classes) | (loaded == 255)
    np.testing.assert_array_equal(labels, np.where(is_known, loaded.astype(int), -1))


def test_label_maps_in_colour(tmp_path):
    """Three channels are no labels; a palette's indices are."""
    image = tmp_path / 'image.png'
    Image.new('RGB', (6, 4)).save(image)
    palette = Image.new('P', (6, 4), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(tmp_path / 'palette.png')
    Image.new('RGB', (6, 4)).save(tmp_path / 'colour.png')
    pairs = [(str(image), str(tmp_path / name)) for name in ('palette.png', 'colour.png')]
    report = check_label_maps(pairs, ('a', 'b'), LabelRange(2), 'train')
    assert report.counts == {'a': 0, 'b': 24}
    assert [problem.kind for problem in report.problems] == ['label map with channels']


def test_sets_inside_wrappers_are_looked_at_once(shapes):
    leaf = dict(Config.fromfile(SEGMENTATION).train_dataloader.dataset, data_root=f'{shapes}/ade')
    other = dict(leaf, data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'))
    nested = dict(type='RepeatDataset', times=2, dataset=dict(type='ConcatDataset', datasets=[leaf, other]))
    cfg = Config(dict(default_scope='mmseg', train_dataloader=dict(dataset=nested), val_dataloader=dict(dataset=other)))
    reports = check_datasets(cfg)
    assert [(report.name, report.num_images) for report in reports] == [('train 1', 6), ('train 2, val', 1)]
    with pytest.raises(RunError, match='no data set for test'):
        check_datasets(cfg, ['test'])


# ---- browse_dataset -------------------------------------------------------------------------------------
def test_browse_detection_as_a_command(shapes, tmp_path):
    result = run_command('browse_dataset', DETECTION, '--out-dir', 'pictures', '--number', '2', '--cfg-options',
                         f'data_root={shapes}/coco', cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert 'pictures: 2 picture(s)' in result.stdout
    paths = sorted((tmp_path / 'pictures').iterdir())
    assert [path.name for path in paths] == ['000000_000001.jpg', '000005_000006.jpg']
    assert all(900 < max(cv2.imread(str(path)).shape) < 1100 for path in paths)


def test_objects_are_drawn_where_they_are(shapes):
    cfg = read_config(DETECTION, dict(data_root=f'{shapes}/coco'))
    with DefaultScope.overwrite_default_scope('mmdet'):
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
        item = dataset[0]
    image, sample = item['inputs'].permute(1, 2, 0).numpy(), item['data_samples']
    visualizer = build_visualizer(cfg, dataset.metainfo)
    picture = draw_overlay(visualizer, image, sample, annotations=True)
    mask = sample.gt_instances.masks.to_ndarray().any(axis=0)
    factor = len(picture) // len(mask)
    mask = mask.repeat(factor, axis=0).repeat(factor, axis=1)
    sample.gt_instances = sample.gt_instances[:0]
    changed = np.abs(picture - draw_overlay(visualizer, image, sample, annotations=True).astype(int)).max(axis=-1) > 9
    assert changed[mask].mean() > 0.9 and changed[~mask].mean() < 0.2


def test_pictures_show_the_augmentation(shapes, tmp_path):
    cfg = read_config(SEGMENTATION, dict(data_root=f'{shapes}/ade'))
    flip = next(step for step in cfg.train_dataloader.dataset.pipeline if step.type == 'RandomFlip')
    pictures = []
    for probability in (0.0, 1.0):
        flip.prob = probability
        [path], failed = browse_dataset(cfg, 'train', tmp_path / str(probability), number=1)
        assert not failed
        picture = cv2.imread(str(path)).astype(int)
        pictures.append(picture[:picture.shape[1]])  # the crop is square, the legend below
    plain, flipped = pictures
    assert np.abs(plain - flipped[:, ::-1]).mean() < 3 < np.abs(plain - flipped).mean()


def test_same_seed_same_pictures(shapes, tmp_path):
    cfg = read_config(SEGMENTATION, dict(data_root=f'{shapes}/ade'))
    contents = [
        [path.read_bytes() for path in browse_dataset(cfg, 'train', tmp_path / str(run), number=1, seed=seed)[0]]
        for run, seed in enumerate((0, 0, 1))]
    assert contents[0] == contents[1] != contents[2]


def test_images_that_cannot_be_drawn_are_named(run_here, damaged, tmp_path):
    cut(damaged / 'coco/train/000006.jpg')
    status, output, error = run_here('browse_dataset', DETECTION, '--out-dir', tmp_path / 'pictures', '--number', 2,
                                     '--cfg-options', f'data_root={damaged}/coco')
    assert status == 1 and '1 picture(s)' in output
    assert '1 image(s) could not be drawn:\n  train 5: failed to load image' in error and '000006.jpg' in error


@pytest.mark.parametrize('args, message', [
    (['gone.py'], 'gone.py: no such config file'),
    ([DETECTION, '--number', '0'], '--number must be at least 1, got 0'),
    ([DETECTION, '--cfg-options', 'data_root=gone'], 'the data of train cannot be read: '),
    ([SEGMENTATION, '--split', 'val', '--cfg-options', 'val_dataloader=None'], 'the config has no val_dataloader'),
    ([SEGMENTATION, '--cfg-options', 'train_dataloader.dataset.type=BaseSegDatset'], 'BaseSegDatset is not registered'),
])
def test_what_cannot_be_drawn(run_here, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    status, _, error = run_here('browse_dataset', *args)
    assert status == 2 and message in error, error
    assert not list(tmp_path.iterdir())


def test_legend_fits_any_width():
    names = [f'class number {number}' for number in range(12)]
    for width in (160, 501, 1000):
        strip = _legend(names, [(200, 0, 0)] * 12, width)
        assert strip.shape[1] == width
        ink = (strip < 200).any(axis=(0, 2))
        assert not ink[0] and not ink[-1] and ink.any()
