"""Draws what a model is trained on: images with their annotations, as they come out of a config's pipeline.

Exit status: 0; 1 if some images could not be drawn (each is named, the others are done); 2, with a message, if the
data set cannot be read or nothing can be written.
"""
import argparse
import sys
from pathlib import Path

from mminline import runs
from mminline.analysis.browse import browse_dataset
from mminline.analysis.dataset_check import SPLITS


def parse_args():
    parser = argparse.ArgumentParser(
        description='Draw images and annotations after the augmentation.', parents=[runs.config_arguments()])
    parser.add_argument('--split', choices=SPLITS, default='train', help='which of the data sets (%(default)s)')
    parser.add_argument('--out-dir', type=Path, default=Path('work_dirs/browse'), metavar='DIR',
                        help='folder for the pictures (%(default)s)')
    parser.add_argument('--number', type=int, default=20, metavar='N',
                        help='how many images, spread evenly over the data set (%(default)s)')
    parser.add_argument('--seed', type=int, default=0, metavar='S', help='of random augmentations (%(default)s)')
    args = parser.parse_args()
    if args.number < 1:
        parser.error(f'--number must be at least 1, got {args.number}')
    return parser, args


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        cfg = runs.read_config(args.config, args.cfg_options)
        try:
            pictures, failed = browse_dataset(cfg, args.split, args.out_dir, args.number, args.seed)
        except OSError as error:
            raise runs.RunError(f'cannot write: {error}') from error
    print(f'{args.out_dir}: {len(pictures)} picture(s)')
    if failed:
        reasons = ''.join(f'  {place}: {reason}\n' for place, reason in failed.items())
        print(f'{len(failed)} image(s) could not be drawn:\n{reasons}', end='', file=sys.stderr)
        sys.exit(1)


if __name__ == '__main__':
    main()
