"""Strips a run's checkpoint to what others need: the weights and the config for inference.

The new file is named after the config and its own SHA-256, CONFIG-1a2b3c4d.pth, and holds nothing but tensors and
plain data (it can be read with weights_only=True).

Exit status: 2, with a message, if the checkpoint cannot be read or does not belong to the config.
"""
import argparse
from pathlib import Path

from mminline import runs
from mminline.publish import publish_checkpoint


def parse_args():
    parser = argparse.ArgumentParser(
        description="Strip a run's checkpoint to weights and config for inference.", parents=[runs.config_arguments()])
    parser.add_argument('checkpoint', metavar='CHECKPOINT', type=Path, help='checkpoint file of the run')
    parser.add_argument('--out-dir', metavar='DIR', type=Path, help="folder for the new file (the checkpoint's)")
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        cfg = runs.read_config(args.config, args.cfg_options)
        try:
            path = publish_checkpoint(cfg, args.checkpoint, args.out_dir or args.checkpoint.parent)
        except OSError as error:
            raise runs.RunError(f'cannot write: {error}') from error
        print(f'{path}: {path.stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    main()
