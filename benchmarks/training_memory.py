"""Whether training at changing image sizes needs ever more memory, and how much recomputation (with_cp) saves.

Random weights and noise, on the CPU. First, training steps at sizes drawn at random, the largest one among the first:
the peak resident memory of the process is read for each step. Then, one step with and without ``with_cp`` of the
backbone: its gradients, and the most bytes that PyTorch has allocated at a time.

Exit status: 0; 1 if memory grows or the gradients differ; 2, with a message, if the config cannot be read or measured.
"""
import argparse
import copy
import random
import re
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from mminline import runs
from mminline.analysis.measure import peak_bytes, relative_error
from mminline.analysis.resolution_report import EDGE_DIVISOR, Subject, make_variants
from mminline.preflight import RunError

CPU = torch.device('cpu')
MIN_STEPS = 20
MAX_GROWTH = 0.03  # of the peak: what the allocator scatters
MAX_GRADIENT_ERROR = 1e-5


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description='Measure the memory of training steps at changing sizes.',
                                     parents=[runs.config_arguments()])
    parser.add_argument('--steps', type=int, default=50, metavar='N', help='training steps (%(default)s)')
    parser.add_argument('--max-edge', type=int, default=512, metavar='PX',
                        help='largest square image; the smallest has half of that (%(default)s)')
    parser.add_argument('--batch', type=int, default=2, metavar='B', help='images of a step (%(default)s)')
    args = parser.parse_args(argv)
    if args.steps < MIN_STEPS:
        parser.error(f'--steps must be at least {MIN_STEPS}, got {args.steps}')
    if args.max_edge < 2 * EDGE_DIVISOR or args.max_edge % EDGE_DIVISOR:
        parser.error(f'--max-edge must be a multiple of {EDGE_DIVISOR} from {2 * EDGE_DIVISOR} on, got {args.max_edge}')
    return parser, args


def peak_resident_bytes(step) -> int:
    """Return the most memory that the process has had resident during ``step()``."""
    try:
        Path('/proc/self/clear_refs').write_text('5')  # resets VmHWM
    except OSError as error:
        raise RunError(f'the peak of resident memory is read from /proc, as Linux has it: {error}') from error
    step()
    return int(re.search(r'VmHWM:\s*(\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024


def steps_at_changing_sizes(subject: Subject, steps: int, max_edge: int, batch: int) -> list[int]:
    """Return the peak of each training step, in bytes."""
    edges = list(range(max_edge // 2, max_edge + 1, EDGE_DIVISOR))
    draw = random.Random(0)
    order = [draw.choice(edges) for _ in range(steps)]
    order[1] = max_edge
    return [peak_resident_bytes(subject.work('training step', edge, batch))
            for edge in track(order, description='training steps')]


def one_step(subject: Subject, edge: int, batch: int) -> tuple[int, torch.Tensor]:
    """Return the peak of a training step in bytes, and the gradients of the backbone."""
    work = subject.work('training step', edge, batch)
    subject.optim_wrapper.zero_grad = lambda: None  # keeps the gradients
    torch.manual_seed(0)  # samplers and stochastic depth draw the same numbers
    peak = peak_bytes(work, CPU)
    grads = [parameter.grad.flatten() for parameter in subject.model.backbone.parameters()
             if parameter.grad is not None]
    return peak, torch.cat(grads)


def main(argv=None):
    parser, args = parse_args(argv)
    with runs.exit_on_run_error(parser):
        cfg = make_variants(runs.read_config(args.config, args.cfg_options), ['inline'])['inline']
        peaks = steps_at_changing_sizes(Subject(cfg, CPU), args.steps, args.max_edge, args.batch)
        measured = {}
        for with_cp in (False, True):
            variant = copy.deepcopy(cfg)
            variant.model.backbone.with_cp = with_cp
            measured[with_cp] = one_step(Subject(variant, CPU), args.max_edge, args.batch)
    half = args.steps // 2
    early, late = max(peaks[:half]), max(peaks[half:])
    (peak, grads), (peak_with_cp, grads_with_cp) = measured[False], measured[True]
    error = relative_error(grads_with_cp, grads)
    console = Console(soft_wrap=True)
    console.print(f'{args.steps} training steps of {args.batch} images, {args.max_edge // 2} to {args.max_edge} px: '
                  f'peak resident memory {early / 2 ** 20:.0f} MiB up to step {half}, '
                  f'{late / 2 ** 20:.0f} MiB after it')
    console.print(f'One step of {args.batch} images, {args.max_edge} px: {peak / 2 ** 20:.0f} MiB, with_cp '
                  f'{peak_with_cp / 2 ** 20:.0f} MiB; relative difference of the gradients {error:.1e}')
    sys.exit(late > (1 + MAX_GROWTH) * early or error > MAX_GRADIENT_ERROR)


if __name__ == '__main__':
    main()
