"""Bad input of every kind: a clear error or a counted skip, and nothing else is lost.

One table for each kind of input, with a line for each case; docs/reliability.md shows them together. test_data_tools.py
goes deeper into annotations and label maps, test_safe_loading.py into files of weights.
"""
import io
import json
import math
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple, Optional

import mmcv
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image

from mminline import runs
from mminline.analysis.dataset_check import Report, check_datasets, read_image
from mminline.apis import encode_mask, infer
from mminline.build import build_model, load_model
from mminline.datasets import make_shapes
from mminline.models import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin
from mminline.preflight import RunError
from mminline.publish import publish_checkpoint
from mminline.runs import read_config

from .test_infer import make_model

KINDS = ('detection', 'segmentation')


# ---- models, data, one step of training ---------------------------------------------------------------
@pytest.fixture(scope='module')
def models(tmp_path_factory):
    """A narrow detector and segmentor with random weights: ``config`` and ``checkpoint`` of each are files."""
    return {kind: make_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    """A clean data set in both formats."""
    root = tmp_path_factory.mktemp('data') / 'shapes'
    make_shapes(root, num_images=2)
    return root


@pytest.fixture(scope='module')
def trainable(models):
    return {kind: load_model(models[kind].cfg, models[kind].checkpoint, 'cpu').train() for kind in KINDS}


@pytest.fixture
def damaged(shapes, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(shapes, tmp_path / 'shapes'))


def config_with(models, kind: str, root: Path) -> Config:
    folder = {'detection': 'coco', 'segmentation': 'ade'}[kind]
    return read_config(models[kind].config, dict(data_root=f'{root / folder}'))


def config_of_a_run(model: SimpleNamespace, data_root: Path, folder: Path) -> Config:
    cfg = read_config(model.config, dict(data_root=str(data_root)))
    cfg.work_dir = str(folder / 'run')
    cfg.launcher = 'none'
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.update(num_workers=0, persistent_workers=False)
    return cfg


def look_through(cfg: Config) -> Report:
    """What tools/check_dataset.py says of the training data."""
    [report] = check_datasets(cfg, ['train'])
    return report


def load_items(cfg: Config) -> dict[str, Callable[[], dict]]:
    """By image name, what the training pipeline makes of it, once called; images that training leaves out are not
    there."""
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
    return {Path(dataset.get_data_info(index)['img_path']).stem: lambda index=index: dataset.prepare_data(index)
            for index in range(len(dataset))}


def train_on(model, items: list[dict]) -> None:
    """One step of training but for the optimiser's; everything is finite, or it fails."""
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet' if hasattr(model, 'rpn_head') else 'mmseg'):
        data = model.data_preprocessor(pseudo_collate(items), training=True)
        loss, log_vars = model.parse_losses(model(**data, mode='loss'))
    model.zero_grad()
    loss.backward()
    assert all(math.isfinite(float(value)) for value in log_vars.values()), log_vars
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


# ---- images -------------------------------------------------------------------------------------------
SCENE = Image.fromarray(np.stack(
    [np.linspace(start, end, 80, dtype=np.uint8)[None].repeat(48, 0) for start, end in ((0, 255), (255, 0), (90, 90))],
    axis=-1))
NOISE = Image.fromarray(np.random.default_rng(0).integers(256, size=(48, 80, 3), dtype=np.uint8))
DEEP = np.asarray(SCENE.convert('L')).astype(np.uint16) * 256 + 77


def encode(image: Image.Image, kind: str = 'PNG', **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned_by_exif() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held upright
    return encode(SCENE, 'JPEG', exif=exif, quality=95)


LEFT_OUT = 'left out'


class Picture(NamedTuple):
    """A file, and what becomes of it; readable, whole, harmless if nothing else is said."""

    data: bytes
    expected: Optional[Image.Image]  # as it is read; None if it cannot be
    problem: Optional[str] = None  # named by tools/check_dataset.py
    skipped: dict[str, str] = {}  # by kind of model: tools/infer.py skips it, with this reason
    training: dict[str, str] = {}  # by kind of model: the error of training, or LEFT_OUT


def damaged_file(data: bytes) -> Picture:
    reason = dict.fromkeys(KINDS, 'failed to load image')
    return Picture(data, None, 'half-written image', skipped=reason, training=reason)


def thin(width: int, height: int, **skipped: str) -> Picture:
    # MMDetection's filter_cfg has a min_size; MMSegmentation squeezes label maps, and cannot crop what is left.
    image = SCENE.resize((width, height))
    return Picture(encode(image), image, 'thin image', skipped,
                   dict(detection=LEFT_OUT, segmentation='too many indices for array|does not support item assignment'))


GREY = SCENE.convert('L')
PICTURES = {
    'truncated JPEG': damaged_file(encode(NOISE, 'JPEG')[:1500]),
    'JPEG without its end': damaged_file(encode(NOISE, 'JPEG')[:-40]),
    '16-bit PNG': Picture(encode(Image.fromarray(DEEP)), GREY),  # its upper 8 bits
    'greyscale PNG': Picture(encode(GREY), GREY),
    'greyscale JPEG': Picture(encode(GREY, 'JPEG'), GREY),
    'RGBA PNG': Picture(encode(Image.merge('RGBA', [*SCENE.split(), Image.new('L', SCENE.size, 9)])), SCENE),
    'CMYK JPEG': Picture(encode(SCENE.convert('CMYK'), 'JPEG', quality=95), SCENE),
    'turned by EXIF': Picture(turned_by_exif(), SCENE.transpose(Image.Transpose.ROTATE_270)),
    '1x1': thin(1, 1),
    '1x4000': thin(1, 4000, detection='the test pipeline does not take its 1x4000 pixels: .*resize'),
    '4000x1': thin(4000, 1, detection='the test pipeline does not take its 4000x1 pixels: .*resize'),
    'good': Picture(encode(SCENE), SCENE),
}


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    """A data set of them in both formats. All are called .jpg: decoders go by what is in a file."""
    root = tmp_path_factory.mktemp('pictures')
    coco, ade = root / 'coco', root / 'ade'
    for folder in (coco / 'train', coco / 'annotations', ade / 'images/training', ade / 'annotations/training'):
        folder.mkdir(parents=True)
    content = dict(images=[], annotations=[], categories=[dict(id=1, name='circle'), dict(id=2, name='square'),
                                                          dict(id=3, name='triangle')])
    for number, (name, picture) in enumerate(PICTURES.items()):
        width, height = (picture.expected or SCENE).size
        for folder in (coco / 'train', ade / 'images/training'):
            (folder / f'{name}.jpg').write_bytes(picture.data)
        Image.new('L', (width, height), 2).save(ade / f'annotations/training/{name}.png')
        content['images'].append(dict(id=number, file_name=f'{name}.jpg', width=width, height=height))
        content['annotations'].append(
            dict(id=number, image_id=number, category_id=1, bbox=[0, 0, width, height], area=width * height, iscrowd=0,
                 segmentation=[[0, 0, width, 0, width, height, 0, height]]))
    (coco / 'annotations/train.json').write_text(json.dumps(content))
    return root


@pytest.fixture(scope='module', params=KINDS)
def seen(request, models, trainable, pictures, tmp_path_factory):
    """What inference, the check and the training of one kind of model make of all pictures."""
    kind = request.param
    DefaultScope._instance_dict.clear()
    cfg = config_with(models, kind, pictures)
    inference = infer(cfg, models[kind].checkpoint, pictures / 'coco/train', tmp_path_factory.mktemp('out'),
                      device='cpu', batch_size=4)
    return SimpleNamespace(
        kind=kind, model=trainable[kind], report=look_through(cfg), items=load_items(cfg),
        results={Path(entry['file']).stem: entry for entry in inference.results},
        unreadable={Path(file).stem: reason for file, reason in inference.unreadable.items()})


@pytest.mark.parametrize('name', PICTURES)
def test_picture_in_inference(seen, name):
    reason = PICTURES[name].skipped.get(seen.kind)
    assert (name in seen.results) == (reason is None) and (name in seen.unreadable) == (reason is not None)
    if reason is None:
        assert (seen.results[name]['width'], seen.results[name]['height']) == PICTURES[name].expected.size
    else:
        assert re.search(reason, seen.unreadable[name])


@pytest.mark.parametrize('name', PICTURES)
def test_picture_in_the_check(seen, name, pictures):
    problems = [problem.kind for problem in seen.report.problems if Path(problem.where).stem == name]
    expected = PICTURES[name].expected
    assert problems == [PICTURES[name].problem] if PICTURES[name].problem else not problems
    pixels, _ = read_image(pictures / f'coco/train/{name}.jpg')
    if expected is not None:
        assert pixels.shape[1::-1] == expected.size
        assert np.abs(pixels[..., ::-1] - np.asarray(expected.convert('RGB'), dtype=int)).mean() < 3
        np.testing.assert_array_equal(pixels, mmcv.imread(pictures / f'coco/train/{name}.jpg'))


@pytest.mark.parametrize('name', PICTURES)
def test_picture_in_training(seen, name):
    outcome = PICTURES[name].training.get(seen.kind)
    if outcome == LEFT_OUT:
        assert name not in seen.items
    elif outcome:
        with pytest.raises((AssertionError, IndexError, TypeError), match=outcome):
            seen.items[name]()
    else:
        train_on(seen.model, [seen.items[name](), seen.items['good']()])


def test_what_training_leaves_out_is_counted(models, pictures):
    remarks = look_through(config_with(models, 'detection', pictures)).remarks
    assert '3 images are left out of training: a side of less than 32 pixels (filter_cfg.min_size)' in remarks


# ---- annotations of detection -------------------------------------------------------------------------
def change(**values) -> Callable[[dict], None]:
    """Gives the first object other values."""
    return lambda content: content['annotations'][0].update(values)


def rle(compressed: bool, iscrowd: int = 0) -> Callable[[dict], None]:
    def make(content):
        annotation = content['annotations'][0]
        image = next(image for image in content['images'] if image['id'] == annotation['image_id'])
        height, width = image['height'], image['width']
        mask = np.zeros((height, width), np.uint8)
        mask[:, 10:25] = 1
        counts = [10 * height, 15 * height, (width - 25) * height]
        annotation.update(bbox=[10, 0, 15, height], area=15 * height, iscrowd=iscrowd,
                          segmentation=encode_mask(mask) if compressed else dict(size=[height, width], counts=counts))
    return make


def repeat(part: str, **values) -> Callable[[dict], None]:
    """Lists the first entry twice."""
    return lambda content: content[part].append(dict(content[part][0], **values))


def spread_category_ids(content: dict) -> None:
    for entry in content['categories']:
        entry['id'] = 7 + 10 * entry['id']
    for entry in content['annotations']:
        entry['category_id'] = 7 + 10 * entry['category_id']


def without_objects(content: dict) -> None:
    """The first image loses its objects."""
    image_id = content['images'][0]['id']
    content['annotations'] = [entry for entry in content['annotations'] if entry['image_id'] != image_id]


# What is done to a clean set, what the check names, and the error of training, if there is one.
ANNOTATIONS = {
    'nothing': (lambda content: None, [], None),
    'zero-area box': (change(bbox=[5, 5, 0, 5]), ['empty box'], None),
    'negative width': (change(bbox=[5, 5, -10, 5]), ['empty box'], None),
    'box outside the image': (change(bbox=[5000, 5, 10, 10]), ['box outside the image'], None),
    'box partly outside': (change(bbox=[-20, -20, 60, 60]), ['box outside the image'], None),
    'compressed RLE': (rle(compressed=True), [], None),
    'uncompressed RLE': (rle(compressed=False), [], None),
    'crowd': (rle(compressed=False, iscrowd=1), [], None),
    'image without annotations': (without_objects, [], None),
    'empty annotation list': (lambda content: content.update(annotations=[]), ['no objects'], 'concatenate'),
    'category ids with gaps': (spread_category_ids, [], None),
    'unknown category id': (change(category_id=99), ['annotation without a category'], None),
    'duplicate annotation id': (repeat('annotations'), ['double id'], 'Annotation ids in .* are not unique'),
    'duplicate image id': (repeat('images'), ['double id'], None),
    'duplicate category id': (repeat('categories', name='hexagon'), ['double id', 'class without a category'], None),
}


@pytest.mark.parametrize('name', ANNOTATIONS)
def test_annotations(models, trainable, damaged, name):
    make, problems, error = ANNOTATIONS[name]
    path = damaged / 'coco/annotations/train.json'
    content = json.loads(path.read_text())
    make(content)
    path.write_text(json.dumps(content))
    cfg = config_with(models, 'detection', damaged)

    report = look_through(cfg)
    assert [problem.kind for problem in report.problems] == problems
    assert ('1 crowd regions, in which nothing is learned or counted' in report.remarks) == (name == 'crowd')
    if error:
        with pytest.raises((AssertionError, ValueError), match=error):
            load_items(cfg)
    else:
        train_on(trainable['detection'], [load() for load in load_items(cfg).values()])


def test_a_run_without_any_object(models, damaged, tmp_path):
    path = damaged / 'coco/annotations/train.json'
    path.write_text(json.dumps(dict(json.loads(path.read_text()), annotations=[])))
    cfg = config_of_a_run(models['detection'], damaged / 'coco', tmp_path)
    with pytest.raises(RunError, match='no image is left of a data set: .* tools/check_dataset.py CONFIG says'):
        runs.train(cfg)


# ---- label maps of segmentation -----------------------------------------------------------------------
# Classes are 1 to 4, 0 is not labelled. What is done to one map, what the check names, the error of training.
LABEL_MAPS = {
    'nothing': (lambda labels: labels, [], None),
    'above the class count': (lambda labels: np.where(labels == 1, 9, labels), ['label out of range'],
                              'Target 8 is out of bounds'),
    'above 255, 16 bits': (lambda labels: np.where(labels == 1, 300, labels).astype(np.uint16), ['label out of range'],
                           'Target 43 is out of bounds'),
    'partly 255': (lambda labels: np.where(labels == 1, 255, labels), [], None),
    'all 255': (lambda labels: np.full_like(labels, 255), ['empty label map'], None),
    'all 0': (np.zeros_like, ['empty label map'], None),
}


@pytest.mark.parametrize('name', LABEL_MAPS)
def test_label_maps(models, trainable, damaged, name):
    make, problems, error = LABEL_MAPS[name]
    path = damaged / 'ade/annotations/training/000001.png'
    labels = make(np.array(Image.open(path)))
    Image.fromarray(labels if labels.dtype == np.uint16 else labels.astype(np.uint8)).save(path)
    cfg = config_with(models, 'segmentation', damaged)

    assert [problem.kind for problem in look_through(cfg).problems] == problems
    items = [load() for load in load_items(cfg).values()]
    if error:
        with pytest.raises(IndexError, match=error):
            train_on(trainable['segmentation'], items)
    else:
        train_on(trainable['segmentation'], items)
        train_on(trainable['segmentation'], [items[0]] * 2)  # nothing but this map


# ---- checkpoints --------------------------------------------------------------------------------------
def load_pretrained_weights(cfg: Config, checkpoint: Path, image: Path, out_dir: Path) -> None:
    cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=str(checkpoint))
    build_model(cfg).init_weights()


# All places that read weights. Each takes a config, the file, an image and a folder for what it makes.
READERS = {
    'pretrained': load_pretrained_weights,
    'load_from': lambda cfg, checkpoint, image, out_dir: runs.train(Config(dict(cfg, load_from=str(checkpoint)))),
    'resume': lambda cfg, checkpoint, image, out_dir: runs.train(cfg, resume=str(checkpoint)),
    'test': lambda cfg, checkpoint, image, out_dir: runs.test(cfg, str(checkpoint)),
    'infer': lambda cfg, checkpoint, image, out_dir: infer(cfg, checkpoint, image, out_dir, device='cpu'),
    'publish': lambda cfg, checkpoint, image, out_dir: publish_checkpoint(cfg, checkpoint, out_dir),
}


def with_nan(models, path: Path) -> None:
    content = torch.load(models['detection'].checkpoint, weights_only=True)
    content['state_dict']['backbone.block2.0.mlp.fc1.weight'][3, 4] = math.nan
    torch.save(content, path)


def truncated(models, path: Path) -> None:
    data = models['detection'].checkpoint.read_bytes()
    path.write_bytes(data[:len(data) // 2])


def of_another_architecture(models, path: Path) -> None:
    shutil.copy(models['segmentation'].checkpoint, path)


NOT_FINITE = r'bad\.pth.* holds weights that are not finite, in 1 of .*\((backbone\.)?block2\.0\.mlp\.fc1\.weight\)'
OTHER_PARAMETERS = r'\d+ parameters differ, such as \S+, .* in the checkpoint and .* in the model'
CHECKPOINTS = {
    'NaN': (with_nan, dict.fromkeys(READERS, NOT_FINITE)),
    'truncated': (truncated, dict.fromkeys(READERS, r'bad\.pth cannot be read as a checkpoint; it seems damaged')),
    'another architecture': (of_another_architecture, {
        **dict.fromkeys(READERS, OTHER_PARAMETERS),
        **dict.fromkeys(('pretrained', 'load_from'), 'these weights do not fit InLinePVT')}),
}


@pytest.mark.parametrize('reader', READERS)
@pytest.mark.parametrize('name', CHECKPOINTS)
def test_checkpoint(models, shapes, tmp_path, name, reader):
    make, messages = CHECKPOINTS[name]
    make(models, tmp_path / 'bad.pth')
    cfg = config_of_a_run(models['detection'], shapes / 'coco', tmp_path)
    with pytest.raises((RunError, ValueError, RuntimeError, pickle.UnpicklingError), match=messages[reader]):
        READERS[reader](cfg, tmp_path / 'bad.pth', shapes / 'coco/train/000001.jpg', tmp_path / 'out')
    assert not (tmp_path / 'out').exists() and not list(tmp_path.glob('run/*.pth'))


@pytest.mark.parametrize('reader', ['pretrained', 'test'])
def test_whole_checkpoint(models, shapes, tmp_path, reader):
    """The refusals above are not those of any file."""
    cfg = config_of_a_run(models['detection'], shapes / 'coco', tmp_path)
    READERS[reader](cfg, models['detection'].checkpoint, shapes / 'coco/train/000001.jpg', tmp_path / 'out')


# ---- arguments of the backbones -----------------------------------------------------------------------
PYRAMID = dict(embed_dims=(32, 32, 64, 64), num_heads=(2, 2, 4, 4), depths=(1, 1, 1, 1))
ARCHS = {
    InLinePVT: {**PYRAMID, 'mlp_ratios': (2, 2, 2, 2)},
    InLineSwin: {**PYRAMID, 'attn_types': ('inline', 'inline', 'softmax', 'softmax')},
    InLineCSwin: {**PYRAMID, 'attn_types': ('inline', 'inline', 'softmax', 'softmax')},
    InLineDeiT: dict(embed_dims=32, num_heads=2, depth=2, pretrain_img_size=64),
}
PYRAMIDS = (InLinePVT, InLineSwin, InLineCSwin)


def each(families, message: str, settings: Optional[dict] = None, **options) -> list[tuple]:
    """One case for each family: other settings of its arch, other arguments."""
    return [(family, settings or {}, options, message) for family in families]


ARGUMENTS = {
    'unknown arch': each(ARCHS, r"arch must be one of .*, got 'tinny'; did you mean 'tiny'\?", arch='tinny'),
    'too few attn_types': each(PYRAMIDS, r'attn_types must have 4 values, one per stage, got \(.inline.,\)',
                               attn_types=('inline',)),
    'too many attn_types': each([InLineDeiT], r"attn_types must have 1 values, .*, got \('inline', 'inline'\)",
                                attn_types=('inline', 'inline')),
    'attn_types of blocks': each(PYRAMIDS, r"attn_types of a stage must be .* 1, .*got \('inline', 'inline'\)",
                                 attn_types=(('inline', 'inline'), 'inline', 'inline', 'inline')),
    'heads that do not divide': [
        *each(PYRAMIDS, 'num_heads must divide embed_dims=32, got 3', dict(num_heads=(3, 2, 4, 4))),
        *each([InLineDeiT], 'num_heads must divide embed_dims=32, got 3', dict(num_heads=3)),
        *each([InLineCSwin], 'num_heads .* must be even .*, got 1', dict(num_heads=(2, 2, 1, 4))),
        *each([InLineCSwin], 'num_heads .* divide embed_dims=64, got 6', dict(num_heads=(2, 2, 6, 4)))],
    'drop rate': [case for rate in (-0.1, 1.0, 1.5, math.nan)
                  for case in each(ARCHS, rf'drop_path_rate must be in \[0, 1\), got {rate}', drop_path_rate=rate)],
    'no heads': each(PYRAMIDS, r'num_heads must be positive, got \(2, 0, 4, 4\)', dict(num_heads=(2, 0, 4, 4))),
    'negative embed_dims': [
        *each(PYRAMIDS, r'embed_dims must be positive, got \(32, -32, 64, 64\)', dict(embed_dims=(32, -32, 64, 64))),
        *each([InLineDeiT], 'embed_dims must be positive, got -32', dict(embed_dims=-32))],
    'negative depth': [
        *each(PYRAMIDS, r'depths must be positive, got \(1, 1, -1, 1\)', dict(depths=(1, 1, -1, 1))),
        *each([InLineDeiT], 'depth must be positive, got -2', dict(depth=-2))],
    'negative mlp_ratios': each([InLinePVT], r'mlp_ratios must be positive, got \(2, 2, -2, 2\)',
                                dict(mlp_ratios=(2, 2, -2, 2))),
    'negative in_channels': each(ARCHS, 'in_channels must be positive, got -3', in_channels=-3),
    'negative image size': [
        *each([InLinePVT, InLineDeiT], r'pretrain_img_size must be a positive int or .*, got \(64, -64\)',
              pretrain_img_size=(64, -64))],
    'negative window': [*each([InLineSwin], 'window_size must be positive, got -7', window_size=-7),
                        *each([InLineCSwin], 'split_size must be positive, got -7', split_size=-7)],
}


@pytest.mark.parametrize('name', ARGUMENTS)
def test_argument(name):
    for family, settings, options, message in ARGUMENTS[name]:
        arguments = {'arch': {**ARCHS[family], **settings}, **options}
        if family is InLineDeiT:
            arguments['out_indices'] = (1,)  # of two blocks
        with pytest.raises(ValueError, match=message):
            family(**arguments)
