"""Shows whether different queries get different weights, and counts those of an image that do not.

With the queries and keys of one block on an image, under plain linear, softmax and inline attention. Two queries of a
head collide if their weights are the same to --tolerance while the queries differ by more than 10 %. Writes
injectivity.png and collisions.csv.

Exit status: 2, with a message, for arguments that cannot be analysed.
"""
import argparse

from mminline import runs
from mminline.analysis import attention_maps, injectivity
from mminline.analysis.measure import write_csv


def parse_args():
    parser = argparse.ArgumentParser(description='Show whether different queries get different weights.',
                                     parents=[attention_maps.block_arguments()])
    parser.add_argument('--tolerance', type=float, default=0.01, metavar='T',
                        help='relative distance of weights that count as the same (%(default)s)')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    if not 0 < args.tolerance < 1:
        parser.error(f'--tolerance must be between 0 and 1, got {args.tolerance}')
    with runs.exit_on_run_error(parser):
        cfg = runs.read_config(args.config, args.cfg_options)
        backbone, preprocessor = attention_maps.load_backbone(cfg, args.checkpoint, args.device)
        loaded = attention_maps.load_image(cfg, preprocessor, args.image)
        try:
            calls, _ = attention_maps.see(backbone, *loaded, args.stage, args.block)
        except ValueError as problem:
            raise runs.RunError(f'{args.config}: {problem}') from problem
    counts = injectivity.count_in_calls(calls, args.tolerance)
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(counts, args.out / 'collisions.csv')
    injectivity.draw(counts, f'{args.image.name} in {type(backbone).__name__}, stage {args.stage}, block {args.block}',
                     args.out / 'injectivity.png')
    for count in counts:
        print(f'{count.attention}: {count.colliding} of {count.queries} queries collide ({count.share:.1%})')
    print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
