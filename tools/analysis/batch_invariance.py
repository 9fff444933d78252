"""Evaluates a detector with several batch sizes: how much do an image's detections hang on its neighbours in the batch?

Once with a pad-aware backbone and once without. Exit status: 2, with a message, if the run cannot start.
"""
import argparse

from rich.console import Console

from mminline import runs
from mminline.analysis import batch_invariance
from mminline.analysis.measure import TABLE_WIDTH


def parse_args():
    parser = argparse.ArgumentParser(
        description='Compare detections with those at batch size 1.', parents=[runs.common_arguments()])
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='checkpoint file')
    parser.add_argument('--batch-sizes', type=int, nargs='+', default=[4], metavar='B',
                        help='batch sizes beside 1 (4)')
    parser.add_argument('--score-thr', type=float, default=0.3, metavar='S',
                        help='compare detections from this score on (%(default)s)')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    if min(args.batch_sizes) < 1:
        parser.error(f'--batch-sizes must be positive, got {args.batch_sizes}')
    with runs.exit_on_run_error(parser):
        rows = batch_invariance.measure(runs.load_config(args), args.checkpoint, args.batch_sizes, args.score_thr)
    console = Console(width=max(TABLE_WIDTH, Console().width))
    console.print(batch_invariance.result_table(rows, args.score_thr))


if __name__ == '__main__':
    main()
