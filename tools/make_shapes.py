"""Makes the synthetic shapes data set (COCO and ADE20K layouts); mminline/datasets/shapes.py shows its tree.

Exit status: 0 if the data set is there (made now or before), 2 if it cannot be made.
"""
import argparse

from mminline.datasets import make_shapes


def parse_args():
    parser = argparse.ArgumentParser(description='Make the synthetic shapes data set.')
    parser.add_argument('out', nargs='?', default='data/shapes', help='folder to create (%(default)s)')
    parser.add_argument('--images', type=int, default=400, metavar='N',
                        help='training images; N/5 more are made for validation (%(default)s)')
    parser.add_argument('--seed', type=int, default=0, metavar='S', help='not negative (%(default)s)')
    parser.add_argument('--overwrite', action='store_true',
                        help='replace a shapes data set of another size or seed')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    try:
        made = make_shapes(args.out, args.images, args.seed, args.overwrite)
    except (ValueError, OSError) as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')
    state = 'made' if made else 'already there'
    print(f'{args.out}: {state}, with {args.images} training images and seed {args.seed}')


if __name__ == '__main__':
    main()
