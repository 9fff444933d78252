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
    """View the image tokens of one image (N, C) as a map (H, W, C)."""
    return x[num_prefix_tokens:].unflatten(0, tuple(hw_shape))


def _as_image(x: Tensor) -> Tensor:
    """Return a map (H, W, C) as an image (1, C, H, W) in channels-last memory, a view where it can be."""
    # A slice of a joint projection is no channels-last image; left to itself the convolution goes by NCHW.
    return x[None].permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def valid_shapes(batch: int, hw_shape: Optional[Sequence[int]], valid_hw: Optional[Sequence[int]]
                 ) -> List[Optional[Tuple[int, int]]]:
    """Return each image's valid (rows, columns), or None where its whole map is valid.

    ``valid_hw`` lists them flat, for a schema of torch.library knows no pairs.
    """
    if valid_hw is None:
        return [None] * batch
    pairs = zip(valid_hw[::2], valid_hw[1::2])
    return [None if pair == tuple(hw_shape) else pair for pair in pairs]


def _valid_parts(x: Tensor, hw_shape: Optional[Sequence[int]], valid: Optional[Tuple[int, int]],
                 num_prefix_tokens: int) -> List[Tensor]:
    """View the valid tokens of one image (N, C) as one or two maps (H, W, C), prefix tokens in one of their own."""
    if valid is None:
        return [x[:, None]]
    parts = [_as_map(x, hw_shape, num_prefix_tokens)[:valid[0], :valid[1]]]
    return [x[:num_prefix_tokens, None], *parts] if num_prefix_tokens else parts


def _sample_mean(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean (C,) of about SAMPLE_TOKENS tokens, spread over a map (H, W, C)."""
    columns = min(8, part.shape[1])
    steps = max(1, part.shape[0] * columns // SAMPLE_TOKENS), part.shape[1] // columns
    return part[::steps[0], ::steps[1]].reshape(-1, part.shape[-1]).mean(0, dtype=dtype)


def _statistics(k_parts: Sequence[Tensor], v_parts: Sequence[Tensor], num_heads: int, center: bool
                ) -> Tuple[Tensor, Tensor, Tensor]:
    """Return Cov(k, v) (num_heads, head_dim, head_dim), mean(k) and mean(v) (C,) over the valid tokens of one image.

    Keys and values are shifted by estimates of their means, and the product is corrected by what those missed:
    Cov(k, v) = mean((k - a) (v - b)^T) - (mean(k) - a) (mean(v) - b)^T for any a and b. Without the shifts, means
    far from zero would cancel the digits of the covariance.
    """
    num_tokens = sum(part.shape[0] * part.shape[1] for part in k_parts)
    channels = k_parts[0].shape[-1]
    dtype = statistics_dtype(k_parts[0].dtype)
    shift_k, shift_v = torch.zeros(2, channels, dtype=dtype, device=k_parts[0].device)
    if center:
        shift_k, shift_v = (_sample_mean(parts[-1], dtype) for parts in (k_parts, v_parts))
    product = shift_k.new_zeros(num_heads, channels // num_heads, channels // num_heads)
    sum_k, sum_v = torch.zeros_like(shift_k), torch.zeros_like(shift_v)
    for k, v in zip(k_parts, v_parts):
        height, width = k.shape[:2]
        rows = max(1, min(STATISTICS_CHUNK // (channels * width), height))
        buffer_k, buffer_v = shift_k.new_empty(2, rows, width, channels)
        for top in range(0, height, rows):
            length = min(rows, height - top)
            k_chunk, v_chunk = (
                torch.sub(x[top:top + length], shift, out=buffer[:length]).flatten(0, 1)
                for x, shift, buffer in ((k, shift_k, buffer_k), (v, shift_v, buffer_v)))
            product.baddbmm_(_heads(k_chunk, num_heads).transpose(1, 2), _heads(v_chunk, num_heads))
            if center:
                sum_k += k_chunk.sum(0)
                sum_v += v_chunk.sum(0)
    mean_k, mean_v = sum_k / num_tokens, sum_v / num_tokens
    covariance = product / num_tokens - mean_k.view(num_heads, -1, 1) * mean_v.view(num_heads, 1, -1)
    return covariance, shift_k + mean_k, shift_v + mean_v


def _output_rows(q: Tensor, v: Tensor, kernels: Optional[Tensor], weights: Tensor, mean_v: Tensor, top: int,
                 bottom: int) -> Tensor:
    """Return mean_v + local term + q @ weights for some rows of one image's maps q and v (H, W, C), in fp32 or fp64.

    The result are tokens (rows * W, C).
    """
    if kernels is None:
        out = mean_v.repeat((bottom - top) * q.shape[1], 1)
    else:
        # One more row on each side; the rows that the zero padding spoils are cut off.
        above, below = max(top - 1, 0), min(bottom + 1, len(v))
        neighbourhood = _as_image(v[above:below].to(mean_v.dtype))
        local = F.conv2d(neighbourhood, kernels, mean_v, padding=1, groups=len(mean_v))
        out = local[0, :, top - above:bottom - above].permute(1, 2, 0).flatten(0, 1)
    q = q[top:bottom].flatten(0, 1)
    for head, part in _head_slices(len(mean_v), len(weights)):
        out[:, part].addmm_(q[:, part].to(mean_v.dtype), weights[head])
    return out


def forward(q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], num_heads: int, scale: float,
            hw_shape: Optional[Sequence[int]], num_prefix_tokens: int, center: bool,
            valid_hw: Optional[Sequence[int]] = None) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out (B, N, C), Cov(k, v) (B, num_heads, head_dim, head_dim), mean(k) and mean(v) (B, C).

    With ``center=False`` the means are zeros, and the covariance is the plain second moment.
    """
    batch, num_tokens, channels = k.shape
    dtype = statistics_dtype(k.dtype)
    covariance = k.new_empty(batch, num_heads, channels // num_heads, channels // num_heads, dtype=dtype)
    # Two tensors: outputs of an operator of torch.library may not share memory.
    mean_k, mean_v = (k.new_empty(batch, channels, dtype=dtype) for _ in range(2))
    for image, valid in enumerate(valid_shapes(batch, hw_shape, valid_hw)):
        parts = (_valid_parts(x[image], hw_shape, valid, num_prefix_tokens) for x in (k, v))
        covariance[image], mean_k[image], mean_v[image] = _statistics(*parts, num_heads, center)
    out = _output(q, v, local_weight, scale * covariance, mean_v, hw_shape, num_prefix_tokens, valid_hw)
    return out, covariance, mean_k, mean_v


def _output(q: Tensor, v: Tensor, local_weight: Optional[Tensor], weights: Tensor, mean_v: Tensor,
            hw_shape: Optional[Sequence[int]], num_prefix_tokens: int, valid_hw: Optional[Sequence[int]]) -> Tensor:
    """Return mean_v + local term + q @ weights, (B, N, C) in q's type, rounded once; zero outside the valid area."""
    batch, num_tokens, channels = q.shape
    if hw_shape is None:  # without a local term the map's shape does not matter
        hw_shape = (num_tokens - num_prefix_tokens, 1)
    kernels = [None] * batch if local_weight is None else local_weight[:, :, None].to(weights.dtype)
    if batch == 1 and num_tokens * channels <= OUTPUT_CHUNK and num_prefix_tokens == 0 and valid_hw is None:
        q_map, v_map = (_as_map(x[0], hw_shape, 0) for x in (q, v))  # one part: no copy
        return _output_rows(q_map, v_map, kernels[0], weights[0], mean_v[0], 0, len(q_map))[None].to(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for image, valid in enumerate(valid_shapes(batch, hw_shape, valid_hw)):
        if num_prefix_tokens:
            prefix = q[image, :num_prefix_tokens, None]
            out[image, :num_prefix_tokens] = _output_rows(
                prefix, prefix, None, weights[image], mean_v[image], 0, num_prefix_tokens)
        height, width = valid or hw_shape
        q_map, v_map, out_map = (_as_map(x[image], hw_shape, num_prefix_tokens) for x in (q, v, out))
        out_map[height:] = 0
        out_map[:height, width:] = 0
        q_map, v_map, out_map = (x[:height, :width] for x in (q_map, v_map, out_map))
        # What is cut out of a padded map is copied: better within the cache.
        chunk = OUTPUT_CHUNK if valid is None else STATISTICS_CHUNK
        rows = max(1, chunk // (channels * width))
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            out_map[top:bottom] = _output_rows(
                q_map, v_map, kernels[image], weights[image], mean_v[image], top, bottom).unflatten(0, (-1, width))
    return out


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], covariance: Tensor,
             mean_k: Tensor, mean_v: Tensor, num_heads: int, scale: float, hw_shape: Optional[Sequence[int]],
             num_prefix_tokens: int, center: bool, valid_hw: Optional[Sequence[int]] = None) -> List[Tensor]:
    """Return the gradients of q, k, v and, if there is one, local_weight."""
    dtype = covariance.dtype
    inputs = (q, k, v) if local_weight is None else (q, k, v, local_weight)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    for image, valid in enumerate(valid_shapes(len(q), hw_shape, valid_hw)):
        kernels = None if local_weight is None else local_weight[image, :, None].to(dtype)
        tokens = [_join(_valid_parts(x[image], hw_shape, valid, num_prefix_tokens)).to(dtype)
                  for x in (grad, q, k, v)]
        # Narrower types are rounded once, from gradients in the type of the statistics.
        is_direct = valid is None and q.dtype == dtype
        outs = [whole[image] if is_direct else torch.empty_like(tokens[0]) for whole in grads[:3]]
        grad_kernels = _backward_of_image(
            *tokens, kernels, covariance[image], mean_k[image], mean_v[image], num_heads, scale, valid or hw_shape,
            num_prefix_tokens, center, *outs)
        if not is_direct:
            for whole, out in zip(grads, outs):
                _write_valid(whole[image], out, hw_shape, valid, num_prefix_tokens)
        if kernels is not None:
            grads[3][image] = grad_kernels[:, 0]
    return grads


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Return the tokens (N, C) of maps (H, W, C); a view where that is possible."""
    tokens = [part.flatten(0, 1) for part in parts]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _write_valid(out: Tensor, tokens: Tensor, hw_shape: Optional[Sequence[int]], valid: Optional[Tuple[int, int]],
                 num_prefix_tokens: int) -> None:
    """Write the valid tokens of one image to its (N, C), and zeros elsewhere."""
    if valid is not None:
        out.zero_()
    parts = _valid_parts(out, hw_shape, valid, num_prefix_tokens)
    for part, values in zip(parts, tokens.split([part.shape[0] * part.shape[1] for part in parts])):
        part.copy_(values.view(part.shape))


def _backward_of_image(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kernels: Optional[Tensor], covariance: Tensor,
                       mean_k: Tensor, mean_v: Tensor, num_heads: int, scale: float,
                       hw_shape: Optional[Sequence[int]], num_prefix_tokens: int, center: bool,
                       grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> Optional[Tensor]:
    """Write the gradients of one image's (N, C) to ``grad_*``, and return that of its kernels (C, 1, 3, 3)."""
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
    if kernels is None:
        return None
    v_image, grad_image = (_as_image(_as_map(x, hw_shape, num_prefix_tokens)) for x in (v, grad))
    from_local, grad_kernels, _ = torch.ops.aten.convolution_backward(
        grad_image, v_image, kernels, None, [1, 1], [1, 1], [1, 1], False, [0, 0], channels, [True, True, False])
    _as_map(grad_v, hw_shape, num_prefix_tokens).add_(from_local[0].permute(1, 2, 0))
    return grad_kernels
