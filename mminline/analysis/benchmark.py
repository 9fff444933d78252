"""The attention op beside the other ways to attend over a map: time, memory, and where softmax is still faster.

What is compared, each from q, k and v of (B, N, C) to (B, N, C):

- inline: this package's op, local term included;
- formula: the same attention in the authors' form, :func:`authors_formula`;
- softmax: ``scaled_dot_product_attention`` over all tokens;
- reduced: PVT's softmax, where one key and value stand for sr_ratio x sr_ratio tokens. They are given: what the
  reduction costs in a layer is about what InLine's layer pays for projecting all keys and values.
"""
import math
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

import torch
import torch.nn.functional as F
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor

from mminline.models.layers.attention import merge_heads, split_heads
from mminline.ops import inline_attention
from mminline.ops.reference import inline_attention_weights, local_attention

from .measure import (
    copy_bandwidth,
    crossover,
    device_name,
    peak_bytes,
    relative_error,
    saved_bytes,
    set_log_axes,
    time_in_pairs,
    write_csv,
)

# Channels of PVT's stages: heads and the sr_ratio of its softmax.
STAGES = {64: (2, 8), 128: (4, 4), 320: (10, 2), 512: (16, 1)}
# A larger map is no stage's: this is the first stage's of a 2048x2048 image.
MAX_ELEMENTS = 512 * 512 * 64
# A method is wrong, not imprecise, if its output is further from float64 than this.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
CHECKED_TOKENS = 16
# Tokens x channels that the op reads and writes: k, v; q, v, out. In the backward q, dout; k, v, dout, dq, dk, dv.
FORWARD_PASSES, BACKWARD_PASSES = 5, 8


class Case(NamedTuple):
    """A map of tokens, and how its channels are used."""
    batch: int
    height: int
    width: int
    channels: int

    @property
    def num_tokens(self) -> int:
        return self.height * self.width

    @property
    def num_heads(self) -> int:
        return STAGES[self.channels][0]

    @property
    def sr_ratio(self) -> int:
        return STAGES[self.channels][1]

    def __str__(self) -> str:
        return f'{self.batch} x {self.height}x{self.width} x {self.channels}'


class Row(NamedTuple):
    """What was measured of one method in one case."""
    device: str
    dtype: str
    batch: int
    height: int
    width: int
    channels: int
    num_heads: int
    method: str
    error: float  # relative, of some outputs against float64
    forward_ms: float  # median
    forward_ratio: float  # to inline, median of the rounds
    training_ms: float  # forward and backward
    training_ratio: float
    saved_bytes: int
    peak_bytes: int  # of forward and backward
    forward_floor_ms: float  # bytes that inline must move, at the device's copy bandwidth
    training_floor_ms: float


# ---- the methods --------------------------------------------------------------------------------------
class Inputs(NamedTuple):
    """Tensors of a case: (B, N, C) each, (B, C, 3, 3), and keys and values of (B, M, C)."""
    q: Tensor
    k: Tensor
    v: Tensor
    local_weight: Tensor
    reduced_k: Tensor
    reduced_v: Tensor


def authors_formula(q: Tensor, k: Tensor, v: Tensor, num_heads: int, local_weight: Tensor,
                    hw_shape: Tuple[int, int]) -> Tensor:
    """InLine attention in the form that the authors' code computes it in; arguments as the op's.

    Per head, with s = head_dim ** -0.5, q ((s/N)^1/2 k)^T ((s/N)^1/2 v) + (1 - s q . mean(k)) mean(v); the local term
    is one convolution grouped over batch x channels.
    """
    batch, num_tokens, channels = q.shape
    scale = (channels // num_heads) ** -0.5
    maps = v.transpose(1, 2).reshape(1, batch * channels, *hw_shape)
    local = F.conv2d(maps, local_weight.reshape(batch * channels, 1, 3, 3), padding=1, groups=batch * channels)
    q, k, v = (split_heads(x, num_heads) for x in (q, k, v))
    factor = (scale / num_tokens) ** 0.5
    out = q @ ((factor * k).transpose(-2, -1) @ (factor * v))
    out = out + (1 - scale * q @ k.mean(-2, keepdim=True).transpose(-2, -1)) * v.mean(-2, keepdim=True)
    return merge_heads(out) + local.view(batch, channels, num_tokens).transpose(1, 2)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    return merge_heads(F.scaled_dot_product_attention(*(split_heads(x, num_heads) for x in (q, k, v))))


def attend(method: str, case: Case, x: Inputs) -> Tensor:
    """Run a method on inputs."""
    hw_shape = (case.height, case.width)
    if method == 'inline':
        return inline_attention(x.q, x.k, x.v, case.num_heads, local_weight=x.local_weight, hw_shape=hw_shape)
    if method == 'formula':
        return authors_formula(x.q, x.k, x.v, case.num_heads, x.local_weight, hw_shape)
    if method == 'softmax':
        return softmax_attention(x.q, x.k, x.v, case.num_heads)
    return softmax_attention(x.q, x.reduced_k, x.reduced_v, case.num_heads)


def used_inputs(method: str, x: Inputs) -> Tuple[Tensor, ...]:
    """Return those of the inputs that a method takes."""
    if method in ('inline', 'formula'):
        return x.q, x.k, x.v, x.local_weight
    return (x.q, x.k, x.v) if method == 'softmax' else (x.q, x.reduced_k, x.reduced_v)


def methods_of(case: Case) -> Tuple[str, ...]:
    """Return the methods of a case; where PVT reduces nothing, 'reduced' is softmax."""
    return ('inline', 'formula', 'softmax') + (('reduced',) if case.sr_ratio > 1 else ())


def multiply_adds(method: str, case: Case) -> int:
    """Return how much a softmax multiplies, to foresee how long it takes."""
    num_keys = case.num_tokens if method == 'softmax' else math.ceil(case.num_tokens / case.sr_ratio ** 2)
    return 2 * case.batch * case.num_tokens * num_keys * case.channels


# ---- checking -----------------------------------------------------------------------------------------
def check_results(case: Case, methods: Sequence[str], inputs: Inputs) -> Dict[str, float]:
    """Compare outputs at some tokens with the definitions in float64, and gradients of inline with formula's.

    Returns:
        The relative error of the outputs by method.

    Raises:
        ArithmeticError: If something is wrong rather than imprecise.
    """
    tolerance = TOLERANCE[inputs.q.dtype]
    tokens = torch.linspace(0, case.num_tokens - 1, CHECKED_TOKENS, device=inputs.q.device).long()
    errors = {}
    for method in methods:
        with torch.no_grad():
            errors[method] = relative_error(attend(method, case, inputs)[:, tokens],
                                            expected_output(method, case, inputs, tokens))
        if not errors[method] <= tolerance:
            raise ArithmeticError(f'{method} at {case}: the output is off by {errors[method]:.2g}')
    grad = torch.randn_like(inputs.q)
    gradients = [torch.autograd.grad(attend(method, case, inputs), used_inputs(method, inputs), grad)
                 for method in ('inline', 'formula')]
    for name, of_inline, of_formula in zip(Inputs._fields, *gradients):
        error = relative_error(of_inline, of_formula)
        if not error <= tolerance:
            raise ArithmeticError(f"inline at {case}: the gradient of {name} is off formula's by {error:.2g}")
    return errors


def expected_output(method: str, case: Case, inputs: Inputs, tokens: Tensor) -> Tensor:
    """Compute the output of some tokens in float64, by the definition."""
    x = Inputs(*(value.detach().double() for value in inputs))
    k, v = (x.reduced_k, x.reduced_v) if method == 'reduced' else (x.k, x.v)
    q, k, values = (split_heads(value, case.num_heads) for value in (x.q[:, tokens], k, v))
    scale = q.shape[-1] ** -0.5
    if method in ('softmax', 'reduced'):
        return merge_heads(torch.softmax(scale * q @ k.transpose(-2, -1), dim=-1) @ values)
    out = merge_heads(inline_attention_weights(q, k, scale) @ values)
    return out + local_attention(v, x.local_weight, (case.height, case.width))[:, tokens]


# ---- measuring ----------------------------------------------------------------------------------------
def make_cases(sizes: Sequence[Tuple[int, int]], channels: Sequence[int], batch: int) -> List[Case]:
    """Return the cases of map sizes (H, W) in tokens with channels of PVT's stages, the smallest maps first.

    Raises:
        ValueError: If there is no stage with such channels, or no map fits any.
    """
    unknown = sorted(set(channels) - set(STAGES))
    if unknown:
        raise ValueError(f'channels must be of {tuple(STAGES)}, got {unknown[0]}')
    cases = [Case(batch, *size, width) for width in sorted(set(channels))
             for size in sorted(set(sizes), key=math.prod) if math.prod(size) * width <= MAX_ELEMENTS]
    if not cases:
        raise ValueError(f'maps of {MAX_ELEMENTS:,} values at most are measured, as 512x512 tokens x 64 channels')
    return cases


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    tokens = (case.batch, case.num_tokens, case.channels)
    num_keys = math.ceil(case.height / case.sr_ratio) * math.ceil(case.width / case.sr_ratio)
    reduced = (case.batch, num_keys, case.channels)
    shapes = (tokens, tokens, tokens, (case.batch, case.channels, 3, 3), reduced, reduced)
    return Inputs(*(torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes))


def run_benchmark(cases: Sequence[Case], dtype: torch.dtype, device: torch.device, seconds: float,
                  max_call_seconds: float, csv_file: Path) -> Tuple[List[Row], List[str]]:
    """Check, then measure every method in every case.

    Args:
        cases: From :func:`make_cases`.
        dtype: Type of q, k and v.
        device: Where to run.
        seconds: About how long to time each case, half of it forward only.
        max_call_seconds: Softmax is left out where one call, by its smaller map's time, would take longer.
        csv_file: Where the rows are written, after each case.

    Returns:
        The rows, and a sentence for each method that was left out.

    Raises:
        ArithmeticError: If a method computes something else than float64 does.
    """
    bandwidth = copy_bandwidth(device)
    rows, left_out = [], []
    pace: Dict[Tuple[str, int], float] = {}  # seconds per multiply-add at the map before
    for case in track(cases, description='measuring'):
        methods = []
        for method in methods_of(case):
            expected_seconds = pace.get((method, case.channels), 0) * multiply_adds(method, case)
            if expected_seconds <= max_call_seconds:
                methods.append(method)
            else:
                left_out.append(f'{method} at {case}: about {expected_seconds:.1f} s a call')
        for row in _measure_case(case, methods, dtype, device, seconds, bandwidth):
            rows.append(row)
            if row.method in ('softmax', 'reduced'):
                pace[row.method, case.channels] = row.forward_ms / 1e3 / multiply_adds(row.method, case)
        write_csv(rows, csv_file)
    return rows, left_out


def _measure_case(case: Case, methods: Sequence[str], dtype: torch.dtype, device: torch.device, seconds: float,
                  bandwidth: float) -> Iterator[Row]:
    inputs = make_inputs(case, dtype, device)
    errors = check_results(case, methods, inputs)
    grad = torch.randn_like(inputs.q)

    def forward(method: str) -> Tensor:
        return attend(method, case, inputs)

    def train(method: str) -> None:
        torch.autograd.grad(forward(method), used_inputs(method, inputs), grad)

    with torch.no_grad():
        forward_seconds, forward_ratios = time_in_pairs(
            {method: lambda method=method: forward(method) for method in methods}, 'inline', device, seconds / 2)
    training_seconds, training_ratios = time_in_pairs(
        {method: lambda method=method: train(method) for method in methods}, 'inline', device, seconds / 2)
    floor_ms = inputs.q.numel() * inputs.q.element_size() / bandwidth * 1e3
    for method in methods:
        yield Row(
            device_name(device), str(dtype).removeprefix('torch.'), *case, case.num_heads, method, errors[method],
            forward_seconds[method] * 1e3, forward_ratios[method],
            training_seconds[method] * 1e3, training_ratios[method],
            saved_bytes(lambda method=method: forward(method)), peak_bytes(lambda method=method: train(method), device),
            FORWARD_PASSES * floor_ms, (FORWARD_PASSES + BACKWARD_PASSES) * floor_ms)


# ---- what it says -------------------------------------------------------------------------------------
def result_table(rows: Sequence[Row]) -> Table:
    """A table of all rows, for rich to print."""
    table = Table(title=f'{rows[0].device}, {rows[0].dtype}. Ratios: times as long as inline. '
                        'Floor: bytes that inline moves at copy bandwidth.',
                  title_justify='left', box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ('map', 'method', 'forward\nms', '\nratio', '\nfloor', '+ backward\nms', '\nratio', '\nfloor',
                   'saved\nMiB', 'peak\nMiB', '\nerror'):
        table.add_column(column, justify='left' if column in ('map', 'method') else 'right', no_wrap=True)
    for row in rows:
        is_inline = row.method == 'inline'
        table.add_row(
            str(_case(row)) if is_inline else '', row.method,
            f'{row.forward_ms:.3g}', f'{row.forward_ratio:.2f}', f'{row.forward_floor_ms:.2g}' if is_inline else '',
            f'{row.training_ms:.3g}', f'{row.training_ratio:.2f}', f'{row.training_floor_ms:.2g}' if is_inline else '',
            f'{row.saved_bytes / 2 ** 20:.1f}', f'{row.peak_bytes / 2 ** 20:.1f}', f'{row.error:.0e}')
    return table


def _case(row: Row) -> Case:
    return Case(row.batch, row.height, row.width, row.channels)


def crossover_table(rows: Sequence[Row]) -> Table:
    """A table of the number of tokens below which a softmax is still faster than inline, for rich to print."""
    table = Table(title='Softmax is still faster up to about so many tokens', title_justify='left', box=box.SIMPLE)
    table.add_column('channels', justify='right')
    columns = [(method, field) for method in ('softmax', 'reduced') for field in ('forward_ratio', 'training_ratio')]
    for method, field in columns:
        pass_name = 'forward' if field == 'forward_ratio' else 'forward + backward'
        table.add_column(f'{LABELS[method]}:\n{pass_name}', justify='right')
    for channels in sorted({row.channels for row in rows}):
        ratios = ({row.height * row.width: getattr(row, field) for row in rows
                   if row.channels == channels and row.method == method} for method, field in columns)
        table.add_row(str(channels), *(_crossover(values) if values else '' for values in ratios))
    return table


def _crossover(ratios: Dict[int, float]) -> str:
    """Say up to where ratios, by number of tokens, are below 1."""
    tokens = sorted(ratios)
    limit = crossover(ratios)
    if limit == 0:
        return f'nowhere, from {tokens[0]:,} on'
    return f'{tokens[-1]:,}, the most measured' if math.isinf(limit) else f'{limit:,.0f}'


STYLES = {
    'inline': dict(color='tab:blue', marker='o', linewidth=2.5, zorder=3),
    'formula': dict(color='tab:orange', marker='s'),
    'softmax': dict(color='tab:red', marker='^'),
    'reduced': dict(color='tab:green', marker='v'),
}
LABELS = {'inline': 'inline (this op)', 'formula': "inline, authors' formula", 'softmax': 'softmax, all tokens',
          'reduced': "softmax, PVT's reduced keys"}


def draw(rows: Sequence[Row], out_file: Path) -> None:
    """Draw times and saved memory over the number of tokens, a column for each number of channels."""
    from matplotlib.figure import Figure  # where a GPU is lent, it may be missing

    widths = sorted({row.channels for row in rows})
    panels = (('forward [ms]', 'forward_ms', 'forward_floor_ms'),
              ('forward + backward [ms]', 'training_ms', 'training_floor_ms'),
              ('saved for the backward [MiB]', 'saved_bytes', None))
    figure = Figure(figsize=(1.5 + 3.4 * len(widths), 9.5), layout='constrained')
    figure.suptitle(f'{rows[0].device}, {rows[0].dtype}, batch {rows[0].batch}')
    grid = figure.subplots(len(panels), len(widths), sharex='col', sharey='row', squeeze=False)
    for axes_row, (label, field, floor) in zip(grid, panels):
        axes_row[0].set_ylabel(label)
        for axes, channels in zip(axes_row, widths):
            own = sorted((row for row in rows if row.channels == channels), key=lambda row: row.height * row.width)
            for method, style in STYLES.items():
                points = [(row.height * row.width, getattr(row, field) / (1 if floor else 2 ** 20))
                          for row in own if row.method == method]
                axes.plot(*zip(*points) if points else ([], []), label=LABELS[method], **style)
            if floor:
                inline = [row for row in own if row.method == 'inline']
                axes.plot([row.height * row.width for row in inline], [getattr(row, floor) for row in inline],
                          color='black', linestyle='--', label='floor: bytes of inline at copy bandwidth')
            set_log_axes(axes, {row.height * row.width: f'{row.height}x{row.width}' for row in own})
    for axes, channels in zip(grid[0], widths):
        axes.set_title(f'{channels} channels, {STAGES[channels][0]} heads')
    for axes in grid[-1]:
        axes.set_xlabel('map, in tokens')
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=3, frameon=False)
    figure.savefig(out_file, dpi=110)
