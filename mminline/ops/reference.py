"""InLine attention as the paper writes it: token by token, quadratic, plain PyTorch.

This is the definition the fast backends are tested against, in any dtype and on any device. It needs
O(N^2) memory: do not use it in a model.
"""
from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """View (B, N, C) as (B, num_heads, N, head_dim)."""
    # Not unflatten: see unflatten_tokens of the layers.
    return x.reshape(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def inline_attention_weights(q: Tensor, k: Tensor, scale: float, center: bool = True) -> Tensor:
    """Return the global attention weights of equation 5 of the paper, (..., N, N).

    Args:
        q, k: Queries and keys of one head, (..., N, head_dim).
        scale: Factor on the inner products.
        center: Subtract each query's mean score and add 1 / N, so that the weights of a query sum to 1.
    """
    num_tokens = k.shape[-2]
    scores = scale * q @ k.transpose(-2, -1) / num_tokens
    if not center:
        return scores
    return scores - scores.mean(dim=-1, keepdim=True) + 1 / num_tokens


def local_attention(v: Tensor, weight: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
    """Return the 3x3 local term: sum over the neighbours of weight * v, zero outside the map.

    Args:
        v: Values, (B, H*W, C).
        weight: One 3x3 kernel per image and channel, (B, C, 3, 3).
        hw_shape: (H, W).
    """
    height, width = hw_shape
    batch, num_tokens, channels = v.shape
    padded = F.pad(v.reshape(batch, height, width, channels), (0, 0, 1, 1, 1, 1))
    out = 0
    for row in range(3):
        for column in range(3):
            neighbour = padded[:, row:row + height, column:column + width]
            out = out + neighbour * weight[:, None, None, :, row, column]
    return out.reshape(v.shape)


def valid_tokens(hw_shape: Tuple[int, int], valid: Tuple[int, int], num_prefix_tokens: int, device: torch.device
                 ) -> Tensor:
    """Return which tokens of one image are valid, (N,) booleans: the prefix tokens, the first rows and columns."""
    is_valid = torch.zeros(hw_shape, dtype=torch.bool, device=device)
    is_valid[:valid[0], :valid[1]] = True
    return torch.cat([is_valid.new_ones(num_prefix_tokens), is_valid.flatten()])


def inline_attention_reference(
        q: Tensor, k: Tensor, v: Tensor, num_heads: int, scale: float, local_weight: Optional[Tensor],
        hw_shape: Optional[Tuple[int, int]], num_prefix_tokens: int, center: bool,
        valid_hw: Optional[Sequence[Tuple[int, int]]] = None) -> Tensor:
    """Return the attention of (B, N, C) tokens; arguments as :func:`mminline.ops.inline_attention`."""
    batch, num_tokens, channels = q.shape
    if valid_hw is not None:
        out = torch.zeros_like(q)
        for image, valid in enumerate(valid_hw):
            is_valid = valid_tokens(hw_shape, valid, num_prefix_tokens, q.device)
            out[image, is_valid] = inline_attention_reference(
                *(x[image:image + 1, is_valid] for x in (q, k, v)), num_heads, scale,
                None if local_weight is None else local_weight[image:image + 1], valid, num_prefix_tokens, center)[0]
        return out

    weights = inline_attention_weights(split_heads(q, num_heads), split_heads(k, num_heads), scale, center)
    out = (weights @ split_heads(v, num_heads)).transpose(1, 2).reshape(batch, num_tokens, channels)
    if local_weight is None:
        return out
    prefix, image = out.split([num_prefix_tokens, num_tokens - num_prefix_tokens], dim=1)
    local = local_attention(v[:, num_prefix_tokens:], local_weight, hw_shape)
    return torch.cat([prefix, image + local], dim=1)
