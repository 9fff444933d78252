"""Trains a model from an MMDetection or MMSegmentation config.

Exit status: 2, with a message, if the run cannot start (a file is missing, a name is unknown).
"""
import argparse

from mminline import runs


def parse_args():
    parser = argparse.ArgumentParser(
        description='Train a detector or segmentor.', parents=[runs.common_arguments()])
    parser.add_argument('--resume', nargs='?', const='auto', metavar='CHECKPOINT',
                        help="go on from a checkpoint (the work dir's latest, if there is one)")
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true',
                        help="scale the learning rate by batch size / config's auto_scale_lr.base_batch_size")
    parser.add_argument('--from-scratch', action='store_true', help='load no pretrained weights')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        runs.train(
            runs.load_config(args), resume=args.resume, amp=args.amp, auto_scale_lr=args.auto_scale_lr,
            from_scratch=args.from_scratch)


if __name__ == '__main__':
    main()
