"""Exports a trained model as an ONNX file, and compares it in ONNX Runtime with PyTorch.

The file takes normalised images, (batch, channels, height, width), and gives the logits of a segmentor, the maps and
raw dense predictions of a detector, or the maps of the backbone alone (docs/export.md).

Exit status: 2, with a message, if there is no such file, or the two do not agree.
"""
import argparse

from mminline import runs
from mminline.export import PARTS, export_onnx


def parse_args():
    parser = argparse.ArgumentParser(
        description='Export a trained model as an ONNX file.', parents=[runs.config_arguments()])
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='checkpoint file of the run, or a published one')
    parser.add_argument('out', metavar='OUT', help='the .onnx file to write')
    parser.add_argument('--part', choices=PARTS, default=PARTS[0], help='what to export (%(default)s)')
    parser.add_argument('--shape', type=int, nargs=2, metavar=('H', 'W'),
                        help='height and width of all images in pixels (any; the batch is of any size in both cases)')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        cfg = runs.read_config(args.config, args.cfg_options)
        try:
            report = export_onnx(cfg, args.checkpoint, args.out, args.part, args.shape)
        except (ValueError, OSError) as error:
            raise runs.RunError(f'cannot export: {error}') from error
    print(report)


if __name__ == '__main__':
    main()
