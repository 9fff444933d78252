"""A data set without downloads: overlapping circles, squares and triangles on textured backgrounds.

Only the outline tells the class: colour, area, place and tilt are drawn alike for all three. The same
pictures are written twice, as a COCO detection set and in the layout of ADE20K::

    OUT/shapes.json                                  version, number of images and seed
    OUT/coco/{train,val}/000001.jpg
    OUT/coco/annotations/{train,val}.json            boxes and polygons of what is visible
    OUT/ade/images/{training,validation}/000001.jpg
    OUT/ade/annotations/{training,validation}/000001.png

A label map holds 1 for the background and 2, 3, 4 for the shapes. As in ADE20K, 0 means "not labelled" (no
pixel here has it), so a data set is read with ``reduce_zero_label=True`` and has the classes
:data:`SEG_CLASSES`, background first.
"""
import json
import math
import tempfile
from pathlib import Path
from typing import NamedTuple, Union

import cv2
import numpy as np
from rich.progress import track

CLASSES = ('circle', 'square', 'triangle')
# Real data sets rarely count their categories from 1 without gaps (COCO itself does not).
CATEGORY_IDS = (3, 7, 12)
SEG_CLASSES = ('background', *CLASSES)
SEG_PALETTE = ((60, 60, 60), (220, 80, 70), (70, 170, 90), (80, 120, 220))  # RGB

# To be raised whenever the pictures or files of one seed change.
VERSION = 2
RECORD = 'shapes.json'
SPLITS = (('train', 'training'), ('val', 'validation'))  # as COCO and as ADE20K call them

SIZES = ((128, 160), (160, 128), (128, 128), (112, 176), (144, 144))  # height, width in pixels
MIN_OBJECTS, MAX_OBJECTS = 4, 8
EMPTY_EVERY = 20  # one image in so many has no objects
RADII = (13, 26)  # pixels; of the circle that has the object's area
MIN_VISIBLE = 0.7  # of the object's whole area; what would show less of itself is not drawn
MAX_TILT = math.pi / 9  # a network that starts from nothing learns every rotation in hours, not minutes
MIN_CONTRAST = 80  # distance in RGB (0 ... 441) between an object and what it borders on
COLOURS = (15, 240)
NUM_TRIES = 50  # per object


class Instance(NamedTuple):
    """One object of a scene."""

    label: int  # index into CLASSES
    mask: np.ndarray  # (height, width) bool, the visible part


# ---- one scene ----------------------------------------------------------------------------------------
def draw_scene(rng: np.random.Generator, height: int, width: int,
               num_objects: int) -> tuple[np.ndarray, list[Instance]]:
    """Draws a background and objects on it, from back to front.

    Args:
        rng: Source of everything random.
        height: Rows of the image, in pixels.
        width: Columns of the image, in pixels.
        num_objects: How many objects to draw; there are fewer if no room is left for one.

    Returns:
        The image, (height, width, 3) uint8 in OpenCV's BGR order, and its objects from back to front. Their
        masks do not overlap, each shows at least ``MIN_VISIBLE`` of its object, and none has a hole.
    """
    canvas = _draw_background(rng, height, width)
    labels, areas, masks = [], [], []
    for label in rng.integers(len(CLASSES), size=num_objects):
        for _ in range(NUM_TRIES):
            radius = rng.uniform(*RADII)
            centre = rng.uniform(0.75 * radius, (width - 0.75 * radius, height - 0.75 * radius))
            distance = _signed_distance(label, radius, centre, rng.uniform(-MAX_TILT, MAX_TILT), height, width)
            colour = rng.uniform(*COLOURS, size=3)
            mask = distance < 0
            new_areas = [*areas, math.pi * radius**2]
            new_masks = [*(other & ~mask for other in masks), mask]
            if _stands_out(canvas, distance, colour) and all(map(_is_visible, new_masks, new_areas)):
                labels, areas, masks = [*labels, int(label)], new_areas, new_masks
                # The mask ends where half a pixel is covered: both come from the same distances.
                cover = np.clip(0.5 - distance, 0, 1)[..., None]
                canvas += cover * (colour - canvas)
                break
    # Light only falls off, so that nothing bright is clipped and loses its contrast.
    canvas *= 1 - rng.uniform(0, 0.3) * _ramp(rng, height, width)[..., None]
    canvas += rng.normal(0, rng.uniform(1, 5), canvas.shape)
    image = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
    return image, [Instance(*pair) for pair in zip(labels, masks)]


def _draw_background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """(height, width, 3) float: two similar colours mixed by smooth noise, stripes or checks."""
    kind = rng.choice(('noise', 'stripes', 'checks'))
    if kind == 'noise':
        coarse = rng.random((rng.integers(3, 13), rng.integers(3, 13)))
        pattern = np.clip(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), 0, 1)
    else:
        angle = rng.uniform(0, math.pi)
        period = rng.uniform(6, 24)  # pixels
        waves = [_wave(height, width, angle + turn, period) for turn in (0, math.pi / 2)]
        pattern = 0.5 + 0.5 * (waves[0] if kind == 'stripes' else waves[0] * waves[1])
    first = rng.uniform(*COLOURS, size=3)
    second = np.clip(first + rng.uniform(-60, 60, size=3), *COLOURS)
    return first + pattern[..., None] * (second - first)


def _wave(height: int, width: int, angle: float, period: float) -> np.ndarray:
    """(height, width) sine wave, from -1 to 1."""
    y, x = np.mgrid[:height, :width]
    return np.sin((x * math.cos(angle) + y * math.sin(angle)) * (2 * math.pi / period))


def _ramp(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """(height, width) plane rising from 0 to 1 in a random direction."""
    angle = rng.uniform(0, 2 * math.pi)
    y, x = np.mgrid[:height, :width]
    plane = x * math.cos(angle) + y * math.sin(angle)
    return (plane - plane.min()) / np.ptp(plane)


def _signed_distance(label: int, radius: float, centre: np.ndarray, tilt: float, height: int,
                     width: int) -> np.ndarray:
    """(height, width) distances in pixels from the outline of an object of area pi radius^2, negative
    inside. At a polygon's corners, outside, they are those from the nearest side's line."""
    y, x = np.mgrid[:height, :width]
    x, y = x - centre[0], y - centre[1]
    if CLASSES[label] == 'circle':
        return np.hypot(x, y) - radius
    num_sides = {'square': 4, 'triangle': 3}[CLASSES[label]]
    apothem = radius * math.sqrt(math.pi / (num_sides * math.tan(math.pi / num_sides)))
    # Upright: the first side is the lower one.
    normals = math.pi / 2 + tilt + np.arange(num_sides) * (2 * math.pi / num_sides)
    return np.max([x * math.cos(normal) + y * math.sin(normal) for normal in normals], axis=0) - apothem


def _stands_out(canvas: np.ndarray, distance: np.ndarray, colour: np.ndarray) -> bool:
    """Whether the colour differs from (nearly) everything within 4 pixels of the outline."""
    border = canvas[(distance > 0) & (distance < 4)]
    return np.quantile(np.linalg.norm(border - colour, axis=-1), 0.05) >= MIN_CONTRAST


def _is_visible(mask: np.ndarray, area: float) -> bool:
    """Whether enough is left of an object of that area, and without a hole (polygons have none)."""
    if mask.sum() < MIN_VISIBLE * area:
        return False
    _, hierarchy = cv2.findContours(mask.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    has_parent = hierarchy[0, :, 3] >= 0
    return not has_parent.any()


# ---- annotations --------------------------------------------------------------------------------------
def _polygons(mask: np.ndarray) -> list[list[int]]:
    """Outlines [x0, y0, x1, y1, ...] along the pixels' edges, one per piece: drawn as COCO draws
    polygons, they give back exactly the mask."""
    # OpenCV's contours run through pixel centres. Where every pixel is made two by two, rows and columns
    # 2i and 2i + 1 are the two sides of pixel i, and their edges are at i and i + 1.
    doubled = mask.astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, _ = cv2.findContours(doubled, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    polygons = []
    for contour in contours:
        corners = (contour[:, 0] + 1) // 2
        repeated = (corners == np.roll(corners, 1, axis=0)).all(axis=1)
        polygons.append(corners[~repeated].ravel().tolist())
    return polygons


def _coco_annotation(instance: Instance) -> dict:
    rows, columns = (np.flatnonzero(instance.mask.any(axis=axis)) for axis in (1, 0))
    (top, bottom), (left, right) = rows[[0, -1]].tolist(), columns[[0, -1]].tolist()
    return dict(
        category_id=CATEGORY_IDS[instance.label],
        segmentation=_polygons(instance.mask),
        bbox=[left, top, right - left + 1, bottom - top + 1],
        area=int(instance.mask.sum()),
        iscrowd=0)


def _label_map(instances: list[Instance], height: int, width: int) -> np.ndarray:
    """(height, width) uint8: 1 for the background, 2 and up for the classes."""
    label_map = np.ones((height, width), np.uint8)
    for instance in instances:
        label_map[instance.mask] = 2 + instance.label
    return label_map


# ---- the data set -------------------------------------------------------------------------------------
def make_shapes(out_dir: Union[str, Path], num_images: int = 400, seed: int = 0,
                overwrite: bool = False) -> bool:
    """Writes the data set; the module's text shows the tree.

    An image depends on the seed, its split and its index only, so a larger set begins with the images of a
    smaller one. The tree appears at ``out_dir`` when it is complete, never before.

    Args:
        out_dir: Folder to create; parents are created too.
        num_images: Training images; a fifth as many (rounded down, at least one) are added for validation.
        seed: Not negative.
        overwrite: Replace a shapes data set that was made with another number of images, seed or version.

    Returns:
        Whether it was written; ``False`` if ``out_dir`` holds this very data set already.

    Raises:
        ValueError: If ``num_images`` or ``seed`` is no whole number or too small.
        FileExistsError: If ``out_dir`` holds something else: another shapes data set without ``overwrite``,
            or, in any case, anything that is no shapes data set.
        OSError: If writing fails.
    """
    for name, value, minimum in (('num_images', num_images, 1), ('seed', seed, 0)):
        if not isinstance(value, int) or value < minimum:
            raise ValueError(f'{name} must be a whole number of at least {minimum}, got {value!r}')
    out_dir = Path(out_dir).resolve()  # a link stays, and what it points to is replaced
    record = dict(version=VERSION, num_images=num_images, seed=seed)
    found = _find_record(out_dir)
    if found == record:
        return False
    if found and not overwrite:
        raise FileExistsError(f'{out_dir} holds a shapes data set with {found}, not {record}; '
                              'choose another folder or pass --overwrite (overwrite=True)')

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f'.{out_dir.name}-', dir=out_dir.parent) as scratch:
        new = Path(scratch, 'new')
        for split, num_split_images in enumerate((num_images, max(1, num_images // 5))):
            _write_split(new, split, num_split_images, seed)
        _write_json(new / RECORD, record)
        if found:
            out_dir.rename(Path(scratch, 'old'))
        new.rename(out_dir)
    return True


def _find_record(out_dir: Path) -> dict:
    """What make_shapes recorded in a folder; empty if the folder does not exist or is empty."""
    if not out_dir.exists() or out_dir.is_dir() and not any(out_dir.iterdir()):
        return {}
    try:
        record = json.loads((out_dir / RECORD).read_text())
        return {key: record[key] for key in ('version', 'num_images', 'seed')}
    except (OSError, ValueError, TypeError, KeyError):
        raise FileExistsError(f'{out_dir} exists and is no shapes data set; it is left as it is') from None


def _write_split(root: Path, split: int, num_images: int, seed: int) -> None:
    coco_name, ade_name = SPLITS[split]
    coco_images, coco_annotations = root / 'coco' / coco_name, root / 'coco/annotations'
    ade_images, ade_annotations = root / 'ade/images' / ade_name, root / 'ade/annotations' / ade_name
    for folder in (coco_images, coco_annotations, ade_images, ade_annotations):
        folder.mkdir(parents=True, exist_ok=True)

    images, annotations = [], []
    for index in track(range(num_images), description=f'{coco_name} images'):
        rng = np.random.default_rng((seed, split, index))
        height, width = SIZES[rng.integers(len(SIZES))]
        is_empty = index % EMPTY_EVERY == EMPTY_EVERY // 2
        num_objects = 0 if is_empty else rng.integers(MIN_OBJECTS, MAX_OBJECTS + 1)
        image, instances = draw_scene(rng, height, width, num_objects)

        image_id = index + 1
        jpg, png = f'{image_id:06d}.jpg', f'{image_id:06d}.png'
        _write_image(image, coco_images / jpg, ade_images / jpg)
        _write_image(_label_map(instances, height, width), ade_annotations / png)
        images.append(dict(id=image_id, file_name=jpg, height=height, width=width))
        for instance in instances:
            # An id of 0 would count as "no match" in COCO's evaluation.
            annotations.append(
                dict(id=len(annotations) + 1, image_id=image_id, **_coco_annotation(instance)))

    categories = [
        dict(id=category_id, name=name, supercategory='shape')
        for category_id, name in zip(CATEGORY_IDS, CLASSES)
    ]
    info = dict(description='mminline shapes', version=str(VERSION))
    _write_json(coco_annotations / f'{coco_name}.json',
                dict(info=info, images=images, annotations=annotations, categories=categories))


def _write_image(image: np.ndarray, *paths: Path) -> None:
    # cv2.imwrite would only return False where writing fails; Path.write_bytes raises OSError.
    _, data = cv2.imencode(paths[0].suffix, image)
    for path in paths:
        path.write_bytes(data.tobytes())


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content) + '\n')
