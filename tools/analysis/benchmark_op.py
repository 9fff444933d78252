"""Measures the attention op beside the authors' formula, softmax, and PVT's reduced softmax.

Every result is checked before anything is timed. Each rival is timed in turns with the op (A, B, A, B ...), and
ratios are medians over the rounds. Writes op.csv and op.png.

Exit status: 2, with a message, for arguments that cannot be measured.
"""
import argparse
from pathlib import Path

import torch
from rich.console import Console

from mminline.analysis import benchmark
from mminline.analysis.measure import TABLE_WIDTH, parse_size


def parse_args():
    parser = argparse.ArgumentParser(description='Measure the attention op beside its rivals.')
    parser.add_argument('--sizes', type=parse_size, nargs='+', metavar='HxW', default=[
        (edge, edge) for edge in (14, 28, 56, 128, 256, 512)],
                        help='maps in tokens, as 56 or 200x304 (14 28 56 128 256 512); what is no map of any stage '
                        'of a 2048x2048 image is left out')
    parser.add_argument('--channels', type=int, nargs='+', metavar='C', default=list(benchmark.STAGES),
                        help="channels of PVT's stages (64 128 320 512)")
    parser.add_argument('--batch', type=int, default=1, metavar='B', help='images (%(default)s)')
    parser.add_argument('--dtype', choices=('float32', 'bfloat16', 'float16'), default='float32',
                        help='type of q, k and v (%(default)s)')
    parser.add_argument('--device', type=torch.device, default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='cpu or cuda (%(default)s)')
    parser.add_argument('--seconds', type=float, default=4, metavar='S',
                        help='about how long to time each map (%(default)s)')
    parser.add_argument('--max-call-seconds', type=float, default=1, metavar='S',
                        help='leave softmax out where one call would take longer (%(default)s)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/benchmark'), metavar='DIR',
                        help='folder for op.csv and op.png (%(default)s)')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    try:
        cases = benchmark.make_cases(args.sizes, args.channels, args.batch)
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    rows, left_out = benchmark.run_benchmark(
        cases, getattr(torch, args.dtype), args.device, args.seconds, args.max_call_seconds, args.out / 'op.csv')
    console = Console(width=max(TABLE_WIDTH, Console().width))
    console.print(benchmark.result_table(rows), benchmark.crossover_table(rows))
    for sentence in left_out:
        console.print(f'Left out: {sentence}')
    try:
        benchmark.draw(rows, args.out / 'op.png')
    except ModuleNotFoundError as error:
        console.print(f'No picture: {error}')
    console.print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
