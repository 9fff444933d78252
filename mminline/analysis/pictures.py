"""Pictures of what a trained model predicts, beside the ground truth."""
import math
from pathlib import Path
from typing import NamedTuple, Optional, Union

import cv2
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, init_default_scope
from mmengine.visualization import Visualizer
from rich.progress import track

from mminline.build import load_model

MIN_SCORE = 0.5  # of the predictions that are drawn
ENLARGE = 4  # small images are drawn larger, or labels would hide them
FONT_SIZE = 14  # points, of the labels on an enlarged image
TEXT_PAD = 2  # points, between a label and its frame
PAIRS_PER_ROW = 2


class Objects(NamedTuple):
    """The n objects of one image, in its pixels."""

    boxes: np.ndarray  # (n, 4): left, top, right, bottom
    masks: np.ndarray  # (n, height, width) bool
    labels: np.ndarray  # (n,) class indices
    scores: Optional[np.ndarray] = None  # (n,) from 0 to 1; None for the ground truth


class Pair(NamedTuple):
    """Two drawn images (height, width, 3), RGB uint8, of one test image."""

    name: str
    truth: np.ndarray
    prediction: np.ndarray


# ---- a model's predictions ----------------------------------------------------------------------------
def draw_predictions(cfg: Config, checkpoint: Union[str, Path], out_file: Union[str, Path],
                     num_images: int = 6) -> None:
    """Draws ground truth and predictions for images spread evenly over a config's test set.

    Args:
        cfg: A config of MMDetection or MMSegmentation whose test pipeline loads the annotations.
        checkpoint: The weights.
        out_file: The picture to write.
        num_images: How many images; all, if there are fewer.

    Raises:
        ValueError: If the config is for another toolbox.
        RunError: If the checkpoint cannot be read or does not fit the model.
    """
    if cfg.default_scope not in DRAWN_BY:
        raise ValueError(f"can draw for {', '.join(DRAWN_BY)}, got default_scope={cfg.default_scope!r}")
    draw_sample, explanation = DRAWN_BY[cfg.default_scope]
    init_default_scope(cfg.default_scope)
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    model = load_model(cfg, checkpoint, device='cpu')

    indices = np.unique(np.linspace(0, len(dataset) - 1, num_images).round().astype(int))
    pairs = []
    for index in track(indices.tolist(), description='drawing'):
        with torch.no_grad():
            sample, = model.test_step(pseudo_collate([dataset[index]]))
        image = cv2.cvtColor(cv2.imread(sample.img_path), cv2.COLOR_BGR2RGB)
        pairs.append(Pair(Path(sample.img_path).name, *draw_sample(image, sample, dataset.metainfo)))
    title = f'{len(pairs)} of {len(dataset)} held-out images'
    draw_grid(pairs, dataset.metainfo, title, explanation, out_file)


def draw_detections(image: np.ndarray, sample, metainfo: dict) -> tuple[np.ndarray, np.ndarray]:
    """Draws the ground truth and the predictions of a tested ``DetDataSample``, both in the image's pixels."""
    truth = sample.gt_instances
    predicted = sample.pred_instances.numpy()
    predicted = predicted[predicted.scores >= MIN_SCORE]
    return (
        draw_objects(image, Objects(truth.bboxes.numpy(), truth.masks.to_ndarray().astype(bool), truth.labels.numpy()),
                     metainfo),
        draw_objects(image, Objects(predicted.bboxes, predicted.masks, predicted.labels, predicted.scores), metainfo))


def draw_segmentation(image: np.ndarray, sample, metainfo: dict) -> tuple[np.ndarray, np.ndarray]:
    """Draws the ground truth and the prediction of a tested ``SegDataSample``, both of the image's size."""
    truth, predicted = (label_map.data.squeeze(0).numpy() for label_map in (sample.gt_sem_seg, sample.pred_sem_seg))
    return draw_label_map(image, truth, metainfo), draw_label_map(image, predicted, metainfo)


# What draws (image, sample, metainfo) into two images, and what the reader is told, by the toolbox of the sample.
DRAWN_BY = {
    'mmdet': (draw_detections,
              f'outline and fill: mask;  dashed: box;  number: score (predictions from {MIN_SCORE} are drawn)'),
    'mmseg': (draw_segmentation, 'outline and fill: class of the pixels'),
}


# ---- one image ----------------------------------------------------------------------------------------
def draw_objects(image: np.ndarray, objects: Objects, metainfo: dict) -> np.ndarray:
    """Draws masks, dashed boxes and labels in the colours of the classes.

    Args:
        image: (height, width, 3), RGB uint8.
        objects: What to draw.
        metainfo: The data set's ``classes`` (names) and ``palette`` (RGB).

    Returns:
        The drawn image, ``ENLARGE`` times as high and wide, RGB uint8.
    """
    image = _enlarge(image)
    if not len(objects.labels):
        return image
    height, width = image.shape[:2]
    colours = [tuple(metainfo['palette'][label]) for label in objects.labels]
    masks = objects.masks.repeat(ENLARGE, axis=1).repeat(ENLARGE, axis=2)
    visualizer = Visualizer(image=image)
    _draw_masks(visualizer, masks, colours, fill=0.4)
    # Lines along the image's edge would be cut in half.
    boxes = np.clip(objects.boxes * ENLARGE, 2, (width - 2, height - 2) * 2)
    visualizer.draw_bboxes(boxes, edge_colors=colours, line_styles='--', line_widths=2, alpha=1)

    texts = [metainfo['classes'][label] for label in objects.labels]
    if objects.scores is not None:
        texts = [f'{text}\n{score:.2f}' for text, score in zip(texts, objects.scores)]
    points = visualizer.dpi / 72  # pixels
    size = np.ceil(_text_size(texts) * points).astype(int)
    for text, centre, colour in zip(texts, place_labels(masks, size), colours):
        visualizer.draw_texts(
            text, centre, FONT_SIZE, 'black', 'center', 'center',
            bboxes=dict(facecolor='white', edgecolor=np.divide(colour, 255), alpha=0.85, pad=TEXT_PAD))
    return visualizer.get_image()


def draw_label_map(image: np.ndarray, label_map: np.ndarray, metainfo: dict) -> np.ndarray:
    """Draws the regions of a label map in the colours of the classes.

    Args:
        image: (height, width, 3), RGB uint8.
        label_map: (height, width), class indices. Pixels with another value (such as 255, not labelled) are left
            as they are.
        metainfo: The data set's ``palette`` (RGB).

    Returns:
        The drawn image, ``ENLARGE`` times as high and wide, RGB uint8.
    """
    image = _enlarge(image)
    labels = np.unique(label_map[label_map < len(metainfo['palette'])])
    if not len(labels):
        return image
    masks = label_map.repeat(ENLARGE, axis=0).repeat(ENLARGE, axis=1) == labels[:, None, None]
    visualizer = Visualizer(image=image)
    colours = [tuple(metainfo['palette'][label]) for label in labels]
    _draw_masks(visualizer, masks, colours, fill=0.6)  # strong, as only the colour tells the class
    return visualizer.get_image()


def _enlarge(image: np.ndarray) -> np.ndarray:
    return cv2.resize(image, None, fx=ENLARGE, fy=ENLARGE, interpolation=cv2.INTER_CUBIC)


def _draw_masks(visualizer: Visualizer, masks: np.ndarray, colours: list[tuple], fill: float) -> None:
    """Fills (with this opacity, 0 to 1) and outlines at least one mask, (n, height, width) bool, in RGB colours."""
    visualizer.draw_binary_masks(masks, colours, alphas=fill)
    visualizer.draw_binary_masks(np.stack([_outline(mask) for mask in masks]), colours, alphas=1.0)


def _outline(mask: np.ndarray) -> np.ndarray:
    """The outermost pixels of a mask, 3 wide."""
    return mask & ~cv2.erode(mask.astype(np.uint8), np.ones((7, 7))).astype(bool)


def _text_size(texts: list[str]) -> np.ndarray:
    """Width and height in points that hold each of the texts and its frame."""
    lines = [text.split('\n') for text in texts]
    width = max(TextPath((0, 0), line, size=FONT_SIZE).get_extents().width for text in lines for line in text)
    height = max(len(text) for text in lines) * 1.2 * FONT_SIZE
    return np.array([width, height]) + 2 * TEXT_PAD + 2


def place_labels(masks: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Places one label for each object: near its middle, inside the image, and beside the labels before it.

    Args:
        masks: (n, height, width) bool.
        size: Width and height of every label, in pixels.

    Returns:
        The labels' centres (x, y) in pixels, (n, 2). Where no place is left, labels overlap.
    """
    height, width = masks.shape[1:]
    label_width, label_height = size
    y, x = np.mgrid[:height, :width]
    is_free = (abs(x - width / 2) <= (width - label_width) / 2) & (abs(y - height / 2) <= (height - label_height) / 2)
    centres = []
    for mask in masks:
        depth = cv2.distanceTransform(np.pad(mask, 1).astype(np.uint8), cv2.DIST_L2, 5)[1:-1, 1:-1]
        middle_y, middle_x = np.unravel_index(depth.argmax(), depth.shape)
        distance = np.hypot(x - middle_x, y - middle_y)
        distance[~is_free] += height + width
        centre_y, centre_x = np.unravel_index(distance.argmin(), distance.shape)
        centres.append((centre_x, centre_y))
        is_free &= (abs(x - centre_x) >= label_width) | (abs(y - centre_y) >= label_height)
    return np.array(centres)


# ---- all images ---------------------------------------------------------------------------------------
def draw_grid(pairs: list[Pair], metainfo: dict, title: str, explanation: str, out_file: Union[str, Path]) -> None:
    """Writes a picture of pairs, ground truth to the left of the prediction.

    Args:
        pairs: What to show, at least one.
        metainfo: The data set's ``classes`` (names) and ``palette`` (RGB), for the legend.
        title: Text above the picture.
        explanation: Text above the legend.
        out_file: The picture to write.
    """
    num_rows = math.ceil(len(pairs) / PAIRS_PER_ROW)
    figure = Figure(figsize=(8 * PAIRS_PER_ROW, 3.6 * num_rows + 1.2), layout='constrained')
    figure.suptitle(title, fontsize='x-large')
    cells = figure.subfigures(num_rows, PAIRS_PER_ROW, squeeze=False, wspace=0.03).flat
    for cell, pair in zip(cells, pairs):
        cell.suptitle(pair.name)
        truth, prediction = cell.subplots(1, 2)
        truth.imshow(pair.truth)
        truth.set(title='ground truth', anchor='E')
        prediction.imshow(pair.prediction)
        prediction.set(title='prediction', anchor='W')
        truth.axis('off')
        prediction.axis('off')
    classes = [Patch(color=np.divide(colour, 255), label=name)
               for name, colour in zip(metainfo['classes'], metainfo['palette'])]
    figure.legend(handles=classes, loc='outside lower center', ncols=len(classes),
                  title=explanation, fontsize='large', title_fontsize='large')
    figure.savefig(out_file, dpi=150)
