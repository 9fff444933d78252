"""The pure PyTorch path of InLine attention: CPU, and any device the CUDA kernels decline.

It never forms an (N, N) or second (N, C) intermediate that could be avoided: one pass over k and v gives
their means and their covariance per head, one pass over q and v gives the output.
"""
from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens centred at a time: the centred copies of k and v then stay in the cache.
CHUNK_TOKENS = 2048


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type statistics are accumulated in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """View (B, N, C) as (B, num_heads, N, head_dim)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _merge_heads(x: Tensor) -> Tensor:
    """Copy (B, num_heads, N, head_dim) to (B, N, C)."""
    return x.transpose(1, 2).flatten(2)


def _as_maps(x: Tensor, hw_shape: Sequence[int], num_prefix_tokens: int) -> Tensor:
    """View the image tokens of (B, N, C) as NCHW maps in channels-last memory."""
    return x[:, num_prefix_tokens:].unflatten(1, tuple(hw_shape)).permute(0, 3, 1, 2)


def _centred_product(x: Tensor, y: Tensor, mean_x: Tensor, mean_y: Tensor, num_heads: int) -> Tensor:
    """Return sum over tokens of (x - mean_x)^T (y - mean_y) per head, (B, num_heads, head_dim, head_dim)."""
    batch, num_tokens, channels = x.shape
    head_dim = channels // num_heads
    total = mean_x.new_zeros(batch, num_heads, head_dim, head_dim)
    for start in range(0, num_tokens, CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        x_centred = _split_heads(x[:, chunk] - mean_x[:, None], num_heads)
        y_centred = _split_heads(y[:, chunk] - mean_y[:, None], num_heads)
        total += x_centred.transpose(-2, -1) @ y_centred
    return total


def forward(q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], num_heads: int, scale: float,
            hw_shape: Optional[Sequence[int]], num_prefix_tokens: int, center: bool
            ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out (B, N, C), Cov(k, v) (B, num_heads, head_dim, head_dim), mean(k) and mean(v) (B, C).

    With ``center=False`` the means are zeros, and the covariance is the plain second moment.
    """
    dtype = statistics_dtype(q.dtype)
    if center:
        mean_k, mean_v = k.mean(1, dtype=dtype), v.mean(1, dtype=dtype)
    else:
        mean_k = mean_v = k.new_zeros(k.shape[0], k.shape[2], dtype=dtype)
        mean_v = mean_k.clone()
    covariance = _centred_product(k, v, mean_k, mean_v, num_heads) / k.shape[1]
    out = _merge_heads(_split_heads(q, num_heads).to(dtype) @ (scale * covariance))
    out += mean_v[:, None]
    if local_weight is not None:
        maps = _as_maps(v, hw_shape, num_prefix_tokens)
        out_maps = _as_maps(out, hw_shape, num_prefix_tokens)
        for image, kernel, out_image in zip(maps, local_weight, out_maps):
            out_image += F.conv2d(image[None], kernel[:, None], padding=1, groups=kernel.shape[0])[0]
    return out.to(q.dtype), covariance, mean_k, mean_v


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], covariance: Tensor,
             mean_k: Tensor, mean_v: Tensor, num_heads: int, scale: float, hw_shape: Optional[Sequence[int]],
             num_prefix_tokens: int, center: bool) -> List[Tensor]:
    """Return the gradients of q, k, v and, if there is one, local_weight.

    The means need no gradient of their own: centring is a projection, so its transpose applied to
    centred factors changes nothing.
    """
    dtype = covariance.dtype
    num_tokens = q.shape[1]
    zero = torch.zeros_like(mean_k)
    grad_heads = _split_heads(grad, num_heads).to(dtype)
    grad_q = _merge_heads(grad_heads @ (scale * covariance).transpose(-2, -1)).to(q.dtype)
    grad_covariance = _centred_product(q, grad, zero, zero, num_heads) * (scale / num_tokens)
    grad_k = _merge_heads(_split_heads(v - mean_v[:, None], num_heads) @ grad_covariance.transpose(-2, -1))
    grad_v = _merge_heads(_split_heads(k - mean_k[:, None], num_heads) @ grad_covariance)
    if center:
        grad_v += grad.mean(1, dtype=dtype)[:, None]
    grads = [grad_q, grad_k.to(k.dtype), grad_v]
    if local_weight is not None:
        grad_weight = torch.empty_like(local_weight)
        maps = _as_maps(v, hw_shape, num_prefix_tokens)
        grad_maps = _as_maps(grad, hw_shape, num_prefix_tokens)
        grad_v_maps = _as_maps(grad_v, hw_shape, num_prefix_tokens)
        for index, kernel in enumerate(local_weight):
            grad_input, grad_kernel, _ = torch.ops.aten.convolution_backward(
                grad_maps[index, None], maps[index, None], kernel[:, None], None, [1, 1], [1, 1], [1, 1],
                False, [0, 0], kernel.shape[0], [True, True, False])
            grad_v_maps[index] += grad_input[0]
            grad_weight[index] = grad_kernel[:, 0]
        grads.append(grad_weight)
    grads[2] = grads[2].to(v.dtype)
    return grads
