"""Measures InLine-PVT on whole images beside the authors' formula and softmax PVT.

Times are taken in turns (A, B, A, B ...), and ratios are medians over the rounds. Writes backbone.csv and
backbone.png.
"""
import argparse
from pathlib import Path

import torch
from rich.console import Console

from mminline.analysis import backbone_benchmark as benchmark
from mminline.analysis.measure import TABLE_WIDTH, parse_size
from mminline.models.backbones.pvt import ARCHS


def parse_args():
    methods = benchmark.available_methods()
    parser = argparse.ArgumentParser(description='Measure InLine-PVT beside its rivals.')
    parser.add_argument('--arch', choices=ARCHS, default='tiny', help='size of PVT (%(default)s)')
    parser.add_argument('--sizes', type=parse_size, nargs='+', metavar='HxW',
                        default=[(512, 512), (800, 1216), (1024, 1024), (2048, 2048)],
                        help='images in pixels, as 512 or 800x1216 (512 800x1216 1024 2048)')
    parser.add_argument('--methods', choices=methods, nargs='+', default=list(methods), metavar='M',
                        help=f'what to compare inline with ({" ".join(methods)})')
    parser.add_argument('--dtypes', choices=('float32', 'bfloat16', 'float16'), nargs='+', metavar='T',
                        default=['float32', 'bfloat16'], help='types of autocast (float32 bfloat16)')
    parser.add_argument('--device', type=torch.device, default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='cpu or cuda (%(default)s)')
    parser.add_argument('--seconds', type=float, default=20, metavar='S',
                        help='about how long to time each size (%(default)s)')
    parser.add_argument('--max-call-seconds', type=float, default=20, metavar='S',
                        help='leave a backbone out where one call would take longer (%(default)s)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/benchmark'), metavar='DIR',
                        help='folder for backbone.csv and backbone.png (%(default)s)')
    return parser.parse_args()


def main():
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows, left_out = benchmark.run_benchmark(
        args.methods, args.arch, args.sizes, [getattr(torch, name) for name in args.dtypes], args.device,
        args.seconds, args.max_call_seconds, args.out / 'backbone.csv')
    console = Console(width=max(TABLE_WIDTH, Console().width))
    console.print(benchmark.result_table(rows))
    for (method, dtype), exponent in benchmark.growth_exponents(rows).items():
        console.print(f'{method}, {dtype}: time grows with the pixels to the power of {exponent:.2f}')
    for sentence in left_out:
        console.print(f'Left out: {sentence}')
    try:
        benchmark.draw(rows, args.out / 'backbone.png')
    except ModuleNotFoundError as error:
        console.print(f'No picture: {error}')
    console.print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
