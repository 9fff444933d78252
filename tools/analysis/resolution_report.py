"""Measures a config's model on growing images, with inline, softmax and linear attention.

Seconds and peak memory of the backbone, of inference and of a training step. The attentions are timed in turns
(A, B, A, B ...), and ratios are medians over the rounds. What would not fit in memory, or take too long, is left out
and named. Writes table.csv and report.png.

Exit status: 2, with a message, if the config cannot be read or measured.
"""
import argparse
from pathlib import Path

import torch
from rich.console import Console

from mminline import runs
from mminline.analysis import resolution_report as report
from mminline.analysis.measure import TABLE_WIDTH


def parse_edge(text):
    if not text.isdecimal() or not int(text) or int(text) % report.EDGE_DIVISOR:
        raise argparse.ArgumentTypeError(f'expected a multiple of {report.EDGE_DIVISOR} pixels, got {text!r}')
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(
        description="Measure a config's model on growing images.", parents=[runs.config_arguments()])
    parser.add_argument('--sizes', type=parse_edge, nargs='+', metavar='EDGE',
                        default=[256, 512, 768, 1024, 1536, 2048],
                        help='square images, in pixels (256 512 768 1024 1536 2048)')
    parser.add_argument('--attention', choices=report.KINDS, nargs='+', default=list(report.KINDS), metavar='A',
                        help=f'what to measure ({" ".join(report.KINDS)})')
    parser.add_argument('--parts', choices=report.PARTS, nargs='+', default=list(report.PARTS), metavar='P',
                        help="what to measure (backbone inference 'training step')")
    parser.add_argument('--train-batch', type=int, default=2, metavar='B',
                        help='images of a training step (%(default)s)')
    parser.add_argument('--device', type=torch.device, default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='cpu or cuda (%(default)s)')
    parser.add_argument('--seconds', type=float, default=10, metavar='S',
                        help='about how long to time each part at each size (%(default)s)')
    parser.add_argument('--max-call-seconds', type=float, default=60, metavar='S',
                        help='leave out what would take longer (%(default)s)')
    parser.add_argument('--max-memory', type=float, metavar='GIB',
                        help='memory to use at most (90 %% of what is available)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/resolution'), metavar='DIR',
                        help='folder for table.csv and report.png (%(default)s)')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        cfg = runs.read_config(args.config, args.cfg_options)
        report.make_variants(cfg, args.attention)  # says what is wrong before a folder is made
        args.out.mkdir(parents=True, exist_ok=True)
        rows, labels, left_out = report.run_report(
            cfg, args.sizes, args.attention, args.parts, args.train_batch, args.device, args.seconds,
            args.max_call_seconds, args.max_memory and int(args.max_memory * 2 ** 30), args.out / 'table.csv')
    console = Console(width=max(TABLE_WIDTH, Console().width))
    console.print(report.result_table(rows))
    for sentence in report.sentences(rows):
        console.print(sentence, soft_wrap=True)
    for sentence in left_out:
        console.print(f'Left out: {sentence}', soft_wrap=True)
    try:
        report.draw(rows, labels, args.out / 'report.png')
    except ModuleNotFoundError as error:
        console.print(f'No picture: {error}')
    console.print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
