"""Looks through the data sets of a config, as files: what is there, and what would harm a training.

COCO-style detection sets are read without MMDetection, which drops some annotations silently; of MMSegmentation only
the pairing of images and label maps is used. Every image is decoded.
"""
import io
import json
import math
import os.path as osp
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Sequence, Union

import cv2
import numpy as np
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from PIL import Image
from rich.progress import track
from rich.table import Table

from ..preflight import RunError

SPLITS = ('train', 'val', 'test')
OUTSIDE = 0.5  # pixels; a box may reach so far out of its image: COCO's own are rounded
# Pipelines scale an image by its longer side, often to a few hundred pixels: the shorter one must not vanish.
MAX_ASPECT_RATIO = 100


class Problem(NamedTuple):
    """Something that would harm a training or a test."""

    kind: str  # one of a few, to be counted
    where: str  # the file, or the file and the annotation
    what: str = ''


class Report(NamedTuple):
    """What one data set holds."""

    name: str  # its place in the config: train, val, test, with a number if there are several
    num_images: int  # listed ones
    sizes: list[tuple[int, int]]  # (width, height) in pixels, of all that could be read
    counted: str  # what is counted by class: objects or pixels
    counts: dict[str, int]  # by the config's classes
    remarks: list[str]  # worth knowing, but no problems
    problems: list[Problem]


def check_datasets(cfg: Config, splits: Sequence[str] = SPLITS) -> list[Report]:
    """Looks through the data sets of a config, those inside wrappers, too; a set that two splits share once.

    Args:
        cfg: A config of MMDetection (data sets in COCO's format) or MMSegmentation.
        splits: Of 'train', 'val', 'test', those to look at.

    Raises:
        RunError: If a data set cannot be looked at: its annotation file or image folder is missing or of an unknown
            kind, or there is none at all.
    """
    names = defaultdict(list)
    leaves = {}
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        found = list(_leaves(loader.dataset)) if loader else []
        for number, leaf in enumerate(found, 1):
            key = json.dumps([leaf.get(name) for name in ('type', 'data_root', 'ann_file', 'data_prefix')], default=str)
            leaves.setdefault(key, leaf)
            names[key].append(split if len(found) == 1 else f'{split} {number}')
    if not leaves:
        raise RunError(f'the config has no data set for {", ".join(splits)}')
    check = check_detection_set if cfg.default_scope == 'mmdet' else check_segmentation_set
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        return [check(leaf, ', '.join(names[key])) for key, leaf in leaves.items()]


def _leaves(dataset: dict) -> Iterator[dict]:
    """The data sets inside RepeatDataset, ConcatDataset and other wrappers."""
    wrapped = [dataset['dataset']] if 'dataset' in dataset else dataset.get('datasets')
    if wrapped is None:
        yield dataset
    else:
        for part in wrapped:
            yield from _leaves(part)


def _build(settings: dict) -> Any:
    """The toolbox's data set, which then knows its paths and classes but has read nothing."""
    if settings.get('backend_args'):
        raise RunError(f'{settings["type"]}: only local files can be looked at, got '
                       f'backend_args={settings["backend_args"]}')
    try:
        return DATASETS.build(dict(settings, pipeline=[], lazy_init=True))
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise RunError(f'{settings.get("type")} cannot be built: {error}') from error


# ---- images -------------------------------------------------------------------------------------------
def read_image(path: Union[str, Path], what: str = 'image') -> tuple[Optional[np.ndarray], Optional[Problem]]:
    """Reads an image to its end.

    Args:
        path: The file.
        what: What to call it.

    Returns:
        Its pixels as the toolboxes read an image (BGR, turned as EXIF says) and None, or None and what is the matter.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None, Problem(f'missing {what}', str(path))
    except OSError as error:
        return None, Problem(f'unreadable {what}', str(path), error.strerror or str(error))
    if not data:
        return None, Problem(f'unreadable {what}', str(path), 'the file is empty')
    reason = _truncation(data)  # OpenCV, by its version, fills up what is missing with grey
    if reason is not None:
        return None, Problem(f'half-written {what}', str(path), reason)
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        return None, Problem(f'unreadable {what}', str(path), 'no image that OpenCV knows')
    return pixels, None


def _truncation(data: bytes) -> Optional[str]:
    """What Pillow says of an image that ends too early; None for any other file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            Image.open(io.BytesIO(data)).load()
    except Exception as error:  # of many kinds; what else is wrong with the file, OpenCV decides
        return str(error) if 'truncated' in str(error) else None
    return None


def _side_by_side(function: Callable, items: Sequence, description: str) -> Iterator:
    """Calls a function on each item, in threads (decoding an image does not hold Python's lock), with a bar."""
    with ThreadPoolExecutor() as pool:
        yield from track(pool.map(function, items), description=description, total=len(items))


# ---- detection ----------------------------------------------------------------------------------------
def check_detection_set(settings: dict, name: str) -> Report:
    """Looks through one COCO-style data set; arguments, result and errors as for :func:`check_datasets`."""
    from mmdet.datasets import CocoDataset
    dataset = _build(settings)
    if not isinstance(dataset, CocoDataset):
        raise RunError(f'{name}: data sets in the format of COCO can be looked at, got {settings["type"]}')
    needs_masks = any(step.get('with_mask') for step in settings.get('pipeline') or ())
    report = check_coco(
        dataset.ann_file, dataset.data_prefix['img'], dataset.metainfo['classes'], needs_masks, name)
    if not any(report.counts.values()):
        report.problems.append(Problem('no objects', dataset.ann_file, "there is none of the config's classes"))
    min_size = (settings.get('filter_cfg') or {}).get('min_size', 0)
    num_small = sum(min(size) < min_size for size in report.sizes)
    if num_small and not settings.get('test_mode'):
        report.remarks.append(f'{num_small} images are left out of training: a side of less than {min_size} pixels '
                              '(filter_cfg.min_size)')
    return report


def check_coco(annotation_file: Union[str, Path], image_dir: Union[str, Path], classes: Sequence[str],
               needs_masks: bool, name: str) -> Report:
    """Looks through a data set in COCO's format.

    Args:
        annotation_file: The JSON file.
        image_dir: The folder that its file names are relative to.
        classes: The names of the categories that are to be learned.
        needs_masks: Whether a missing or empty mask is a problem.
        name: For the report.

    Raises:
        RunError: If the file cannot be read or is not in COCO's format.
    """
    content = _read_coco(annotation_file)
    if not osp.isdir(image_dir):
        raise RunError(f'{name}: {image_dir}: no such folder')
    problems = list(_double_ids(content, annotation_file))
    images = {image['id']: image for image in content['images']}
    categories = {category['id']: category['name'] for category in content['categories']}
    for class_name in classes:
        if class_name not in categories.values():
            problems.append(
                Problem('class without a category', str(annotation_file), f'no category is named {class_name!r}'))

    paths = {image_id: osp.join(image_dir, image['file_name']) for image_id, image in images.items()}
    sizes = {}
    for (size, problem), image_id in zip(_side_by_side(_size, list(paths.values()), f'{name}: images'), images):
        if problem is not None:
            problems.append(problem)
            continue
        sizes[image_id] = size
        problems += _size_problems(size, paths[image_id])
        listed = (images[image_id]['width'], images[image_id]['height'])
        if size != listed:
            problems.append(Problem('image of another size', paths[image_id], f'{_by(size)}, listed as {_by(listed)}'))

    counts = Counter(dict.fromkeys(classes, 0))
    ignored = Counter()
    num_crowds = 0
    with_objects = set()
    for annotation in track(content['annotations'], description=f'{name}: annotations'):
        image = images.get(annotation['image_id'])
        category = categories.get(annotation['category_id'])
        place = f'{annotation_file}, annotation {annotation["id"]}'
        if image is None:
            problems.append(Problem('annotation without an image', place, f'image_id {annotation["image_id"]}'))
            continue
        place = f'{paths[image["id"]]}, annotation {annotation["id"]}'
        if category is None:
            problems.append(Problem('annotation without a category', place, f'category_id {annotation["category_id"]}'))
        elif category not in classes:
            ignored[category] += 1
        elif annotation.get('iscrowd'):
            num_crowds += 1
        else:
            counts[category] += 1
            with_objects.add(image['id'])
        size = sizes.get(image['id'], (image['width'], image['height']))
        problem = _box_problem(annotation['bbox'], size)
        if problem is not None:
            problems.append(Problem(problem, place, f'box {annotation["bbox"]} (x, y, width, height) in {_by(size)}'))
        if needs_masks:
            problem = _mask_problem(annotation.get('segmentation'), size)
            if problem is not None:
                kind, what = problem
                problems.append(Problem(kind, place, what))

    remarks = [f'{len(images) - len(with_objects)} images without objects']
    if num_crowds:
        remarks.append(f'{num_crowds} crowd regions, in which nothing is learned or counted')
    remarks += [f'{count} objects of the category {category!r}, which is none of the config\'s classes'
                for category, count in ignored.items()]
    return Report(name, len(images), list(sizes.values()), 'objects', dict(counts), remarks, problems)


def _read_coco(path: Union[str, Path]) -> dict:
    try:
        content = json.loads(Path(path).read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise RunError(f'{path} cannot be read: {error}') from error
    needed = dict(images=('id', 'file_name', 'width', 'height'), categories=('id', 'name'),
                  annotations=('id', 'image_id', 'category_id', 'bbox'))
    for part, keys in needed.items():
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise RunError(f'{path} is not in the format of COCO: it has no list {part!r}')
        for index, entry in enumerate(content[part]):
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise RunError(f'{path} is not in the format of COCO: {part}[{index}] has no {missing[0]!r}')
    return content


def _double_ids(content: dict, path: Union[str, Path]) -> Iterator[Problem]:
    for part in ('images', 'annotations', 'categories'):
        for number, count in Counter(entry['id'] for entry in content[part]).items():
            if count > 1:
                yield Problem('double id', str(path), f'{count} {part} have the id {number}')


def _size(path: str) -> tuple[Optional[tuple[int, int]], Optional[Problem]]:
    pixels, problem = read_image(path)
    return (None if pixels is None else pixels.shape[1::-1]), problem


def _size_problems(size: tuple[int, int], path: str) -> list[Problem]:
    if min(size) > 1 and max(size) <= MAX_ASPECT_RATIO * min(size):
        return []
    return [Problem('thin image', path, f'{_by(size)}; most pipelines cannot crop it, or scale it by its longer side')]


def _by(size: tuple[int, int]) -> str:
    return f'{size[0]}x{size[1]}'


def _box_problem(box: Any, size: tuple[int, int]) -> Optional[str]:
    """What is the matter with a box (x, y, width, height) in an image of a size (width, height)."""
    if not isinstance(box, list) or len(box) != 4 or not all(
            isinstance(value, (int, float)) and math.isfinite(value) for value in box):
        return 'malformed box'
    left, top, width, height = box
    if width <= 0 or height <= 0:
        return 'empty box'
    if (min(left, top) < -OUTSIDE or left + width > size[0] + OUTSIDE or top + height > size[1] + OUTSIDE):
        return 'box outside the image'
    return None


def _mask_problem(mask: Any, size: tuple[int, int]) -> Optional[tuple[str, str]]:
    """Kind and details of what is the matter with a mask, polygons or RLE, in an image of a size (width, height)."""
    from pycocotools import mask as coco_mask
    if not mask:
        return 'empty mask', 'there is none'
    width, height = size
    if isinstance(mask, list):
        lengths = [len(polygon) if isinstance(polygon, list) else 0 for polygon in mask]
        if any(length < 6 or length % 2 for length in lengths):
            return 'malformed mask', f'polygons of {lengths} numbers; one has at least 6, x and y by turns'
    elif list(mask.get('size', ())) != [height, width]:
        return 'mask of another size', f'{mask.get("size")} (height, width) in an image of {_by(size)}'
    try:
        encoded = mask if isinstance(mask, dict) and isinstance(mask.get('counts'), str) else coco_mask.frPyObjects(
            mask, height, width)
        pixels = int(np.sum(coco_mask.area(encoded)))
    except Exception as error:  # the C code of pycocotools raises anything
        return 'malformed mask', str(error)
    return None if pixels else ('empty mask', 'it covers no pixel of the image')


# ---- segmentation -------------------------------------------------------------------------------------
class LabelRange(NamedTuple):
    """How a data set turns the values of its label maps into classes."""

    num_classes: int
    reduce_zero_label: bool = False  # 0 is not labelled, the classes start at 1
    label_map: Optional[dict[int, int]] = None
    ignore_index: int = 255

    def labels(self, values: np.ndarray) -> np.ndarray:
        """Class indices of the values of a label map, as MMSegmentation's LoadAnnotations makes them; -1 for values
        that stand for nothing."""
        labels = values.astype(np.int64)
        if self.reduce_zero_label:
            labels = np.where(np.isin(labels, (0, 255)), 255, labels - 1)
        if self.label_map is not None:
            labels = np.array([self.label_map.get(label, label) for label in labels.tolist()], dtype=np.int64)
        is_ignored = np.isin(labels, (255, self.ignore_index))
        is_class = (labels >= 0) & (labels < self.num_classes)
        return np.where(is_ignored, self.ignore_index, np.where(is_class, labels, -1))


class LabelMapContent(NamedTuple):
    """What one image and its label map hold."""

    size: Optional[tuple[int, int]]  # (width, height) of the image
    counts: dict[int, int]  # pixels by class index
    problems: list[Problem]


def check_segmentation_set(settings: dict, name: str) -> Report:
    """Looks through one data set of images and label maps; arguments, result and errors as for
    :func:`check_datasets`."""
    from mmseg.datasets import BaseSegDataset
    dataset = _build(settings)
    if not isinstance(dataset, BaseSegDataset):
        raise RunError(f'{name}: data sets of images and label maps can be looked at, got {settings["type"]}')
    image_dir, label_dir = dataset.data_prefix['img_path'], dataset.data_prefix.get('seg_map_path')
    for folder in (image_dir, label_dir):
        if not folder or not osp.isdir(folder):
            raise RunError(f'{name}: {folder}: no such folder')
    try:
        pairs = [(item['img_path'], item['seg_map_path']) for item in dataset.load_data_list()]
    except (OSError, AssertionError, KeyError) as error:
        raise RunError(f'{name}: the images cannot be listed: {error}') from error
    if not dataset.ann_file:
        # Images were listed by what is in the folder: a label map may be left alone.
        paired = {osp.normpath(label_map) for _, label_map in pairs}
        pairs += [(_image_of(label_map, dataset), str(label_map))
                  for label_map in sorted(Path(label_dir).rglob(f'*{dataset.seg_map_suffix}'))
                  if osp.normpath(label_map) not in paired]
    if not pairs:
        raise RunError(f'{name}: no image {osp.join(image_dir, "**/*" + dataset.img_suffix)}')
    label_range = LabelRange(len(dataset.metainfo['classes']), dataset.reduce_zero_label, dataset.label_map,
                             dataset.ignore_index)
    return check_label_maps(pairs, dataset.metainfo['classes'], label_range, name)


def _image_of(label_map: Path, dataset: Any) -> str:
    relative = osp.relpath(label_map, dataset.data_prefix['seg_map_path'])
    return osp.join(dataset.data_prefix['img_path'], relative[:-len(dataset.seg_map_suffix)] + dataset.img_suffix)


def check_label_maps(pairs: Iterable[tuple[str, str]], classes: Sequence[str], label_range: LabelRange,
                     name: str) -> Report:
    """Looks through images and their label maps.

    Args:
        pairs: Files: image and label map.
        classes: Names of the classes.
        label_range: How values become classes.
        name: For the report.
    """
    pairs = list(pairs)
    sizes, counts, problems = [], Counter(), []
    for content in _side_by_side(lambda pair: _look_at_pair(*pair, label_range), pairs, f'{name}: images'):
        sizes += [content.size] if content.size else []
        counts.update(content.counts)
        problems += content.problems
    by_class = {class_name: counts[index] for index, class_name in enumerate(classes)}
    ignored = counts[label_range.ignore_index]
    total = sum(by_class.values()) + ignored
    remarks = [f'{ignored / total:.1%} of the pixels are not labelled'] if total else []
    return Report(name, len(pairs), sizes, 'pixels', by_class, remarks, problems)


def _look_at_pair(image: str, label_map: str, label_range: LabelRange) -> LabelMapContent:
    size, problem = _size(image)
    problems = [problem] if problem else _size_problems(size, image)
    values, problem = _read_label_map(label_map)
    if problem is not None:
        return LabelMapContent(size, {}, [*problems, problem])
    label_size = values.shape[1::-1]
    if size is not None and label_size != size:
        problems.append(Problem('label map of another size', label_map, f'{_by(label_size)}, the image {_by(size)}'))
    values, pixels = np.unique(values, return_counts=True)
    labels = label_range.labels(values)
    unknown = values[labels < 0].tolist()
    if unknown:
        problems.append(Problem(
            'label out of range', label_map,
            f'{pixels[labels < 0].sum()} pixels of {", ".join(map(str, unknown[:10]))}'
            f'{" ..." if len(unknown) > 10 else ""}; {label_range.num_classes} classes'
            f'{" from 1" if label_range.reduce_zero_label else " from 0"}'))
    if (labels == label_range.ignore_index).all():
        problems.append(Problem('empty label map', label_map, 'no pixel is labelled'))
    counts = Counter()
    for label, count in zip(labels.tolist(), pixels.tolist()):
        if label >= 0:
            counts[label] += count
    return LabelMapContent(size, counts, problems)


def _read_label_map(path: str) -> tuple[Optional[np.ndarray], Optional[Problem]]:
    """The values of a label map, (height, width), as MMSegmentation reads them: a palette's indices, not colours."""
    _, problem = read_image(path, 'label map')
    if problem is not None:
        return None, problem
    try:
        values = np.array(Image.open(path))
    except Exception as error:  # of many kinds
        return None, Problem('unreadable label map', path, str(error))
    if values.ndim != 2:
        return None, Problem('label map with channels', path, f'{values.shape[2]}; a label map has one value per pixel')
    return values, None


# ---- tables -------------------------------------------------------------------------------------------
def overview_table(reports: list[Report]) -> Table:
    """One column per data set: images, their sizes, and how often each class was seen."""
    table = Table(title='What the data sets hold', title_justify='left')
    table.add_column()
    for report in reports:
        table.add_column(report.name, justify='right')
    table.add_row('images', *(str(report.num_images) for report in reports))
    for side, row in enumerate(('width, pixels', 'height, pixels')):
        table.add_row(row, *(_spread([size[side] for size in report.sizes]) for report in reports))
    table.add_section()
    classes = list(dict.fromkeys(name for report in reports for name in report.counts))
    for name in classes:
        table.add_row(f'{reports[0].counted}: {name}', *(_share(report, name) for report in reports))
    return table


def _spread(values: list[int]) -> str:
    if not values:
        return 'none read'
    if min(values) == max(values):
        return str(values[0])
    return f'{min(values)} to {max(values)}, median {np.median(values):.0f}'


def _share(report: Report, class_name: str) -> str:
    if class_name not in report.counts:
        return 'not a class'
    count, total = report.counts[class_name], sum(report.counts.values())
    return f'{count}  {count / total:6.1%}' if total else str(count)


def problem_table(reports: list[Report]) -> Table:
    """How many problems of each kind there are, one column per data set."""
    kinds = Counter(problem.kind for report in reports for problem in report.problems)
    table = Table(title='Problems', title_justify='left')
    table.add_column()
    for report in reports:
        table.add_column(report.name, justify='right')
    for kind in kinds:
        table.add_row(kind, *(str(sum(problem.kind == kind for problem in report.problems)) for report in reports))
    return table
