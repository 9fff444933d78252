"""Finds objects, or labels pixels, in images with a trained model; mminline/apis.py shows what is written.

Exit status: 0; 1 if images could not be read (each is named, the others are done); 2, with a message, if the work
cannot start or its results cannot be written.
"""
import argparse
import sys
from pathlib import Path

from mminline import runs
from mminline.apis import infer


def parse_args():
    parser = argparse.ArgumentParser(
        description='Find objects, or label pixels, in images with a trained model.', parents=[runs.config_arguments()])
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='checkpoint file of a run')
    parser.add_argument('images', metavar='IMAGE', nargs='+', help='files, folders and patterns in quotes')
    parser.add_argument('--out-dir', type=Path, default=Path('work_dirs/infer'), metavar='DIR',
                        help='folder for results.json and pictures (%(default)s)')
    parser.add_argument('--device', metavar='DEVICE', help='as torch names it (the accelerator, or cpu)')
    parser.add_argument('--batch-size', type=int, default=1, metavar='N', help='images at once (%(default)s)')
    parser.add_argument('--score-thr', type=float, default=0.3, metavar='X',
                        help='lowest score of an object, from 0 to 1 (%(default)s)')
    args = parser.parse_args()
    if args.batch_size < 1:
        parser.error(f'--batch-size must be at least 1, got {args.batch_size}')
    if not 0 <= args.score_thr <= 1:
        parser.error(f'--score-thr must be from 0 to 1, got {args.score_thr}')
    return parser, args


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        cfg = runs.read_config(args.config, args.cfg_options)
        try:
            results, unreadable = infer(cfg, args.checkpoint, args.images, args.out_dir, device=args.device,
                                        batch_size=args.batch_size, score_thr=args.score_thr)
        except OSError as error:
            raise runs.RunError(f'cannot write: {error}') from error
    print(f'{args.out_dir}: results of {len(results)} image(s)')
    if unreadable:
        reasons = ''.join(f'  {file}: {reason}\n' for file, reason in unreadable.items())
        print(f'{len(unreadable)} image(s) could not be read:\n{reasons}', end='', file=sys.stderr)
        sys.exit(1)


if __name__ == '__main__':
    main()
