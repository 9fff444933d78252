"""InLine-PVT beside its rivals on whole images: time, growth with the image's size, memory, precision.

What is compared:

- inline: :class:`InLinePVT` as it is;
- formula: the same weights, with attention in the authors' form and every layer over the whole map at once;
- softmax: PVT's own attention in place of InLine's, through ``scaled_dot_product_attention``;
- mmdet: MMDetection's ``PyramidVisionTransformer`` of the same size, where MMDetection is installed.
"""
import copy
import importlib.util
import math
import statistics
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from mminline.models import InLinePVT
from mminline.models.backbones.pvt import ARCHS, NUM_STAGES
from mminline.models.layers import Block

from .benchmark import authors_formula
from .measure import (
    device_name,
    growth_exponent,
    median_ratio,
    peak_bytes,
    relative_error,
    set_log_axes,
    time_interleaved,
    write_csv,
)

METHODS = ('inline', 'formula', 'softmax', 'mmdet')
QUADRATIC = ('softmax', 'mmdet')
# A backbone is wrong, not imprecise, if its float32 features are further from inline's than this.
TOLERANCE = 1e-3
MIN_FITTED_EDGE = 512  # pixels; below, fixed costs count


class Row(NamedTuple):
    """What was measured of one backbone on one image."""
    device: str
    arch: str
    method: str
    dtype: str  # of autocast; float32 is without
    height: int  # pixels
    width: int
    forward_ms: float  # median
    ratio_to_inline: float  # of the same type, median of the rounds
    ratio_to_float32: float  # of the same method
    peak_bytes: int
    units_of_rounding: float  # error of inline on the smallest image, in units of input rounding; else NaN


# ---- the rivals ---------------------------------------------------------------------------------------
class FormulaBlock(nn.Module):
    """A block's weights, used as in the authors' code: their formula, and no blocks of tokens."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        attn = self.block.attn
        tokens = self.block.norm1(x)
        q, (k, v) = attn.q(tokens), attn.kv(tokens).chunk(2, dim=-1)
        local_weight = attn.residual(tokens.mean(dim=1))
        x = x + attn.proj(authors_formula(q, k, v, attn.num_heads, local_weight, hw_shape))
        return x + self.block.mlp(self.block.norm2(x))


def with_authors_formula(backbone: InLinePVT) -> InLinePVT:
    """Return a copy whose blocks compute as the authors' code does."""
    backbone = copy.deepcopy(backbone)
    for stage in range(1, NUM_STAGES + 1):
        blocks = getattr(backbone, f'block{stage}')
        for index, block in enumerate(blocks):
            blocks[index] = FormulaBlock(block)
    return backbone


def mmdet_pvt(arch: str) -> nn.Module:
    """Return MMDetection's softmax PVT of the same size."""
    from mmdet.models.backbones import PyramidVisionTransformer

    settings = ARCHS[arch]
    return PyramidVisionTransformer(num_layers=list(settings['depths']), mlp_ratios=list(settings['mlp_ratios']))


def available_methods() -> Tuple[str, ...]:
    return METHODS if importlib.util.find_spec('mmdet') else METHODS[:-1]


def build(methods: Sequence[str], arch: str, device: torch.device) -> Dict[str, nn.Module]:
    """Return backbones with random weights, for inference; inline and formula share theirs."""
    torch.manual_seed(0)
    inline = InLinePVT(arch)
    makers: Dict[str, Callable[[], nn.Module]] = {
        'inline': lambda: inline,
        'formula': lambda: with_authors_formula(inline),
        'softmax': lambda: InLinePVT(arch, attn_types=('softmax',) * NUM_STAGES),
        'mmdet': lambda: mmdet_pvt(arch),
    }
    return {method: makers[method]().to(device).eval() for method in methods}


# ---- measuring ----------------------------------------------------------------------------------------
def run_benchmark(methods: Sequence[str], arch: str, sizes: Sequence[Tuple[int, int]], dtypes: Sequence[torch.dtype],
                  device: torch.device, seconds: float, max_call_seconds: float, csv_file: Path
                  ) -> Tuple[List[Row], List[str]]:
    """Measure the forward of each backbone on one image of each size, in each type.

    Args:
        methods: Of ``METHODS``; inline is always measured.
        arch: A size of PVT.
        sizes: Images (height, width) in pixels.
        dtypes: Types of autocast; float32 stands for none, and is always measured.
        device: Where to run.
        seconds: About how long to time each size.
        max_call_seconds: A backbone is left out where one call would take longer, if all of its time grew with the
            pixels, and a softmax's with their square.
        csv_file: Where the rows are written, after each size.

    Returns:
        The rows, and a sentence for each backbone that was left out.

    Raises:
        ArithmeticError: If formula's features are not inline's.
    """
    methods = ['inline', *(method for method in methods if method != 'inline')]
    dtypes = [torch.float32, *(dtype for dtype in dtypes if dtype != torch.float32)]
    backbones = build(methods, arch, device)
    rows, left_out = [], []
    slowest: Dict[Tuple[str, torch.dtype], Tuple[float, int]] = {}  # seconds of a call, pixels
    for size in track(sorted(sizes, key=math.prod), description='measuring'):
        image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0)).to(device)
        pixels = math.prod(size)
        runs = {}
        for dtype in dtypes:
            for method in methods:
                seconds_before, pixels_before = slowest.get((method, dtype), (0, 1))
                expected_seconds = seconds_before * (pixels / pixels_before) ** (2 if method in QUADRATIC else 1)
                if expected_seconds <= max_call_seconds or method == 'inline':
                    runs[method, dtype] = _forward(backbones[method], image, dtype)
                else:
                    left_out.append(f'{method}, {_name(dtype)}, at {size[0]}x{size[1]}: up to {expected_seconds:.0f} s '
                                    'a call')
        _check_features(runs, size)
        times = time_interleaved(runs, device, seconds)
        for (method, dtype), run in runs.items():
            seconds_of_call = statistics.median(times[method, dtype])
            slowest[method, dtype] = seconds_of_call, pixels
            rows.append(Row(
                device_name(device), arch, method, _name(dtype), *size, seconds_of_call * 1e3,
                median_ratio(times[method, dtype], times['inline', dtype]),
                median_ratio(times[method, dtype], times[method, torch.float32])
                if (method, torch.float32) in times else math.nan,
                peak_bytes(run, device),
                _units_of_rounding(backbones['inline'], image, dtype)
                if method == 'inline' and size == min(sizes, key=math.prod) and dtype != torch.float32 else math.nan))
        write_csv(rows, csv_file)
    return rows, left_out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def _forward(backbone: nn.Module, image: Tensor, dtype: torch.dtype) -> Callable[[], Sequence[Tensor]]:
    def run() -> Sequence[Tensor]:
        with torch.no_grad(), torch.autocast(image.device.type, dtype, enabled=dtype != torch.float32):
            return backbone(image)
    return run


def _check_features(runs: dict, size: Tuple[int, int]) -> None:
    """Hold formula's features against inline's: two ways to compute the same."""
    if ('formula', torch.float32) not in runs:
        return
    for stage, (a, b) in enumerate(zip(runs['inline', torch.float32](), runs['formula', torch.float32]()), start=1):
        error = relative_error(a, b)
        if not error <= TOLERANCE:
            raise ArithmeticError(f'at {size[0]}x{size[1]}, features of stage {stage} differ from those by the '
                                  f"authors' formula by {error:.2g}")


def _units_of_rounding(backbone: InLinePVT, image: Tensor, dtype: torch.dtype) -> float:
    """Return the error of the features under autocast, the largest of all stages.

    One unit is the error, in float64, from rounding the image and the parameters to the type.
    """
    exact = copy.deepcopy(backbone).double()
    rounded = copy.deepcopy(backbone).to(dtype).double()
    with torch.no_grad():
        expected, of_rounded = exact(image.double()), rounded(image.to(dtype).double())
    return max(relative_error(result, reference) / relative_error(unit, reference) for result, unit, reference
               in zip(_forward(backbone, image, dtype)(), of_rounded, expected))


# ---- what it says -------------------------------------------------------------------------------------
def result_table(rows: Sequence[Row]) -> Table:
    """A table of all rows, for rich to print."""
    table = Table(title=f'PVT {rows[0].arch}, one image, forward, on {rows[0].device}', title_justify='left',
                  box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ('pixels', 'method', 'type', 'ms', 'to inline', 'to float32', 'peak MiB', 'error, units of rounding'):
        table.add_column(column, justify='left' if column in ('pixels', 'method', 'type') else 'right')
    for row in rows:
        table.add_row(f'{row.height}x{row.width}', row.method, row.dtype, f'{row.forward_ms:.4g}',
                      f'{row.ratio_to_inline:.2f}', _number(row.ratio_to_float32), f'{row.peak_bytes / 2 ** 20:.0f}',
                      _number(row.units_of_rounding))
    return table


def _number(value: float) -> str:
    return '' if math.isnan(value) else f'{value:.2f}'


def growth_exponents(rows: Sequence[Row]) -> Dict[Tuple[str, str], float]:
    """Fit time ~ pixels ** exponent to the square images from ``MIN_FITTED_EDGE`` on, by method and type."""
    exponents = {}
    for key in {(row.method, row.dtype): None for row in rows}:
        points = [(row.height * row.width, row.forward_ms) for row in rows
                  if (row.method, row.dtype) == key and row.height == row.width >= MIN_FITTED_EDGE]
        if len(points) >= 2:
            exponents[key] = growth_exponent(points)
    return exponents


STYLES = {
    'inline': dict(color='tab:blue', marker='o', linewidth=2.5, zorder=3),
    'formula': dict(color='tab:orange', marker='s'),
    'softmax': dict(color='tab:green', marker='v'),
    'mmdet': dict(color='tab:red', marker='^'),
}
LABELS = {'inline': 'InLine-PVT', 'formula': "InLine-PVT, authors' formula, whole maps",
          'softmax': 'PVT, reduced softmax (ours)', 'mmdet': 'PVT, reduced softmax (MMDetection)'}
PANELS = (('forward_ms', 1, 'time [ms]'), ('peak_bytes', 2 ** 20, 'peak [MiB]'))


def draw(rows: Sequence[Row], out_file: Path) -> None:
    """Draw time and peak memory over the pixels of the image, a colour for each backbone, dashed below float32."""
    from matplotlib.figure import Figure  # where a GPU is lent, it may be missing

    figure = Figure(figsize=(11, 5.5), layout='constrained')
    figure.suptitle(f'PVT {rows[0].arch}, one image, forward, on {rows[0].device}')
    panels = figure.subplots(1, 2)
    for axes, (field, unit, label) in zip(panels, PANELS):
        for method, dtype in {(row.method, row.dtype): None for row in rows}:
            own = [row for row in rows if (row.method, row.dtype) == (method, dtype)]
            axes.plot([row.height * row.width for row in own], [getattr(row, field) / unit for row in own],
                      linestyle='-' if dtype == 'float32' else '--', label=f'{LABELS[method]}, {dtype}',
                      **STYLES[method])
        sizes = {row.height * row.width: f'{row.height}x{row.width}' for row in rows}
        set_log_axes(axes, sizes, xlabel='image, in pixels', ylabel=label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=2, frameon=False)
    figure.savefig(out_file, dpi=110)
