"""What a config's model costs as images grow, with inline, softmax and linear attention.

Three models of one config are measured: the config as it is, and the same with another attention in the blocks that
are inline. Weights are random. Three parts of the work:

- backbone: its forward on one image, without gradients;
- inference: one image through the whole model, from the preprocessor to boxes and masks in the image or its label map.
  Segmentors see the whole image at once. Random weights would find nothing, so two-stage detectors are made to take
  every proposal for an object, and as many as the config allows (most often 100 per image) get masks. One-stage
  detectors find nothing, which saves them the suppression of a few boxes;
- training step: forward, backward and optimiser on a batch of images with ten objects each, or labelled pixels.
"""
import copy
import inspect
import itertools
import logging
import math
import statistics
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.structures import InstanceData, PixelData
from rich import box
from rich.progress import Progress
from rich.table import Table
from torch import nn

from mminline.build import build_model
from mminline.models import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin
from mminline.models.backbones.base import resolve_arch
from mminline.models.backbones.cswin import EARLY_SPLIT_SIZES
from mminline.models.backbones.pvt import SR_RATIOS
from mminline.preflight import RunError
from mminline.runs import drop_pretrained

from .measure import (
    available_bytes,
    crossover,
    device_name,
    growth_exponent,
    median_ratio,
    peak_bytes,
    set_log_axes,
    time_interleaved,
    write_csv,
)

KINDS = ('inline', 'softmax', 'linear')
PARTS = ('backbone', 'inference', 'training step')
FAMILIES = {f'mminline.{family.__name__}': family for family in (InLinePVT, InLineSwin, InLineCSwin, InLineDeiT)}
EDGE_DIVISOR = 32  # no model pads such images
MIN_FITTED_EDGE = 512  # pixels; below, fixed costs count
MIN_ROUNDS = 3
USED_MEMORY = 0.9  # of what is available
NUM_OBJECTS = 10
CERTAIN = 10.  # a logit far above those of random weights


class Row(NamedTuple):
    """What was measured of one part of one model on square images of one size."""
    device: str
    config: str
    attention: str
    attn_types: str
    part: str
    edge: int  # pixels
    images: int
    seconds: float  # median
    ratio_to_inline: float  # median of the rounds; NaN if inline was left out
    peak_bytes: int


# ---- the models ---------------------------------------------------------------------------------------
def configured_attn_types(backbone: dict) -> Sequence:
    """Return the ``attn_types`` of a backbone's config, also where they are the default of its class or ``arch``."""
    family = FAMILIES.get(backbone['type'])
    if family is None:
        raise RunError(f"the report is for the backbones {', '.join(FAMILIES)}, got {backbone['type']}")
    default = inspect.signature(family).parameters['attn_types'].default
    attn_types = backbone.get('attn_types') or default
    return attn_types or resolve_arch(backbone.get('arch', 'tiny'), inspect.getmodule(family).ARCHS)['attn_types']


def replace_inline(attn_types: Sequence, kind: str) -> Tuple:
    """Return ``attn_types``, per stage or per block, with another kind in the place of 'inline'."""
    return tuple((kind if types == 'inline' else types) if isinstance(types, str) else replace_inline(types, kind)
                 for types in attn_types)


def make_variants(cfg: Config, kinds: Sequence[str]) -> Dict[str, Config]:
    """Return a config for each attention, without pretrained weights.

    Raises:
        RunError: If the backbone is none of this project's, or has no inline attention.
    """
    attn_types = configured_attn_types(cfg.model.backbone)
    if replace_inline(attn_types, 'softmax') == replace_inline(attn_types, 'inline'):
        raise RunError(f'the config has no inline attention that another could take the place of: {attn_types}')
    variants = {}
    for kind in kinds:
        variant = copy.deepcopy(cfg)
        drop_pretrained(variant.model)
        variant.model.backbone.attn_types = replace_inline(attn_types, kind)
        if cfg.default_scope == 'mmseg':
            variant.model.test_cfg = dict(mode='whole')
        variant.optim_wrapper.optimizer.lr = 0.  # all steps are alike
        variants[kind] = variant
    return variants


def take_every_proposal(model: nn.Module) -> None:
    """Bias the box heads of a two-stage detector so that each proposal is an object of the first class."""
    for module in model.modules():
        classifier = getattr(module, 'fc_cls', None)
        if isinstance(classifier, nn.Linear):
            nn.init.constant_(classifier.bias[:1], CERTAIN)


def describe(kind: str, backbone: nn.Module, attn_types: Sequence) -> str:
    """Say what a kind of attention is in a backbone: softmax is rarely that of every token to every token."""
    softmax = {
        InLinePVT: f'keys and values reduced {", ".join(map(str, SR_RATIOS))} times per side in stages 1 to 4',
        InLineSwin: f'in windows of {getattr(backbone, "window_size", None)} tokens',
        InLineCSwin: f'in stripes of {", ".join(map(str, getattr(backbone, "split_sizes", EARLY_SPLIT_SIZES)[:3]))} '
                     'tokens, stage 4 on the whole map',
        InLineDeiT: 'every token to every token',
    }[type(backbone)]
    flat = [kind for types in attn_types for kind in ([types] if isinstance(types, str) else types)]
    notes = [softmax] if kind == 'softmax' else []
    if kind != 'softmax' and 'softmax' in flat:
        notes.append('the last stages stay softmax, ' + softmax)
    return f'{kind}: {"; ".join(notes)}' if notes else kind


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Keeps mmengine from logging a line for each parameter."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class Subject:
    """A model with random weights, and the work that is measured."""

    def __init__(self, cfg: Config, device: torch.device):
        torch.manual_seed(0)
        self.cfg = cfg
        self.device = device
        self.model = revert_sync_batchnorm(build_model(cfg)).to(device)
        take_every_proposal(self.model)
        with DefaultScope.overwrite_default_scope(cfg.default_scope), _warnings_only():
            self.optim_wrapper: OptimWrapper = build_optim_wrapper(self.model, cfg.optim_wrapper)

    def work(self, part: str, edge: int, images: int) -> Callable[[], object]:
        """Return a function that does a part of the work on square images."""
        self.model.train(part == 'training step')
        if part == 'backbone':
            image = torch.randn(images, 3, edge, edge, generator=torch.Generator().manual_seed(0)).to(self.device)
            return torch.no_grad()(lambda: self.model.backbone(image))
        batch = make_batch(self.cfg.default_scope, edge, images)
        if part == 'inference':
            return lambda: self.model.test_step(batch)
        if hasattr(self.model.data_preprocessor, 'size'):  # MMSegmentation pads what it trains on
            self.model.data_preprocessor.size = (edge, edge)
        return lambda: self.model.train_step(batch, self.optim_wrapper)


def make_batch(scope: str, edge: int, images: int) -> dict:
    """Return noise as the toolbox's pipeline would pack square images with their annotations.

    Args:
        scope: 'mmdet' or 'mmseg'.
        edge: Height and width in pixels.
        images: How many.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, edge, edge), dtype=torch.uint8, generator=generator)
    meta = dict(img_id=0, img_path='', ori_shape=(edge, edge), img_shape=(edge, edge), scale_factor=(1., 1.),
                flip=False, flip_direction=None)
    return dict(inputs=list(pixels), data_samples=[
        _detection_sample(edge, meta, generator) if scope == 'mmdet' else _segmentation_sample(edge, meta)
        for _ in range(images)])


def _detection_sample(edge: int, meta: dict, generator: torch.Generator):
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    corners = torch.rand(NUM_OBJECTS, 2, generator=generator) * edge * 3 / 4
    boxes = torch.cat([corners, corners + edge / 8 + edge / 8 * torch.rand(NUM_OBJECTS, 2, generator=generator)], 1)
    masks = torch.zeros(NUM_OBJECTS, edge, edge, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist()):
        mask[top:bottom, left:right] = 1
    sample = DetDataSample(metainfo=meta)
    sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.zeros(NUM_OBJECTS, dtype=torch.long),
                                       masks=BitmapMasks(masks.numpy(), edge, edge))
    sample.ignored_instances = InstanceData(bboxes=boxes[:0])
    return sample


def _segmentation_sample(edge: int, meta: dict):
    from mmseg.structures import SegDataSample

    return SegDataSample(metainfo=meta, gt_sem_seg=PixelData(data=torch.zeros(1, edge, edge, dtype=torch.long)))


# ---- measuring ----------------------------------------------------------------------------------------
class Limits(NamedTuple):
    """What must not be used up."""
    memory: int  # bytes
    call_seconds: float


def estimate(earlier: Sequence[Row], field: str, edge: int) -> float:
    """Return an estimate of a field for a larger image, from rows of smaller ones in their order.

    It grows as between the last two, but at least with the pixels; after a single one with the pixels, but the seconds
    under softmax with their square.
    """
    points = [(row.edge ** 2, getattr(row, field)) for row in earlier[-2:]]
    if len(points) == 2:
        exponent = max(1., growth_exponent(points))
    else:
        exponent = 2. if (field, earlier[-1].attention) == ('seconds', 'softmax') else 1.
    pixels, value = points[-1]
    return value * (edge ** 2 / pixels) ** exponent


def reason_to_leave_out(earlier: Sequence[Row], edge: int, limits: Limits) -> Optional[str]:
    """Say why something should not be tried on a larger image, or None. (Nothing is known of the first size.)"""
    if not earlier:
        return None
    needed, seconds = estimate(earlier, 'peak_bytes', edge), estimate(earlier, 'seconds', edge)
    if needed > limits.memory:
        return f'it would need about {needed / 2 ** 30:.1f} GiB of memory, {limits.memory / 2 ** 30:.1f} are to be used'
    if seconds > limits.call_seconds:
        return f'a call would take about {seconds:.0f} s'
    return None


def run_report(cfg: Config, edges: Sequence[int], kinds: Sequence[str], parts: Sequence[str], train_batch: int,
               device: torch.device, seconds: float, max_call_seconds: float, max_memory: Optional[int],
               csv_file: Path) -> Tuple[List[Row], Dict[str, str], List[str]]:
    """Measure the parts of the work on square images of each size.

    Args:
        cfg: A config of MMDetection or MMSegmentation with a backbone of this project.
        edges: Heights and widths in pixels.
        kinds: Of ``KINDS``.
        parts: Of ``PARTS``.
        train_batch: Images of a training step. (Batch norm over a map of one token needs two.)
        device: Where to run.
        seconds: About how long to time each part at each size; ``MIN_ROUNDS`` rounds are timed in any case.
        max_call_seconds: What would take longer is left out.
        max_memory: Bytes that are used at most. Default: 90 % of what is available when it starts.
        csv_file: Where the rows are written, after each measurement.

    Returns:
        The rows; for each kind what it is in this backbone; and a sentence for whatever was left out.

    Raises:
        RunError: If the config cannot be measured.
    """
    variants = make_variants(cfg, kinds)
    subjects = {kind: Subject(variant, device) for kind, variant in variants.items()}
    attn_types = {kind: variant.model.backbone.attn_types for kind, variant in variants.items()}
    labels = {kind: describe(kind, subject.model.backbone, attn_types[kind]) for kind, subject in subjects.items()}
    limits = Limits(max_memory or int(USED_MEMORY * available_bytes(device)), max_call_seconds)
    rows, left_out = [], []
    steps = list(itertools.product(sorted(edges), parts))
    with Progress() as progress:
        task = progress.add_task('measuring', total=len(steps))
        for edge, part in steps:
            progress.update(task, description=f'{part}, {edge} px')
            images = train_batch if part == 'training step' else 1
            runs = {}
            for kind, subject in subjects.items():
                earlier = [row for row in rows if (row.attention, row.part) == (kind, part)]
                reason = reason_to_leave_out(earlier, edge, limits)
                if reason:
                    left_out.append(f'{kind}, {part}, at {edge}x{edge}: {reason}')
                else:
                    runs[kind] = subject.work(part, edge, images)
            times = time_interleaved(runs, device, seconds, MIN_ROUNDS)
            peaks = {kind: peak_bytes(run, device) for kind, run in runs.items()}
            rows += [
                Row(device_name(device), Path(cfg.filename).name, kind, str(attn_types[kind]), part, edge, images,
                    statistics.median(times[kind]),
                    median_ratio(times[kind], times['inline']) if 'inline' in times else math.nan, peaks[kind])
                for kind in runs]
            write_csv(rows, csv_file)
            progress.advance(task)
    return rows, labels, left_out


# ---- what it says -------------------------------------------------------------------------------------
def growth(rows: Sequence[Row], attention: str, part: str, field: str) -> Optional[float]:
    """Fit field ~ pixels ** exponent to the images from ``MIN_FITTED_EDGE`` on; None with fewer than two."""
    points = [(row.edge ** 2, getattr(row, field)) for row in rows
              if (row.attention, row.part) == (attention, part) and row.edge >= MIN_FITTED_EDGE]
    return growth_exponent(points) if len(points) > 1 else None


def find_crossover(rows: Sequence[Row], part: str, field: str) -> Optional[float]:
    """Return the edge in pixels up to which softmax takes less than inline, as :func:`crossover`; None if never both
    were measured."""
    values = {(row.attention, row.edge): getattr(row, field) for row in rows if row.part == part}
    ratios = {edge: values['softmax', edge] / values['inline', edge] for attention, edge in values
              if attention == 'inline' and ('softmax', edge) in values}
    return crossover(ratios) if ratios else None


def result_table(rows: Sequence[Row]) -> Table:
    """A table of all rows, for rich to print."""
    table = Table(title=f'{rows[0].config}, on {rows[0].device}', title_justify='left', box=box.SIMPLE,
                  padding=(0, 1, 0, 0))
    for column in ('part', 'images', 'attention', 'seconds', 'to inline', 'peak MiB'):
        table.add_column(column, justify='left' if column in ('part', 'attention') else 'right')
    for row in rows:
        table.add_row(row.part, f'{row.images} x {row.edge}x{row.edge}', row.attention, f'{row.seconds:.4g}',
                      '' if math.isnan(row.ratio_to_inline) else f'{row.ratio_to_inline:.2f}',
                      f'{row.peak_bytes / 2 ** 20:.0f}')
    return table


def sentences(rows: Sequence[Row]) -> List[str]:
    """Say how time and memory grow, and up to which image softmax takes less than inline."""
    said = []
    for part in dict.fromkeys(row.part for row in rows):
        for field, what in (('seconds', 'time'), ('peak_bytes', 'memory')):
            exponents = {kind: growth(rows, kind, part, field) for kind in dict.fromkeys(row.attention for row in rows)}
            fitted = ', '.join(f'{kind} {exponent:.2f}' for kind, exponent in exponents.items() if exponent is not None)
            grows = f'{what} grows with the pixels to the power of {fitted}' if fitted else what
            said.append(f'{part}: {grows}; {_say_crossover(rows, part, field)}')
    return said


def _say_crossover(rows: Sequence[Row], part: str, field: str) -> str:
    edge = find_crossover(rows, part, field)
    wins = 'is faster' if field == 'seconds' else 'needs less memory'
    if edge is None:
        return 'softmax and inline were not both measured'
    if edge == 0:
        return f'inline {wins} at every measured size'
    return f'softmax {wins} ' + ('at every measured size' if math.isinf(edge) else f'up to {edge:.0f} px')


STYLES = {
    'inline': dict(color='tab:blue', marker='o', linewidth=2.5, zorder=3),
    'softmax': dict(color='tab:red', marker='^'),
    'linear': dict(color='tab:green', marker='s', linestyle='--'),
}


def draw(rows: Sequence[Row], labels: Dict[str, str], out_file: Path) -> None:
    """Draw time and peak memory over the size of the image, a column for each part of the work."""
    from matplotlib.figure import Figure  # where a GPU is lent, it may be missing

    parts = list(dict.fromkeys(row.part for row in rows))
    edges = {edge: str(edge) for edge in sorted({row.edge for row in rows})}
    figure = Figure(figsize=(1 + 4.8 * len(parts), 9), layout='constrained')
    figure.suptitle(f'{Path(rows[0].config).stem} on {rows[0].device}\n(random weights; figures beside the names: '
                    f'exponent of the growth with the pixels, from {MIN_FITTED_EDGE} px on)')
    grid = figure.subplots(2, len(parts), squeeze=False, sharex=True)
    for axes_row, (field, unit, ylabel) in zip(grid, (('seconds', 1, 'seconds'), ('peak_bytes', 2 ** 20, 'peak MiB'))):
        for axes, part in zip(axes_row, parts):
            for kind in labels:
                own = [row for row in rows if (row.attention, row.part) == (kind, part)]
                exponent = growth(rows, kind, part, field)
                axes.plot([row.edge for row in own], [getattr(row, field) / unit for row in own],
                          label=kind if exponent is None else f'{kind}  {exponent:.2f}', **STYLES[kind])
            images = next(row.images for row in rows if row.part == part)
            of_images = f'{images} image{"s" if images > 1 else ""}'
            set_log_axes(axes, edges, ylabel=ylabel, title=f'{part}, {of_images}\n{_say_crossover(rows, part, field)}')
            edge = find_crossover(rows, part, field)
            if edge and not math.isinf(edge):
                axes.axvline(edge, color='black', linestyle=':', linewidth=1)
            axes.legend(loc='upper left', framealpha=1, edgecolor='none')  # rising lines leave it free
    for axes in grid[-1]:
        axes.set_xlabel('edge of the square image, in pixels')
    notes = [label for kind, label in labels.items() if label != kind]
    figure.text(0.5, -0.01, '\n'.join(notes), ha='center', va='top')
    figure.savefig(out_file, dpi=110, bbox_inches='tight')
