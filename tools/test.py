"""Tests a checkpoint of an MMDetection or MMSegmentation config.

Exit status: 2, with a message, if the run cannot start (a file is missing, a name is unknown).
"""
import argparse

from mminline import runs


def parse_args():
    # CONFIG comes with the common arguments, before CHECKPOINT.
    parser = argparse.ArgumentParser(
        description='Test a detector or segmentor.', parents=[runs.common_arguments()])
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='checkpoint file')
    parser.add_argument('--out', metavar='PATH',
                        help='write all predictions: detections to a .pkl file, label maps to a folder')
    parser.add_argument('--show', action='store_true', help='show each prediction in a window')
    parser.add_argument('--show-dir', metavar='DIR',
                        help='write painted predictions (detection: DIR is below the work dir and a timestamp)')
    parser.add_argument('--wait-time', type=float, default=2, metavar='S',
                        help='seconds that a window stays (%(default)s)')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation (detection: boxes only)')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        runs.test(
            runs.load_config(args), args.checkpoint, out=args.out, show=args.show, show_dir=args.show_dir,
            wait_time=args.wait_time, tta=args.tta)


if __name__ == '__main__':
    main()
