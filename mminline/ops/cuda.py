"""The CUDA path of InLine attention: launches the kernels of ``triton.py``.

Forward: k and v are read once for their means and covariance, q and v once for the output. Backward: q and
the output's gradient are read once, then k, v and that gradient once. Nothing as large as the tokens is kept.
"""
from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import triton as kernels


class LaunchConfig(NamedTuple):
    """How the kernels cut the work."""
    block_tokens: int  # a tile of the statistics pass
    block_height: int  # a tile of the map, in the other passes
    block_width: int
    num_warps: int


# By head_dim rounded up to a power of two, and bytes per element: tiles of 4 KB, where these spill no registers
# on compute capability 8.0, 9.0 and 10.0.
LAUNCH_CONFIGS = {
    (16, 2): LaunchConfig(64, 8, 8, 4),
    (32, 2): LaunchConfig(64, 8, 8, 4),
    (64, 2): LaunchConfig(64, 4, 8, 8),
    (16, 4): LaunchConfig(64, 8, 8, 4),
    (32, 4): LaunchConfig(32, 4, 8, 4),
    (64, 4): LaunchConfig(32, 4, 8, 8),
}

# Dots of 16-bit inputs, once these are centred in float32: each factor as two bfloat16, which is exact to 16 bits.
PRECISION_16_BIT = 'bf16x3'

# Tokens are split until the statistics pass fills a GPU, but not finer than partial sums are worth. Constants,
# not asked of the device: equal inputs give equal bits on one GPU as on another.
MAX_PROGRAMS = 1024
MIN_SPLIT_TOKENS = 512
MERGED_ROWS = 8
MERGED_SPLITS = 16


def forward(q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], num_heads: int, scale: float,
            hw_shape: Optional[Sequence[int]], num_prefix_tokens: int, center: bool,
            valid_hw: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out (B, N, C), Cov(k, v) (B, num_heads, head_dim, head_dim), mean(k) and mean(v) (B, C).

    With ``center=False`` the means are zeros, and the covariance is the plain second moment.
    """
    q, k, v = (_with_unit_channel_stride(x) for x in (q, k, v))
    with torch.cuda.device_of(q):
        valid = _valid_on_device(valid_hw, q.device)
        mean_k, mean_v, covariance = _moments(k, v, num_heads, 1.0, center, hw_shape, num_prefix_tokens, valid)
        if not center:
            mean_k.zero_()
            mean_v.zero_()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        num_tiles, tile_arguments, options = _tiles(q, num_heads, local_weight, hw_shape, num_prefix_tokens, valid)
        kernels.apply_kernel[(q.shape[0] * num_heads * num_tiles,)](
            q, v, valid, _taps_first(local_weight), covariance, mean_v, out, scale, *q.stride()[:2], *v.stride()[:2],
            *tile_arguments, **options)
    return out, covariance, mean_k, mean_v


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], covariance: Tensor,
             mean_k: Tensor, mean_v: Tensor, num_heads: int, scale: float, hw_shape: Optional[Sequence[int]],
             num_prefix_tokens: int, center: bool, valid_hw: Optional[Sequence[int]] = None) -> List[Tensor]:
    """Return the gradients of q, k, v and, if there is one, local_weight."""
    grad, q, k, v = (_with_unit_channel_stride(x) for x in (grad, q, k, v))
    batch, _, channels = q.shape
    with torch.cuda.device_of(q):
        valid = _valid_on_device(valid_hw, q.device)
        _, mean_grad, grad_covariance = _moments(
            q, grad, num_heads, scale, False, hw_shape, num_prefix_tokens, valid)
        if not center:
            mean_grad.zero_()
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        num_tiles, tile_arguments, options = _tiles(q, num_heads, local_weight, hw_shape, num_prefix_tokens, valid)
        grad_taps = None
        if local_weight is not None:
            grad_taps = q.new_empty(batch, num_tiles, 9, channels, dtype=torch.float32)
        kernels.gradient_kernel[(batch * num_heads * num_tiles,)](
            grad, k, v, valid, _taps_first(local_weight), covariance, mean_k, mean_v, grad_covariance, mean_grad,
            *grads, grad_taps, scale, *grad.stride()[:2], *k.stride()[:2], *v.stride()[:2], *tile_arguments,
            **options)
        if local_weight is not None:
            grad_weight = grad_taps.sum(1).to(local_weight.dtype)
            grads.append(grad_weight.transpose(1, 2).contiguous().view(local_weight.shape))
    return grads


def _valid_on_device(valid_hw: Optional[Sequence[int]], device: torch.device) -> Optional[Tensor]:
    """Return the valid (rows, columns) of each image as a flat tensor; the host does not wait for the copy."""
    if valid_hw is None:
        return None
    valid = torch.tensor(valid_hw, dtype=torch.int32)
    return valid.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else valid


def _moments(x: Tensor, y: Tensor, num_heads: int, factor: float, center: bool, hw_shape: Optional[Sequence[int]],
             num_prefix_tokens: int, valid: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """Return mean(x) and mean(y) (B, C), and factor * mean over tokens of x^T y (B, num_heads, head_dim, head_dim).

    ``center`` subtracts the means from x and y first.
    """
    batch, num_tokens, channels = x.shape
    head_dim = channels // num_heads
    pairs = batch * num_heads
    options, config = _options(x, num_heads)
    splits = max(1, min(num_tokens // MIN_SPLIT_TOKENS, MAX_PROGRAMS // max(1, pairs)))
    split_tokens = _ceil_div(num_tokens, splits * config.block_tokens) * config.block_tokens
    splits = _ceil_div(num_tokens, split_tokens)

    def empty(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    parts = (empty(pairs, splits), empty(pairs, splits, head_dim), empty(pairs, splits, head_dim),
             empty(pairs, splits, head_dim, head_dim))
    merged = empty(batch, channels), empty(batch, channels), empty(batch, num_heads, head_dim, head_dim)
    kernels.statistics_kernel[(pairs * splits,)](
        x, y, valid, *parts, *x.stride()[:2], *y.stride()[:2], num_heads, num_tokens, splits, split_tokens,
        1 if valid is None else hw_shape[1], num_prefix_tokens, BLOCK_N=config.block_tokens,
        HAS_VALID=valid is not None, **options)
    kernels.merge_kernel[(pairs * options['BLOCK_D'] // MERGED_ROWS,)](
        *parts, *merged, factor, splits, HEAD_DIM=head_dim, BLOCK_D=options['BLOCK_D'], BLOCK_ROWS=MERGED_ROWS,
        BLOCK_SPLITS=MERGED_SPLITS, CENTER=center, enable_fp_fusion=True)
    return merged


def _tiles(q: Tensor, num_heads: int, local_weight: Optional[Tensor], hw_shape: Optional[Sequence[int]],
           num_prefix_tokens: int, valid: Optional[Tensor]) -> Tuple[int, Tuple[int, ...], dict]:
    """Cut the tokens into tiles: their number, and the arguments that the tiled kernels share."""
    options, config = _options(q, num_heads)
    block_height, block_width = config.block_height, config.block_width
    num_tokens = q.shape[1]
    if local_weight is None and valid is None:  # without neighbours, the tokens are one row
        hw_shape, num_prefix_tokens = (1, num_tokens), 0
        block_height, block_width = 1, block_height * block_width
    height, width = hw_shape
    tiles_per_row = _ceil_div(width, block_width)
    num_tiles = _ceil_div(height, block_height) * tiles_per_row
    num_tiles += _ceil_div(num_prefix_tokens, block_height * block_width)
    options.update(BLOCK_H=block_height, BLOCK_W=block_width, HAS_LOCAL=local_weight is not None,
                   HAS_VALID=valid is not None)
    arguments = (num_heads, num_tokens, num_tiles, tiles_per_row, height, width, num_prefix_tokens)
    return num_tiles, arguments, options


def _options(x: Tensor, num_heads: int) -> Tuple[dict, LaunchConfig]:
    """Return the compile-time options that all kernels over tokens share, and their row of the table."""
    head_dim = x.shape[2] // num_heads
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    config = LAUNCH_CONFIGS[block_d, x.element_size()]
    if x.dtype == torch.float32:
        precision = 'tf32' if torch.backends.cuda.matmul.fp32_precision == 'tf32' else 'ieee'
    else:
        precision = PRECISION_16_BIT
    # Fusing a product and a sum into one rounding is Triton's default now, but not in its next version.
    return dict(HEAD_DIM=head_dim, BLOCK_D=block_d, PRECISION=precision, num_warps=config.num_warps,
                enable_fp_fusion=True), config


def _taps_first(local_weight: Optional[Tensor]) -> Optional[Tensor]:
    """Copy (B, C, 3, 3) to (B, 9, C): the channels of one tap are then one wide load."""
    return None if local_weight is None else local_weight.flatten(2).transpose(1, 2).contiguous()


def _with_unit_channel_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
