"""Functions measured against each other on one device: time, memory, and what the device does at best."""
import argparse
import csv
import math
import os
import platform
import re
import statistics
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

MIN_SAMPLE_SECONDS = 2e-3  # shorter calls are repeated until a sample takes about that long
MIN_ROUNDS = 5
COPIED_BYTES = 2 ** 28  # beyond every cache
TABLE_WIDTH = 100  # that the tables of the benchmarks need, in characters


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def seconds_per_call(function: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Return the mean wall time of one of ``repeats`` calls."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def time_interleaved(functions: Dict[str, Callable[[], object]], device: torch.device, seconds: float,
                     min_rounds: int = MIN_ROUNDS) -> Dict[str, List[float]]:
    """Time functions in turns: A, B, A, B ...

    Whatever disturbs the machine disturbs them alike, so compare them round by round (:func:`median_ratio`).

    Args:
        functions: What to time, by name.
        device: Where they run.
        seconds: About how long to measure in all.
        min_rounds: So many rounds are measured even if they take longer.

    Returns:
        Seconds per call by name, one of every round.
    """
    repeats = {}
    for name, function in functions.items():
        function()  # compiles kernels, fills caches
        repeats[name] = 1 + int(MIN_SAMPLE_SECONDS / seconds_per_call(function, device))
    times = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < min_rounds or time.perf_counter() < end:
        for name, function in functions.items():
            times[name].append(seconds_per_call(function, device, repeats[name]))
        rounds += 1
    return times


def time_in_pairs(functions: Dict[str, Callable[[], object]], base: str, device: torch.device, seconds: float
                  ) -> Tuple[Dict[str, float], Dict[str, float]]:
    """Time each function in turns with the base, and with nothing else.

    A call that takes seconds lets caches and pages go cold; only its own ratio shall tell of that.

    Args:
        functions: What to time, by name; at least one beside the base.
        base: Name of the one that the others are compared with.
        device: Where they run.
        seconds: About how long to measure in all.

    Returns:
        Median seconds per call, and the median ratio to the base, by name.
    """
    others = [name for name in functions if name != base]
    of_base, medians, ratios = [], {}, {base: 1.0}
    for name in others:
        times = time_interleaved({key: functions[key] for key in (base, name)}, device, seconds / len(others))
        of_base += times[base]
        medians[name], ratios[name] = statistics.median(times[name]), median_ratio(times[name], times[base])
    medians[base] = statistics.median(of_base)
    return medians, ratios


def median_ratio(times: Sequence[float], base_times: Sequence[float]) -> float:
    """Return the median over the rounds of how many times as long as the base something took."""
    return statistics.median(time / base for time, base in zip(times, base_times))


def growth_exponent(points: Sequence[Tuple[float, float]]) -> float:
    """Fit y ~ x ** exponent to at least two points (x, y): the slope of a straight line in logarithms."""
    return float(np.polyfit(*np.log(points).T, deg=1)[0])


def crossover(ratios: Dict[int, float]) -> float:
    """Return the size up to which ratios, by size, are below 1: 0 if nowhere, infinity if at the largest size, too.

    Between two sizes, ratios are taken for powers of the size: straight lines in logarithms.
    """
    sizes = sorted(ratios)
    last = max((size for size in sizes if ratios[size] < 1), default=None)
    if last is None:
        return 0.
    if last == sizes[-1]:
        return math.inf
    following = sizes[sizes.index(last) + 1]
    part = math.log(ratios[last]) / (math.log(ratios[last]) - math.log(ratios[following]))
    return last * (following / last) ** part


def saved_bytes(function: Callable[[], object]) -> int:
    """Return the bytes that autograd saves for the backward of ``function()``; shared memory counts once."""
    storages = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(note, lambda x: x):
        output = function()
    del output  # until here it kept all that was saved: no address was used twice
    return sum(storages.values())


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that PyTorch has allocated at a time during ``function()``, beyond those before it."""
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # else the profiler tells stderr when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == '[memory]']
    allocated = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        allocated += change.nbytes()
        peak = max(peak, allocated)
    return peak


def available_bytes(device: torch.device) -> int:
    """Return the bytes of memory that the device can still give: of a CPU, what neither the machine nor the process's
    control group needs for something else."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    info, group = Path('/proc/meminfo'), Path('/sys/fs/cgroup')
    found = re.search(r'^MemAvailable:\s*(\d+) kB', info.read_text(), re.MULTILINE) if info.exists() else None
    available = int(found[1]) * 1024 if found else os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if (group / 'memory.max').exists() and (group / 'memory.max').read_text().strip() != 'max':
        available = min(available, int((group / 'memory.max').read_text()) -
                        int((group / 'memory.current').read_text()))
    return available


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, read plus written, at which the device copies within its memory."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = time_interleaved({'copy': lambda: target.copy_(source)}, device, seconds=0.5)
    return 2 * COPIED_BYTES / statistics.median(times['copy'])


def device_name(device: torch.device) -> str:
    """Return what the device calls itself, a CPU with the number of threads in use."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    info = Path('/proc/cpuinfo')
    models = re.findall(r'^model name\s*: (.*)', info.read_text(), re.MULTILINE) if info.exists() else []
    name = models[0] if models else platform.processor() or platform.machine()
    return f'{name}, {torch.get_num_threads()} threads'


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return ||out - expected|| / ||expected||."""
    out, expected = out.detach().double(), expected.detach().double()
    return float((out - expected).norm() / expected.norm())


def write_csv(rows: Sequence[NamedTuple], path: Path) -> None:
    """Write named tuples of one kind as a table, a column for each field."""
    with path.open('w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(rows[0]._fields)
        writer.writerows(rows)


def set_log_axes(axes, sizes: Dict[int, str], **labels: str) -> None:
    """Give matplotlib axes logarithmic scales, a tick for each size on the x axis and plain numbers on the y axis.

    Args:
        axes: The axes.
        sizes: Text of each tick by its place.
        labels: ``xlabel``, ``ylabel``, ``title``.
    """
    from matplotlib import ticker  # where a GPU is lent, it may be missing

    axes.set(xscale='log', yscale='log', **labels)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter('{x:,g}'))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xticks(list(sizes), sizes.values(), rotation=45)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)


def parse_size(text: str) -> Tuple[int, int]:
    """Read a command line's ``EDGE`` or ``HEIGHTxWIDTH``."""
    parts = text.split('x')
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f'expected EDGE or HEIGHTxWIDTH, got {text!r}')
    return int(parts[0]), int(parts[-1])
