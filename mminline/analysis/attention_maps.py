"""Which tokens a query attends to: the exact weights of chosen queries, at any resolution.

What an attention layer returns, before its projection, is linear in the values: ``out_i = sum over j of weight_ij
v_j``. The weights of one query are one row of that N x N matrix, and only the asked rows are computed. They have up to
two parts: the global one, one weight per head and key, and the local one, a 3x3 kernel for each channel (InLine's local
term, CSwin's ``get_v``).

A hook on the layer records its inputs and its output during a forward of the whole backbone; the rows times the values
have to give that output again, or no map is drawn (:func:`explain`).
"""
import argparse
import inspect
import pickle
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import TRANSFORMS, DefaultScope
from torch import Tensor, nn

from mminline.build import build_part
from mminline.models import InLineDeiT
from mminline.models.layers import (
    Block,
    CSwinBlock,
    InLineAttention,
    InLineBranch,
    LinearAttention,
    LinearBranch,
    SoftmaxAttention,
    StripeBranch,
    WindowAttention,
)
from mminline.models.layers.attention import split_heads
from mminline.models.layers.windows import pad_map, to_windows, window_mask
from mminline.models.pretrained import load_pretrained
from mminline.ops.reference import inline_attention_weights
from mminline.preflight import RunError
from mminline.runs import config_arguments, innermost_dataset

from .measure import relative_error

# Rows times values are another output than the layer's, not an imprecise one, beyond this relative error.
TOLERANCE = 1e-3
ZOOM = 4  # tokens on each side of the query that the picture of the local part shows
NEIGHBOURS = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]  # as a 3x3 kernel is laid out


class Rows(NamedTuple):
    """The weights of Q queries of one image in one attention layer, and the values that they weight."""
    global_weights: Tensor  # (num_heads, Q, K)
    local_weights: Optional[Tensor]  # (C, Q, 9), zero for neighbours outside of the map (or stripe)
    neighbours: Optional[Tensor]  # (Q, 9), the keys that they belong to
    values: Tensor  # (K, C)
    constant: Optional[Tensor]  # (C,), added to every output: the bias of get_v
    key_shape: Tuple[int, int]  # map of the last H*W keys
    key_patch: int = 1  # a key stands for key_patch x key_patch tokens

    def output(self) -> Tensor:
        """Return weights times values, (Q, C)."""
        values = self.values.unflatten(1, (self.global_weights.shape[0], -1)).transpose(0, 1)  # (heads, K, d)
        out = (self.global_weights @ values).transpose(0, 1).flatten(1)
        if self.local_weights is not None:
            out = out + torch.einsum('cqn,qnc->qc', self.local_weights, self.values[self.neighbours])
        return out if self.constant is None else out + self.constant


class Call(NamedTuple):
    """An attention layer, and what a forward of it took and gave."""
    layer: nn.Module
    arguments: dict
    output: Tensor


# ---- weights of single heads --------------------------------------------------------------------------
# Inline attention's are those of the reference, :func:`mminline.ops.reference.inline_attention_weights`.
def linear_attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the weights of plain linear attention with elu + 1 features, (..., Q, K); they sum to 1.

    Args:
        q: Queries, (..., Q, head_dim).
        k: Keys, (..., K, head_dim).
    """
    scores = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-2, -1)
    return scores / scores.sum(dim=-1, keepdim=True)


def softmax_attention_weights(q: Tensor, k: Tensor, bias: Union[Tensor, float] = 0.) -> Tensor:
    """Return the weights of softmax attention, (..., Q, K).

    Args:
        q, k: As of :func:`linear_attention_weights`.
        bias: Added to the scaled scores; -inf where a query must not attend.
    """
    return (q.shape[-1] ** -0.5 * q @ k.transpose(-2, -1) + bias).softmax(dim=-1)


# ---- rows of a layer ----------------------------------------------------------------------------------
def attention_rows(call: Call, queries: Tensor) -> Rows:
    """Return the weights of chosen queries.

    Args:
        call: A layer's forward; of a batch, the first image counts.
        queries: Tokens of the map, row by row from 0, (Q,). A class token is none of them.

    Raises:
        NotImplementedError: If it is no attention layer of this project.
    """
    rows = ROWS.get(type(call.layer))
    if rows is None:
        raise NotImplementedError(f'the weights of {type(call.layer).__name__} are not known, only those of '
                                  f'{", ".join(layer.__name__ for layer in ROWS)}')
    return rows(call.layer, call.arguments, queries)


def project(layer: nn.Module, arguments: dict) -> Tuple[Tensor, Tensor, Tensor]:
    """Return a layer's queries (1, N, C), keys and values (1, K, C) of the first image, without windows."""
    if 'q' in arguments:  # a branch of CSwin gets them
        return tuple(arguments[name][:1] for name in 'qkv')
    x = arguments['x'][:1]
    if getattr(layer, 'sr_ratio', 1) > 1:
        return (layer.q(x), *layer.kv(layer.reduce(x, arguments['hw_shape'])).chunk(2, dim=-1))
    return layer.project(x)


def _layer_rows(layer: nn.Module, arguments: dict, queries: Tensor) -> Rows:
    """Rows of inline, linear and softmax layers of the whole map."""
    x, hw_shape = arguments['x'][:1], arguments['hw_shape']
    q, k, v = project(layer, arguments)
    sr_ratio = getattr(layer, 'sr_ratio', 1)
    if sr_ratio > 1:
        hw_shape = tuple(max(1, size // sr_ratio) for size in hw_shape)
    q, k = (split_heads(part, layer.num_heads)[0] for part in (q, k))
    kernels = layer.residual(x.mean(dim=1))[0] if getattr(layer, 'residual', None) is not None else None
    queries = queries + layer.num_prefix_tokens
    return Rows(_global_weights(layer, q[:, queries], k),
                *_local_weights(kernels, queries, hw_shape, layer.num_prefix_tokens),
                values=v[0], constant=None, key_shape=hw_shape, key_patch=sr_ratio)


def _branch_rows(layer: nn.Module, arguments: dict, queries: Tensor) -> Rows:
    """Rows of CSwin's inline and linear branches."""
    q, k, v = project(layer, arguments)
    q, k = (split_heads(part, layer.num_heads)[0] for part in (q, k))
    hw_shape = arguments['hw_shape']
    kernels = layer.get_v.weight[:, 0]
    if getattr(layer, 'residual', None) is not None:
        kernels = kernels + layer.residual(arguments['mean_token'][:1])[0]
    return Rows(_global_weights(layer, q[:, queries], k), *_local_weights(kernels, queries, hw_shape),
                values=v[0], constant=layer.get_v.bias, key_shape=hw_shape)


def _global_weights(layer: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    if isinstance(layer, (InLineAttention, InLineBranch)):
        return inline_attention_weights(q, k, q.shape[-1] ** -0.5, layer.center)
    if isinstance(layer, (LinearAttention, LinearBranch)):
        return linear_attention_weights(q, k)
    return softmax_attention_weights(q, k)


def _window_rows(layer: WindowAttention, arguments: dict, queries: Tensor) -> Rows:
    hw_shape = arguments['hw_shape']
    q, k, v = (part[0] for part in project(layer, arguments))
    window = (layer.window_size, layer.window_size)
    shift = layer.window_size // 2 if layer.shifted and min(hw_shape) > layer.window_size else 0
    weights = _softmax_in_windows(q, k, layer.num_heads, queries, hw_shape, window, shift, layer.bias()[0])
    return Rows(weights, None, None, values=v, constant=None, key_shape=hw_shape)


def _stripe_rows(layer: StripeBranch, arguments: dict, queries: Tensor) -> Rows:
    height, width = stripe = hw_shape = arguments['hw_shape']
    if layer.split_size is not None:
        stripe = (height, layer.split_size) if layer.vertical else (layer.split_size, width)
    q, k, v = (part[0] for part in project(layer, arguments))
    weights = _softmax_in_windows(q, k, layer.num_heads, queries, hw_shape, stripe)
    local_weights, neighbours = _local_weights(layer.get_v.weight[:, 0], queries, hw_shape)
    same_stripe = _window_index(neighbours, hw_shape, stripe) == _window_index(queries, hw_shape, stripe)[:, None]
    return Rows(weights, local_weights * same_stripe, neighbours, values=v, constant=layer.get_v.bias,
                key_shape=hw_shape)


def _softmax_in_windows(q: Tensor, k: Tensor, num_heads: int, queries: Tensor, hw_shape: Tuple[int, int],
                        window: Tuple[int, int], shift: int = 0, bias: Optional[Tensor] = None) -> Tensor:
    """Return weights (num_heads, Q, N) that are zero outside of each query's window.

    Args:
        q, k: (N, C), of the map without padding.
        bias: Of the pairs of a window's tokens, (num_heads, L, L).
        Other arguments as of :func:`mminline.models.layers.windows.window_mask`.
    """
    num_tokens = hw_shape[0] * hw_shape[1]
    numbers = torch.arange(1, num_tokens + 1, device=q.device).reshape(1, *hw_shape, 1)  # 0 will be padding
    numbers = to_windows(pad_map(numbers, window).roll((-shift, -shift), dims=(1, 2)), window).squeeze(-1) - 1
    mask = window_mask(hw_shape, window, shift, q.device)
    weights = q.new_zeros(num_heads, len(queries), num_tokens)
    for index, query in enumerate(queries):
        [(number, place)] = (numbers == query).nonzero().tolist()
        # Without padding, nothing of another region is in a window that is not shifted.
        attended = slice(None) if mask is None else mask[number, 0, place]
        keys = numbers[number][attended]
        row = softmax_attention_weights(
            split_heads(q[None, query, None], num_heads)[0], split_heads(k[None, keys], num_heads)[0],
            0. if bias is None else bias[:, place, attended].unsqueeze(1))
        weights[:, index, keys] = row.squeeze(1)
    return weights


def _window_index(tokens: Tensor, hw_shape: Tuple[int, int], window: Tuple[int, int]) -> Tensor:
    """Return a number of the window that each token is in."""
    rows, columns = tokens // hw_shape[1], tokens % hw_shape[1]
    return rows // window[0] * hw_shape[1] + columns // window[1]


def _local_weights(kernels: Optional[Tensor], queries: Tensor, hw_shape: Tuple[int, int], num_prefix_tokens: int = 0
                   ) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """Return the weights of 3x3 neighbours, (C, Q, 9), and their tokens, (Q, 9), for kernels (C, 3, 3)."""
    if kernels is None:
        return None, None
    height, width = hw_shape
    offsets = torch.tensor(NEIGHBOURS, device=queries.device)
    rows = (queries[:, None] - num_prefix_tokens) // width + offsets[:, 0]
    columns = (queries[:, None] - num_prefix_tokens) % width + offsets[:, 1]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    tokens = rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1) + num_prefix_tokens
    return kernels.flatten(1).unsqueeze(1) * inside, tokens


ROWS: Dict[type, Callable[[nn.Module, dict, Tensor], Rows]] = {
    InLineAttention: _layer_rows,
    LinearAttention: _layer_rows,
    SoftmaxAttention: _layer_rows,
    WindowAttention: _window_rows,
    InLineBranch: _branch_rows,
    LinearBranch: _branch_rows,
    StripeBranch: _stripe_rows,
}


# ---- a block of a backbone ----------------------------------------------------------------------------
def find_block(backbone: nn.Module, stage: int, block: int) -> Block:
    """Return a block of a backbone of this project, both numbers from 0 (DeiT has stage 0 only).

    Raises:
        ValueError: If there is no such stage or block.
    """
    stages: Dict[str, List[Block]] = {}
    for name, module in backbone.named_modules():
        if isinstance(module, Block):
            stages.setdefault(name.rpartition('.')[0], []).append(module)
    blocks = list(stages.values())
    if not 0 <= stage < len(blocks):
        raise ValueError(f'stage must be in 0 ... {len(blocks) - 1}, got {stage}')
    if not 0 <= block < len(blocks[stage]):
        raise ValueError(f'block must be in 0 ... {len(blocks[stage]) - 1} in stage {stage}, got {block}')
    return blocks[stage][block]


def record_calls(backbone: nn.Module, image: Tensor, stage: int, block: int) -> List[Call]:
    """Run a backbone and return what the attention of one block took and gave: one call, of CSwin one per branch.

    Args:
        backbone: A backbone of this project.
        image: As its forward takes it, (1, C, height, width).
        stage, block: As of :func:`find_block`.
    """
    calls = []

    def note(layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        calls.append(Call(layer, inspect.signature(layer.forward).bind(*args, **kwargs).arguments, output))

    target = find_block(backbone, stage, block)
    layers = target.attns if isinstance(target, CSwinBlock) else [target.attn]
    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            backbone(image)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@torch.no_grad()
def explain(calls: Sequence[Call], queries: Tensor) -> Tuple[List[Rows], float]:
    """Return the rows of chosen queries, one for each call, and how well they give the layers' outputs.

    Args:
        calls: From :func:`record_calls`.
        queries: As of :func:`attention_rows`.

    Returns:
        The rows, and the relative error of weights times values against the layers' outputs, the largest of all calls.

    Raises:
        ArithmeticError: If they give another output.
    """
    all_rows, errors = [], []
    for call in calls:
        rows = attention_rows(call, queries)
        output = rows.output()
        if hasattr(call.layer, 'proj'):
            output = call.layer.proj(output)
        num_prefix_tokens = getattr(call.layer, 'num_prefix_tokens', 0)
        errors.append(relative_error(output, call.output[0, queries + num_prefix_tokens]))
        all_rows.append(rows)
    if not max(errors) <= TOLERANCE:
        raise ArithmeticError(f'weights times values differ from the output of {type(calls[0].layer).__name__} by '
                              f'{max(errors):.2g}: these are not its weights')
    return all_rows, max(errors)


# ---- maps ---------------------------------------------------------------------------------------------
def weight_maps(all_rows: Sequence[Rows], head: Optional[int] = None) -> Dict[str, np.ndarray]:
    """Return the weights as maps (Q, H, W) of the keys, by part.

    Args:
        all_rows: Of the branches of one block.
        head: A head, counted over all branches; None for the mean of all. (A kernel of the local part belongs to a
            channel: its map is the mean over the channels of the head.)

    Returns:
        'global', 'local' and 'sum' where there is a local part, else 'weights'.

    Raises:
        ValueError: If there is no such head.
    """
    num_heads = sum(len(rows.global_weights) for rows in all_rows)
    if head is not None and not 0 <= head < num_heads:
        raise ValueError(f'head must be in 0 ... {num_heads - 1}, got {head}')
    chosen = slice(None) if head is None else [head]
    shape = all_rows[0].key_shape

    def to_maps(per_head: Tensor) -> np.ndarray:
        last = per_head[chosen].mean(dim=0)[:, -shape[0] * shape[1]:]  # without a class token
        return last.unflatten(1, shape).cpu().numpy()

    weights = to_maps(torch.cat([rows.global_weights for rows in all_rows]))
    if all_rows[0].local_weights is None:
        return dict(weights=weights)
    local = []
    for rows in all_rows:
        of_heads = rows.local_weights.unflatten(0, (len(rows.global_weights), -1)).mean(dim=1)  # (heads, Q, 9)
        neighbours = rows.neighbours.expand(len(of_heads), -1, -1)
        local.append(torch.zeros_like(rows.global_weights).scatter_add_(2, neighbours, of_heads))
    local = to_maps(torch.cat(local))
    return {'global': weights, 'local': local, 'sum': weights + local}


class Sight(NamedTuple):
    """An image as a person has it, and how it becomes the map of a block."""
    image: np.ndarray  # (height, width, 3), RGB uint8, as in the file
    scale: Tuple[float, float]  # (x, y): pixels of the backbone's input for one of the image
    stride: int  # pixels of the input for one token
    hw_shape: Tuple[int, int]  # the map, in tokens

    def token_at(self, x: int, y: int) -> int:
        """Return the token of a pixel of the image.

        Raises:
            ValueError: If the pixel is outside of the image.
        """
        height, width = self.image.shape[:2]
        if not (0 <= x < width and 0 <= y < height):
            raise ValueError(f'a query must be inside the image of {width}x{height} pixels, got {x},{y}')
        # The middle of the pixel, in tokens.
        column, row = (int((position + 0.5) * scale / self.stride) for position, scale in zip((x, y), self.scale))
        return min(row, self.hw_shape[0] - 1) * self.hw_shape[1] + min(column, self.hw_shape[1] - 1)

    def extent(self, map_shape: Tuple[int, int], key_patch: int = 1) -> Tuple[float, float, float, float]:
        """Return left, right, bottom and top of a map of keys in pixels of the image, as matplotlib takes them."""
        right, bottom = (tokens * key_patch * self.stride / scale
                         for tokens, scale in zip(map_shape[::-1], self.scale))
        return 0, right, bottom, 0


# ---- the command line that these analyses share -------------------------------------------------------
def block_arguments() -> argparse.ArgumentParser:
    """A parent parser with a config, its weights, an image, and a block of the backbone."""
    parser = argparse.ArgumentParser(add_help=False, parents=[config_arguments()])
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='checkpoint of a run, or a file of the authors')
    parser.add_argument('image', metavar='IMAGE', type=Path, help='image file')
    parser.add_argument('--stage', type=int, default=0, metavar='S', help='stage of the backbone, from 0 (%(default)s)')
    parser.add_argument('--block', type=int, default=0, metavar='B', help='block of the stage, from 0 (%(default)s)')
    parser.add_argument('--device', type=torch.device, default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='cpu or cuda (%(default)s)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/attention'), metavar='DIR',
                        help='folder for what is written (%(default)s)')
    return parser


# ---- an image -----------------------------------------------------------------------------------------
def load_backbone(cfg: Config, checkpoint: str, device: torch.device) -> Tuple[nn.Module, nn.Module]:
    """Build the backbone of a config and its data preprocessor, and load weights into the backbone.

    Args:
        cfg: A config of MMDetection or MMSegmentation.
        checkpoint: Any file that :func:`mminline.models.pretrained.load_pretrained` reads.
        device: Where both go.

    Raises:
        RunError: If the config names something unknown, or the weights cannot be read or do not fit.
    """
    backbone = build_part(cfg, {**cfg.model.backbone, 'init_cfg': None})
    preprocessor = build_part(cfg, cfg.model.data_preprocessor)
    try:
        load_pretrained(backbone, checkpoint)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise RunError(str(error)) from error
    return backbone.to(device).eval(), preprocessor.to(device)


def load_image(cfg: Config, preprocessor: nn.Module, path: Union[str, Path]) -> Tuple[Tensor, np.ndarray, tuple]:
    """Read an image as the config's test pipeline and preprocessor do, whole (also where a test slides over it).

    Returns:
        The backbone's input (1, C, height, width), the image as in the file (RGB uint8), and the (x, y) scale between
        them.

    Raises:
        RunError: If the file is no image.
    """
    loading, *steps = (step for step in innermost_dataset(cfg).pipeline if 'LoadAnnotations' not in str(step['type']))
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        try:
            loaded = TRANSFORMS.build(loading)(dict(img_path=str(path), img_id=0))
            original = np.ascontiguousarray(loaded['img'][..., ::-1])
        except Exception as error:  # decoders meet a damaged file with many kinds of exception
            raise RunError(f'{path} cannot be read as an image: {error}') from error
        data = Compose(steps)(loaded)
    meta = data['data_samples'].metainfo
    scale = meta.get('scale_factor')
    if scale is None:  # a pipeline that does not resize
        scale = [size / original for size, original in zip(meta['img_shape'][::-1], meta['ori_shape'][::-1])]
    batch = preprocessor(dict(inputs=[data['inputs']], data_samples=[data['data_samples']]), False)
    return batch['inputs'], original, tuple(map(float, scale))


def see(backbone: nn.Module, image: Tensor, original: np.ndarray, scale: Tuple[float, float], stage: int, block: int
        ) -> Tuple[List[Call], Sight]:
    """Run a backbone on an image of :func:`load_image` and record one block's attention."""
    calls = record_calls(backbone, image, stage, block)
    stride = 16 if isinstance(backbone, InLineDeiT) else 4 * 2 ** stage
    return calls, Sight(original, scale, stride, tuple(calls[0].arguments['hw_shape']))


# ---- for the reader -----------------------------------------------------------------------------------
def draw_maps(maps: Dict[str, np.ndarray], sight: Sight, pixels: Sequence[Tuple[int, int]], key_patch: int, title: str,
              out_file: Path) -> None:
    """Draw maps over the image, a line of pictures for each query.

    Args:
        maps: From :func:`weight_maps`.
        sight: The image.
        pixels: The queries (x, y), as many as maps.
        key_patch: Of the rows.
        title: Text above the picture.
        out_file: The picture to write.
    """
    from matplotlib.figure import Figure

    height, width = sight.image.shape[:2]
    panel = 3.6
    panel_height = min(1.6, max(0.5, height / width)) * panel
    figure = Figure(figsize=((panel + 1.1) * len(maps) + panel, (panel_height + 0.5) * len(pixels) + 0.6),
                    layout='constrained')
    figure.suptitle(f'{title}\nweights of the values: red adds, blue subtracts')
    grid = figure.subplots(len(pixels), len(maps) + 1, squeeze=False)
    grey = sight.image.mean(axis=-1)
    for index, (line, (x, y)) in enumerate(zip(grid, pixels)):
        line[0].imshow(sight.image, extent=(0, width, height, 0))
        line[0].set_title(f'query at {x},{y}')
        for axes, (part, values) in zip(line[1:], maps.items()):
            shown = values[index]
            # The local part is some hundred times the global one: in the sum, the colours are those of the global one.
            limit = abs(maps['global'][index] if part == 'sum' else shown).max() or 1.
            axes.imshow(grey, cmap='gray', extent=(0, width, height, 0))
            drawn = axes.imshow(shown, cmap='RdBu_r', vmin=-limit, vmax=limit, alpha=0.65, interpolation='nearest',
                                extent=sight.extent(shown.shape, key_patch))
            bar = figure.colorbar(drawn, ax=axes, shrink=0.8, label='weight',
                                  extend='both' if part == 'sum' else 'neither')
            bar.formatter.set_powerlimits((-2, 3))
            axes.set_title(PART_TITLES[part])
        for axes, part in zip(line, ['image', *maps]):
            if part == 'local':
                reach_x, reach_y = ((ZOOM + 0.5) * sight.stride / scale for scale in sight.scale)
                axes.set(xlim=(x - reach_x, x + reach_x), ylim=(y + reach_y, y - reach_y))
            else:
                axes.set(xlim=(0, width), ylim=(height, 0))
            axes.set(xticks=[], yticks=[])
            for size, colour in ((13, 'black'), (10, 'gold')):
                axes.plot(x + 0.5, y + 0.5, marker='+', markersize=size, markeredgewidth=size / 4, color=colour)
    figure.savefig(out_file, dpi=110)


PART_TITLES = {
    'global': 'global part',
    'local': f'local part (within {ZOOM} tokens of the query)',
    'sum': 'sum, in the colours of the global part',
    'weights': 'weights',
}
