"""Counts the multiply-adds and parameters of a config's model, part by part.

Detectors are counted by MMDetection's convention (1000 proposals, 100 mask RoIs), segmentors for one image at once.
"Growth" says how a part's multiply-adds grow from N to 2N tokens, when the image is twice as wide.

Exit status: 2, with a message, if the config cannot be read or counted.
"""
import argparse
import json

from rich.console import Console

from mminline import runs
from mminline.analysis.flops import analyse_config, complexity_dict, complexity_table


def parse_args():
    parser = argparse.ArgumentParser(
        description='Count the multiply-adds and parameters of a config.', parents=[runs.config_arguments()])
    parser.add_argument('--shape', type=int, nargs=2, metavar=('H', 'W'),
                        help='height and width of the image in pixels (detection 800 1280, segmentation its crop '
                        'or 512 512)')
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        cfg = runs.read_config(args.config, args.cfg_options)
        try:
            complexity = analyse_config(cfg, args.shape)
        except (ValueError, NotImplementedError) as error:
            raise runs.RunError(f'{args.config}: {error}') from error
    if args.json:
        print(json.dumps(dict(config=args.config, **complexity_dict(complexity)), indent=2))
    else:
        Console(soft_wrap=True).print(complexity_table(complexity))
        print(complexity)


if __name__ == '__main__':
    main()
