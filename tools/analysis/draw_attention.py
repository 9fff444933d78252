"""Draws what chosen pixels of an image attend to in one block of a backbone.

The weights are exact: before anything is written, weights times values are held against the output of the layer.
Negative weights, which inline attention has, are blue, positive ones red. Writes NAME_stageS_blockB.png and, for each
part (global, local, sum; or weights), NAME_stageS_blockB_PART.npy, one map of the keys for each query, (Q, H, W).

Exit status: 2, with a message, for arguments that cannot be drawn.
"""
import argparse

import numpy as np
import torch

from mminline import runs
from mminline.analysis import attention_maps


def parse_pixel(text):
    parts = text.split(',')
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f'expected X,Y in pixels, got {text!r}')
    return int(parts[0]), int(parts[1])


def parse_args():
    parser = argparse.ArgumentParser(description='Draw what chosen pixels attend to in one block of a backbone.',
                                     parents=[attention_maps.block_arguments()])
    parser.add_argument('--query', type=parse_pixel, nargs='+', required=True, metavar='X,Y',
                        help='pixels of the image as it is in the file, from its upper left corner')
    parser.add_argument('--head', type=int, metavar='H', help='one head, from 0 (the mean of all heads)')
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    with runs.exit_on_run_error(parser):
        cfg = runs.read_config(args.config, args.cfg_options)
        backbone, preprocessor = attention_maps.load_backbone(cfg, args.checkpoint, args.device)
        loaded = attention_maps.load_image(cfg, preprocessor, args.image)
        try:
            calls, sight = attention_maps.see(backbone, *loaded, args.stage, args.block)
            queries = torch.tensor([sight.token_at(*pixel) for pixel in args.query], device=args.device)
            rows, error = attention_maps.explain(calls, queries)
            maps = attention_maps.weight_maps(rows, args.head)
        except (ValueError, NotImplementedError) as problem:
            raise runs.RunError(f'{args.config}: {problem}') from problem
    args.out.mkdir(parents=True, exist_ok=True)
    name = f'{args.image.stem}_stage{args.stage}_block{args.block}'
    for part, values in maps.items():
        np.save(args.out / f'{name}_{part}.npy', values)
    heads = 'mean of all heads' if args.head is None else f'head {args.head}'
    layer = type(calls[0].layer).__name__
    attention_maps.draw_maps(
        maps, sight, args.query, rows[0].key_patch,
        f'{type(backbone).__name__}, stage {args.stage}, block {args.block}: {layer}, {heads}',
        args.out / f'{name}.png')
    print(f'{layer}, a map of {sight.hw_shape[0]}x{sight.hw_shape[1]} tokens: weights times values give its output to '
          f'{error:.1g} (relative)')
    print(f'Written to {args.out}')


if __name__ == '__main__':
    main()
