"""The pure PyTorch path of InLine attention: CPU, and any device the CUDA kernels decline.

One pass over k and v gives their means and their covariance per head, one pass over q and v the output. It
works image by image and head by head: each product is then one matrix product on views, without the copies
that a batched product of permuted heads makes, and the local term one depthwise convolution with the
image's own kernels. docs/op.md has the other forms that were tried, with figures.
"""
from typing import Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements that are worked on at a time. Centred keys stay in a core's cache; outputs leave it anyway, but a
# temporary of this size is memory that is used again, not pages that the system must clear.
STATISTICS_CHUNK = 2 ** 19
OUTPUT_CHUNK = 2 ** 22
# About so many tokens, spread over the map, give the values that keys and values are shifted by.
SAMPLE_TOKENS = 64


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type statistics are accumulated in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """View (N, C) as (num_heads, N, head_dim)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(0, 1)


def _head_slices(channels: int, num_heads: int) -> Iterator[Tuple[int, slice]]:
    """Yield each head's number and its channels."""
    head_dim = channels // num_heads
    for head in range(num_heads):
        yield head, slice(head * head_dim, (head + 1) * head_dim)


def _as_map(x: Tensor, hw_shape: Sequence[int], num_prefix_tokens: int) -> Tensor:
    """View the image tokens of one image (N, C) as a map (1, C, H, W), channels-last where C is contiguous."""
    height, width = hw_shape
    return x[None, num_prefix_tokens:].unflatten(1, (height, width)).permute(0, 3, 1, 2)


def _statistics(k: Tensor, v: Tensor, num_heads: int, center: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Return Cov(k, v) (num_heads, head_dim, head_dim), mean(k) and mean(v) (C,) of one image's (N, C).

    Keys and values are shifted by estimates of their means, and the product is corrected by what those missed:
    Cov(k, v) = mean((k - a) (v - b)^T) - (mean(k) - a) (mean(v) - b)^T for any a and b. Without the shifts, means
    far from zero would cancel the digits of the covariance.
    """
    num_tokens, channels = k.shape
    dtype = statistics_dtype(k.dtype)
    shift_k, shift_v = torch.zeros(2, channels, dtype=dtype, device=k.device)
    if center:
        shift_k, shift_v = (x[::max(1, num_tokens // SAMPLE_TOKENS)].mean(0, dtype=dtype) for x in (k, v))
    product = shift_k.new_zeros(num_heads, channels // num_heads, channels // num_heads)
    sum_k, sum_v = torch.zeros_like(shift_k), torch.zeros_like(shift_v)
    chunk = max(1, min(STATISTICS_CHUNK // channels, num_tokens))
    buffer_k, buffer_v = shift_k.new_empty(2, chunk, channels)
    for start in range(0, num_tokens, chunk):
        length = min(chunk, num_tokens - start)
        k_chunk = torch.sub(k[start:start + chunk], shift_k, out=buffer_k[:length])
        v_chunk = torch.sub(v[start:start + chunk], shift_v, out=buffer_v[:length])
        product.baddbmm_(_heads(k_chunk, num_heads).transpose(1, 2), _heads(v_chunk, num_heads))
        if center:
            sum_k += k_chunk.sum(0)
            sum_v += v_chunk.sum(0)
    mean_k, mean_v = sum_k / num_tokens, sum_v / num_tokens
    covariance = product / num_tokens - mean_k.view(num_heads, -1, 1) * mean_v.view(num_heads, 1, -1)
    return covariance, shift_k + mean_k, shift_v + mean_v


def _output_rows(q: Tensor, v: Tensor, kernels: Optional[Tensor], weights: Tensor, mean_v: Tensor,
                 hw_shape: Sequence[int], num_prefix_tokens: int, top: int, bottom: int) -> Tensor:
    """Return mean_v + local term + q @ weights for the tokens of some rows of one image's map, in fp32 or fp64."""
    height, width = hw_shape
    tokens = slice(num_prefix_tokens + top * width, num_prefix_tokens + bottom * width)
    if kernels is None:
        out = mean_v.repeat(tokens.stop - tokens.start, 1)
    else:
        # One more row on each side; the rows that the zero padding spoils are cut off.
        above, below = max(top - 1, 0), min(bottom + 1, height)
        neighbourhood = _as_map(v, hw_shape, num_prefix_tokens)[:, :, above:below].to(mean_v.dtype)
        # A slice of a joint projection is no channels-last map; left to itself the convolution goes by NCHW.
        neighbourhood = neighbourhood.contiguous(memory_format=torch.channels_last)
        local = F.conv2d(neighbourhood, kernels, mean_v, padding=1, groups=len(mean_v))
        out = local[0, :, top - above:bottom - above].permute(1, 2, 0).flatten(0, 1)
    for head, part in _head_slices(len(mean_v), len(weights)):
        out[:, part].addmm_(q[tokens, part].to(mean_v.dtype), weights[head])
    return out


def forward(q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], num_heads: int, scale: float,
            hw_shape: Optional[Sequence[int]], num_prefix_tokens: int, center: bool
            ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out (B, N, C), Cov(k, v) (B, num_heads, head_dim, head_dim), mean(k) and mean(v) (B, C).

    With ``center=False`` the means are zeros, and the covariance is the plain second moment.
    """
    batch, _, channels = k.shape
    dtype = statistics_dtype(k.dtype)
    covariance = k.new_empty(batch, num_heads, channels // num_heads, channels // num_heads, dtype=dtype)
    # Two tensors: outputs of an operator of torch.library may not share memory.
    mean_k, mean_v = (k.new_empty(batch, channels, dtype=dtype) for _ in range(2))
    for image in range(batch):
        covariance[image], mean_k[image], mean_v[image] = _statistics(k[image], v[image], num_heads, center)
    out = _output(q, v, local_weight, scale * covariance, mean_v, hw_shape, num_prefix_tokens)
    return out, covariance, mean_k, mean_v


def _output(q: Tensor, v: Tensor, local_weight: Optional[Tensor], weights: Tensor, mean_v: Tensor,
            hw_shape: Optional[Sequence[int]], num_prefix_tokens: int) -> Tensor:
    """Return mean_v + local term + q @ weights, (B, N, C) in q's type, rounded once."""
    batch, num_tokens, channels = q.shape
    # Without a local term the map's shape does not matter.
    height, width = (num_tokens - num_prefix_tokens, 1) if local_weight is None else hw_shape
    rows = max(1, OUTPUT_CHUNK // (channels * width))
    kernels = [None] * batch if local_weight is None else local_weight[:, :, None].to(weights.dtype)
    if batch == 1 and rows >= height and num_prefix_tokens == 0:  # one part: no copy
        return _output_rows(q[0], v[0], kernels[0], weights[0], mean_v[0], (height, width), 0, 0,
                            height)[None].to(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for image in range(batch):
        if num_prefix_tokens:
            out[image, :num_prefix_tokens] = _output_rows(
                q[image], v[image], None, weights[image], mean_v[image], (num_prefix_tokens, 1), 0, 0,
                num_prefix_tokens)
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            tokens = slice(num_prefix_tokens + top * width, num_prefix_tokens + bottom * width)
            out[image, tokens] = _output_rows(
                q[image], v[image], kernels[image], weights[image], mean_v[image], (height, width),
                num_prefix_tokens, top, bottom)
    return out


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], covariance: Tensor,
             mean_k: Tensor, mean_v: Tensor, num_heads: int, scale: float, hw_shape: Optional[Sequence[int]],
             num_prefix_tokens: int, center: bool) -> List[Tensor]:
    """Return the gradients of q, k, v and, if there is one, local_weight."""
    dtype = covariance.dtype
    inputs = (q, k, v) if local_weight is None else (q, k, v, local_weight)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    for image in range(len(q)):
        kernels = None if local_weight is None else local_weight[image, :, None].to(dtype)
        # Narrower types are rounded once, from gradients in the type of the statistics.
        outs = [whole[image] if whole.dtype == dtype else torch.empty_like(whole[image], dtype=dtype)
                for whole in grads]
        _backward_of_image(
            *(x[image].to(dtype) for x in (grad, q, k, v)), kernels, covariance[image], mean_k[image],
            mean_v[image], num_heads, scale, hw_shape, num_prefix_tokens, center, *outs)
        for whole, out in zip(grads, outs):
            if whole.dtype != dtype:
                whole[image] = out
    return grads


def _backward_of_image(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kernels: Optional[Tensor], covariance: Tensor,
                       mean_k: Tensor, mean_v: Tensor, num_heads: int, scale: float,
                       hw_shape: Optional[Sequence[int]], num_prefix_tokens: int, center: bool,
                       grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, grad_kernels: Optional[Tensor] = None) -> None:
    """Write the gradients of one image's (N, C) to ``grad_*``, all in the type of the statistics."""
    num_tokens, channels = q.shape
    # The gradient of the covariance, divided by N.
    product = _heads(q, num_heads).transpose(1, 2) @ _heads(grad, num_heads) * (scale / num_tokens)
    mean_grad = grad.sum(0) / num_tokens if center else torch.zeros_like(mean_v)
    for head, part in _head_slices(channels, num_heads):
        # (v - mean(v)) @ product^T as v @ product^T plus a constant: the centred copy is never made.
        to_k, to_v = product[head].t(), product[head]
        torch.mm(grad[:, part], scale * covariance[head].t(), out=grad_q[:, part])
        torch.addmm(-mean_v[part] @ to_k, v[:, part], to_k, out=grad_k[:, part])
        torch.addmm(mean_grad[part] - mean_k[part] @ to_v, k[:, part], to_v, out=grad_v[:, part])
    if kernels is not None:
        v_map, grad_map, grad_v_map = (_as_map(x, hw_shape, num_prefix_tokens) for x in (v, grad, grad_v))
        v_map, grad_map = (x.contiguous(memory_format=torch.channels_last) for x in (v_map, grad_map))
        from_local, from_kernels, _ = torch.ops.aten.convolution_backward(
            grad_map, v_map, kernels, None, [1, 1], [1, 1], [1, 1], False, [0, 0], channels, [True, True, False])
        grad_v_map += from_local
        grad_kernels.copy_(from_kernels[:, 0])
