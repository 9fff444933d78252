"""Images with their objects or label maps drawn on, by the visualisers of the toolboxes."""
import itertools
import warnings
from typing import Sequence

import cv2
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from mmengine.config import Config
from mmengine.registry import VISUALIZERS, DefaultScope
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from mmengine.visualization import Visualizer

LONG_SIDE = 1000  # pixels, about; a smaller image is drawn larger, or its labels would hide it
# Of masks, which have outlines, and of label maps, where only the colour tells the class.
OPACITY = {'mmdet': 0.5, 'mmseg': 0.7}
DPI = 100  # of the legend

_numbers = itertools.count()


def build_visualizer(cfg: Config, dataset_meta: dict) -> Visualizer:
    """Build a config's visualiser to draw with, without the places that it would save to.

    Args:
        cfg: A config of MMDetection or MMSegmentation.
        dataset_meta: ``classes`` (names) and ``palette`` (RGB) of what is to be drawn.
    """
    settings = {'alpha': OPACITY[cfg.default_scope], **cfg.visualizer}
    # A visualiser is global by its name: one of the same name would be handed out again.
    settings.update(vis_backends=None, name=f'overlay {next(_numbers)}')
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        visualizer = VISUALIZERS.build(settings)
    visualizer.dataset_meta = dataset_meta
    return visualizer


def draw_overlay(visualizer: Visualizer, image: np.ndarray, sample: BaseDataElement, annotations: bool) -> np.ndarray:
    """Draw what a data sample says on its image.

    Args:
        visualizer: From :func:`build_visualizer`.
        image: (height, width, 3), BGR, values 0 to 255.
        sample: A ``DetDataSample`` or ``SegDataSample`` whose objects or label maps are of the image's size.
        annotations: True draws the ground truth (``gt_...``), False all the predictions (``pred_...``).

    Returns:
        The picture, BGR uint8, enlarged by a whole number if the image is small; below a label map is a legend.
    """
    image = np.ascontiguousarray(image[..., ::-1].clip(0, 255).astype(np.uint8))
    factor = max(1, round(LONG_SIDE / max(image.shape[:2])))
    if factor > 1:
        image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
    prefix = 'gt' if annotations else 'pred'
    drawn = type(sample)()
    if f'{prefix}_instances' in sample:
        objects = _enlarge_objects(sample.get(f'{prefix}_instances'), factor)
        drawn.set_data({f'{prefix}_instances': objects})
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', r'Warning: The \w+ is out of bounds')  # at the image's edge, by rounding
            visualizer.add_datasample(
                '', image, drawn, draw_gt=annotations, draw_pred=not annotations, pred_score_thr=-1)
        return visualizer.get_image()[..., ::-1]
    label_map = torch.as_tensor(sample.get(f'{prefix}_sem_seg').data).cpu()
    label_map = label_map.repeat_interleave(factor, -2).repeat_interleave(factor, -1)
    drawn.set_data({f'{prefix}_sem_seg': PixelData(data=label_map)})
    # The visualiser's own labels are cut off at the image's edge.
    visualizer.add_datasample('', image, drawn, draw_gt=annotations, draw_pred=not annotations, with_labels=False)
    labels = [label for label in label_map.unique().tolist() if label < len(visualizer.dataset_meta['classes'])]
    names, colours = ([visualizer.dataset_meta[key][label] for label in labels] for key in ('classes', 'palette'))
    return np.vstack([visualizer.get_image(), _legend(names, colours, image.shape[1])])[..., ::-1]


def _enlarge_objects(objects: InstanceData, factor: int) -> InstanceData:
    boxes = getattr(objects.bboxes, 'tensor', objects.bboxes)  # a pipeline's boxes are wrapped
    enlarged = InstanceData(bboxes=boxes.cpu() * factor, labels=objects.labels.cpu())
    if 'scores' in objects:
        enlarged.scores = objects.scores.cpu()
    if 'masks' in objects:
        masks = objects.masks
        masks = masks.cpu().numpy() if isinstance(masks, torch.Tensor) else masks.to_ndarray()
        enlarged.masks = torch.from_numpy(masks.astype(bool).repeat(factor, axis=1).repeat(factor, axis=2))
    return enlarged


def _legend(names: Sequence[str], colours: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """A strip (any height, width, 3), RGB uint8, with as many classes side by side as the width takes."""
    figure = Figure(figsize=(width / DPI, 1), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    handles = [Patch(color=np.divide(colour, 255), label=name) for name, colour in zip(names, colours)]
    for num_columns in range(max(1, len(names)), 0, -1):
        legend = figure.legend(handles=handles, ncols=num_columns, loc='center', frameon=False)
        extent = legend.get_window_extent(canvas.get_renderer())
        if extent.width <= width or num_columns == 1:
            break
        legend.remove()
    figure.set_size_inches(width / DPI, np.ceil(extent.height) / DPI)
    canvas.draw()
    strip = np.asarray(canvas.buffer_rgba())[..., :3]
    return cv2.resize(strip, (width, strip.shape[0]))  # the canvas may be a pixel narrower
