"""What a detector says about images in batches, beside what it says about each alone."""
import copy
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

import mmengine
import torch
from mmdet.structures.bbox import bbox_overlaps
from mmengine.config import Config
from rich import box
from rich.table import Table

from mminline import runs
from mminline.preflight import RunError

SAME_OBJECT_IOU = 0.5


class Row(NamedTuple):
    """One way to evaluate, compared with batch size 1 of the same ``pad_aware``."""
    pad_aware: bool
    batch_size: int
    matched: int  # detections that have their like at batch size 1
    unmatched: int  # detections of either that have none
    box_difference: float  # largest of the matched, in pixels of the original image
    score_difference: float  # largest of the matched
    box_map: float
    mask_map: float  # nan for a detector without masks


def measure(cfg: Config, checkpoint: str, batch_sizes: Sequence[int], score_thr: float) -> List[Row]:
    """Evaluate a detector with several batch sizes, pad-aware and not.

    Args:
        cfg: A detection config, from :func:`mminline.runs.read_config`.
        checkpoint: The weights.
        batch_sizes: Batch sizes beside 1.
        score_thr: Detections of a lower score are not compared: whether suppression keeps them hangs on a hair.

    Raises:
        RunError: if the run cannot start, or the config is for no detector with a backbone of ours.
    """
    if cfg.default_scope != 'mmdet' or not cfg.model.backbone.type.startswith('mminline.'):
        raise RunError('batch invariance is measured on detection configs with a backbone of this project, got '
                       f'{cfg.default_scope} with {cfg.model.backbone.type}')
    rows = []
    for pad_aware in (True, False):
        alone = None
        for batch_size in (1, *batch_sizes):
            predictions, metrics = _evaluate(cfg, checkpoint, batch_size, pad_aware)
            alone = alone or predictions
            rows.append(Row(
                pad_aware, batch_size, *compare(alone, predictions, score_thr), metrics['coco/bbox_mAP'],
                metrics.get('coco/segm_mAP', float('nan'))))
    return rows


def _evaluate(cfg: Config, checkpoint: str, batch_size: int, pad_aware: bool) -> Tuple[Dict[int, dict], dict]:
    """Return the detections of each image, by its number, and the metrics."""
    cfg = copy.deepcopy(cfg)
    cfg.test_dataloader.batch_size = batch_size
    cfg.model.backbone.pad_aware = pad_aware
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / 'detections.pkl'
        metrics = runs.test(cfg, checkpoint, out=str(file))
        return {image['img_id']: image['pred_instances'] for image in mmengine.load(file)}, metrics


def compare(alone: Dict[int, dict], batched: Dict[int, dict], score_thr: float) -> Tuple[int, int, float, float]:
    """Return matched, unmatched, box_difference and score_difference of :class:`Row`.

    Detections match if they are of one image and class and are each other's nearest, with an IoU of at least 0.5.

    Args:
        alone, batched: Of each image, by its number, ``bboxes`` (N, 4) in pixels, ``scores`` and ``labels`` (N,).
        score_thr: Detections below it are matched, but do not count.
    """
    matched = unmatched = 0
    box_difference = score_difference = 0.0
    for number, first in alone.items():
        second = batched[number]
        iou = bbox_overlaps(first['bboxes'], second['bboxes'])
        iou = iou * (first['labels'][:, None] == second['labels'])
        counts = [(detections['scores'] >= score_thr).sum().item() for detections in (first, second)]
        if iou.numel():
            best, partner = iou.max(dim=1)
            is_match = (best >= SAME_OBJECT_IOU) & (iou.argmax(dim=0)[partner] == torch.arange(len(iou)))
        else:
            is_match = torch.zeros(len(iou), dtype=torch.bool)
        for index in is_match.nonzero().flatten().tolist():
            own, other = first['scores'][index], second['scores'][partner[index]]
            if max(own, other) < score_thr:
                continue
            matched += 1
            counts[0] -= int(own >= score_thr)
            counts[1] -= int(other >= score_thr)
            score_difference = max(score_difference, float((own - other).abs()))
            box_difference = max(
                box_difference, float((first['bboxes'][index] - second['bboxes'][partner[index]]).abs().max()))
        unmatched += sum(counts)
    return matched, unmatched, box_difference, score_difference


def result_table(rows: Sequence[Row], score_thr: float) -> Table:
    """A table of all rows, for rich to print."""
    table = Table(title=f'Detections of score {score_thr} and more, compared with those at batch size 1',
                  title_justify='left', box=box.SIMPLE)
    for column in ('pad-aware', 'batch', 'matched', 'unmatched', 'largest box\ndifference, pixels',
                   'largest score\ndifference', 'box mAP', 'mask mAP'):
        table.add_column(column, justify='right')
    for row in rows:
        table.add_row('yes' if row.pad_aware else 'no', str(row.batch_size), str(row.matched), str(row.unmatched),
                      f'{row.box_difference:.3g}', f'{row.score_difference:.2g}', f'{row.box_map:.4f}',
                      f'{row.mask_map:.4f}')
    return table
