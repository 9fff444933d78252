"""Inference in one call: what a trained model finds in image files, as JSON and as pictures."""
import glob
import itertools
import json
import os.path as osp
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Union

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import TRANSFORMS, DefaultScope
from mmengine.structures import BaseDataElement, InstanceData
from rich.progress import track

from .analysis.overlays import build_visualizer, draw_overlay
from .build import load_model
from .preflight import RunError
from .runs import innermost_dataset, read_config

IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp')
OVERLAYS, LABEL_MAPS = 'overlays', 'label_maps'  # folders of the results


class Inference(NamedTuple):
    """What :func:`infer` found."""

    results: list[dict]  # one per image, as in results.json
    unreadable: dict[str, str]  # file: why it was skipped


class LoadedImage(NamedTuple):
    """An image on its way to the model."""

    file: str  # as it was given
    pixels: np.ndarray  # (height, width, 3), BGR
    packed: dict  # what the test pipeline made of it


def infer(config: Union[str, Path, Config], checkpoint: Union[str, Path],
          images: Union[str, Path, Iterable[Union[str, Path]]], out_dir: Union[str, Path], *,
          device: Optional[str] = None, batch_size: int = 1, score_thr: float = 0.3) -> Inference:
    """Finds objects, or labels pixels, in images, and writes what was found below a folder::

        OUT_DIR/results.json           a list with one entry per image
        OUT_DIR/overlays/NAME.jpg      the image with what was found drawn on it
        OUT_DIR/label_maps/NAME.png    segmentation: the class index of each pixel, 8 bit (16 from 256 classes)

    An entry has ``file`` (as given), ``width`` and ``height`` (pixels) and ``overlay`` (a file below OUT_DIR).
    For detection it has ``detections``, highest score first, each with ``class`` (name), ``score`` (0 to 1),
    ``box`` (x1, y1, x2, y2 in pixels) and, if the model predicts masks, ``mask`` (COCO's compressed RLE: ``size`` and
    ``counts``). For segmentation it has ``label_map`` (a file below OUT_DIR) and ``classes``, a list with the names of
    all classes, in the order of their indices. NAME is the image's, with a number behind it where two are alike.

    Pixels are those of the image as the toolbox loads it: turned as its EXIF data say. The results are there up to
    the last finished batch, too, if anything stops the work.

    Args:
        config: A config of MMDetection or MMSegmentation, or its file.
        checkpoint: The weights, a file of a run.
        images: Files, folders (the images in them, not below) and patterns such as ``'photos/*/front.jpg'``.
        out_dir: Folder for the results; made if it is not there. Files of the same name are replaced.
        device: As torch names it, such as ``'cuda:1'``; by default the accelerator, if there is one.
        batch_size: How many images go through the model at once. A segmentor takes only images of one size at once:
            a batch ends where the next image has another one.
        score_thr: Objects that score less are left out; 0 to 1. Without meaning for segmentation.

    Returns:
        The entries of results.json, in the order of the images, and the images that could not be read, or that the
        config's test pipeline does not take.

    Raises:
        ValueError: If ``batch_size`` or ``score_thr`` is out of range.
        RunError: If the work cannot start: the config, the checkpoint or the device cannot be used, there is no image
            at all, or one would be overwritten.
        OSError: If the results cannot be written.
    """
    if batch_size < 1:
        raise ValueError(f'batch_size must be at least 1, got {batch_size}')
    if not 0 <= score_thr <= 1:
        raise ValueError(f'score_thr must be from 0 to 1, got {score_thr}')
    out_dir = Path(out_dir)
    files, unreadable = find_images([images] if isinstance(images, (str, Path)) else images)
    _check_apart(files, out_dir)
    cfg = config if isinstance(config, Config) else read_config(config)
    model = load_model(cfg, checkpoint, device)
    visualizer = build_visualizer(cfg, model.dataset_meta)
    names = _output_names(files)
    is_detection = cfg.default_scope == 'mmdet'
    batches = _batches(_load(files, cfg, unreadable), batch_size, mixed_sizes=is_detection)

    for folder in (OVERLAYS,) if is_detection else (OVERLAYS, LABEL_MAPS):
        (out_dir / folder).mkdir(parents=True, exist_ok=True)
    results = []
    with _json_list(out_dir / 'results.json') as append, DefaultScope.overwrite_default_scope(cfg.default_scope):
        for batch in batches:
            for image, sample in zip(batch, _predict(model, batch)):
                height, width = image.pixels.shape[:2]
                result = dict(file=image.file, width=width, height=height)
                name = names[image.file]
                if is_detection:
                    sample.pred_instances = sample.pred_instances[sample.pred_instances.scores >= score_thr]
                    result['detections'] = _detections(sample.pred_instances, model.dataset_meta['classes'])
                else:
                    result['label_map'] = f'{LABEL_MAPS}/{name}.png'
                    result['classes'] = list(model.dataset_meta['classes'])
                    _write_image(_label_map(sample, len(result['classes'])), out_dir / result['label_map'])
                result['overlay'] = f'{OVERLAYS}/{name}.jpg'
                _write_image(draw_overlay(visualizer, image.pixels, sample, annotations=False),
                             out_dir / result['overlay'])
                append(result)
                results.append(result)
    return Inference(results, unreadable)


# ---- images -------------------------------------------------------------------------------------------
def find_images(patterns: Iterable[Union[str, Path]]) -> tuple[list[str], dict[str, str]]:
    """Finds image files.

    Args:
        patterns: Files, folders and glob patterns.

    Returns:
        The files, in the order of the patterns and sorted within one, each once; and, for each pattern that stands
        for no file, why.

    Raises:
        RunError: If there is no file at all.
    """
    files, nothing = {}, {}
    for pattern in map(str, patterns):
        path = Path(pattern)
        if path.is_dir():
            found = sorted(str(file) for file in path.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
            reason = 'no images in this folder'
        else:
            found = [pattern] if path.is_file() else sorted(filter(osp.isfile, glob.glob(pattern, recursive=True)))
            reason = 'no such file'
        files.update(dict.fromkeys(found))
        if not found:
            nothing[pattern] = reason
    if not files:
        reasons = '; '.join(f'{pattern}: {reason}' for pattern, reason in nothing.items())
        raise RunError(f'there are no images: {reasons or "none were given"}')
    return list(files), nothing


def _check_apart(files: list[str], out_dir: Path) -> None:
    written_to = {(out_dir / folder).resolve() for folder in (OVERLAYS, LABEL_MAPS)}
    for file in files:
        if Path(file).resolve().parent in written_to:
            raise RunError(f'{file} is where results would be written: choose another folder for them')


def _output_names(files: list[str]) -> dict[str, str]:
    """A file name without suffix for the results of each image; no two differ in upper and lower case only."""
    names, taken = {}, set()
    for file in files:
        stem = Path(file).stem
        numbered = itertools.chain([stem], (f'{stem}_{number}' for number in itertools.count(2)))
        names[file] = next(name for name in numbered if name.casefold() not in taken)
        taken.add(names[file].casefold())
    return names


def _load(files: list[str], cfg: Config, unreadable: dict[str, str]) -> Iterator[LoadedImage]:
    """Loads images with a config's test pipeline; notes those that cannot be read or prepared."""
    loading, *preparing = (step for step in innermost_dataset(cfg).pipeline if not _loads_annotations(step))
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        load, prepare = TRANSFORMS.build(loading), Compose(preparing)
    for index, file in enumerate(track(files, description='inference')):
        try:
            loaded = load(dict(img_path=file, img_id=index))
        except Exception as error:  # decoders meet a damaged file with many kinds of exception
            unreadable[file] = _in_one_line(error)
            continue
        pixels = loaded['img'].copy()
        try:
            packed = prepare(loaded)
        except Exception as error:  # so do transforms, such as a resize to no pixels
            height, width = pixels.shape[:2]
            unreadable[file] = f'the test pipeline does not take its {width}x{height} pixels: {_in_one_line(error)}'
            continue
        yield LoadedImage(file, pixels, packed)


def _in_one_line(error: Exception) -> str:
    return ' '.join(str(error).split()) or type(error).__name__


def _loads_annotations(step: dict) -> bool:
    kind = step['type']  # a name or a class
    return getattr(kind, '__name__', kind).endswith('Annotations')


def _batches(images: Iterable[LoadedImage], batch_size: int, mixed_sizes: bool) -> Iterator[list[LoadedImage]]:
    batch = []
    for image in images:
        fits = not batch or mixed_sizes or image.packed['inputs'].shape == batch[0].packed['inputs'].shape
        if len(batch) == batch_size or not fits:
            yield batch
            batch = []
        batch.append(image)
    if batch:
        yield batch


# ---- predictions --------------------------------------------------------------------------------------
def _predict(model: torch.nn.Module, batch: list[LoadedImage]) -> list[BaseDataElement]:
    try:
        with torch.no_grad():
            return [sample.cpu() for sample in model.test_step(pseudo_collate([image.packed for image in batch]))]
    except torch.OutOfMemoryError as error:
        raise RunError(f'the memory of the device does not take {len(batch)} image(s) at once, {batch[0].file} among '
                       f'them: {str(error).splitlines()[0]}') from error


def _detections(objects: InstanceData, classes: list[str]) -> list[dict]:
    detections = []
    for index in objects.scores.argsort(descending=True, stable=True).tolist():
        detection = dict(
            score=round(objects.scores[index].item(), 4),
            box=[round(edge, 2) for edge in objects.bboxes[index].tolist()])
        detection = {'class': classes[objects.labels[index]], **detection}
        if 'masks' in objects:
            detection['mask'] = encode_mask(objects.masks[index].numpy())
        detections.append(detection)
    return detections


def encode_mask(mask: np.ndarray) -> dict:
    """A mask, (height, width) bool, as COCO's compressed RLE that JSON takes: ``size`` and ``counts`` (str)."""
    from pycocotools import mask as coco_mask
    encoded = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return dict(size=[int(side) for side in encoded['size']], counts=encoded['counts'].decode('ascii'))


def _label_map(sample: BaseDataElement, num_classes: int) -> np.ndarray:
    return sample.pred_sem_seg.data.squeeze(0).numpy().astype(np.uint8 if num_classes <= 256 else np.uint16)


# ---- files --------------------------------------------------------------------------------------------
def _write_image(image: np.ndarray, path: Path) -> None:
    """cv2.imwrite would only return False where writing fails; this raises OSError, and never leaves half a file."""
    _, data = cv2.imencode(path.suffix, image)
    unfinished = path.with_name(f'.{path.name}.unfinished')
    unfinished.write_bytes(data.tobytes())
    unfinished.replace(path)


@contextmanager
def _json_list(path: Path) -> Iterator[Callable[[Any], None]]:
    """Yields a function that appends to a JSON list. The file gets its name when the list ends, whatever ends it; if
    the process is killed, all that was appended is in the file beside it."""
    unfinished = path.with_name(f'{path.name}.unfinished')
    count = 0

    def append(item: Any) -> None:
        nonlocal count
        file.write((',\n' if count else '[\n') + json.dumps(item))
        file.flush()
        count += 1

    with unfinished.open('w', encoding='utf-8') as file:
        try:
            yield append
        finally:
            file.write('\n]\n' if count else '[]\n')
            file.close()
            unfinished.replace(path)
