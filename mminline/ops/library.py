"""InLine attention as one operator of torch.library: ``torch.ops.mminline.inline_attention``.

Compile, export and the FLOP counter see one node, whatever backend computes it. The statistics that the
backward needs are extra outputs of the forward, marked non-differentiable. ``valid_hw`` is a flat list of each image's
valid rows and columns, or None.
"""
import importlib
from types import ModuleType
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import aten


def _backend(name: str) -> ModuleType:
    """Return ``aten.py`` or ``cuda.py``, whose ``forward`` and ``backward`` agree in all but speed.

    ``cuda.py`` is imported when it is first used: it needs Triton.
    """
    return importlib.import_module(f'.{name}', __package__)


@torch.library.custom_op('mminline::inline_attention', mutates_args=())
def inline_attention_op(
        q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], num_heads: int, scale: float,
        hw_shape: Optional[Sequence[int]], num_prefix_tokens: int, center: bool, valid_hw: Optional[Sequence[int]],
        backend: str) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    return _backend(backend).forward(
        q, k, v, local_weight, num_heads, scale, hw_shape, num_prefix_tokens, center, valid_hw)


@inline_attention_op.register_fake
def _(q, k, v, local_weight, num_heads, scale, hw_shape, num_prefix_tokens, center, valid_hw, backend):
    batch, _, channels = q.shape
    dtype = aten.statistics_dtype(q.dtype)
    head_dim = channels // num_heads
    return (torch.empty_like(q, memory_format=torch.contiguous_format),
            q.new_empty(batch, num_heads, head_dim, head_dim, dtype=dtype),
            q.new_empty(batch, channels, dtype=dtype), q.new_empty(batch, channels, dtype=dtype))


@torch.library.custom_op('mminline::inline_attention_backward', mutates_args=())
def inline_attention_backward_op(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, local_weight: Optional[Tensor], covariance: Tensor,
        mean_k: Tensor, mean_v: Tensor, num_heads: int, scale: float, hw_shape: Optional[Sequence[int]],
        num_prefix_tokens: int, center: bool, valid_hw: Optional[Sequence[int]], backend: str) -> List[Tensor]:
    return _backend(backend).backward(
        grad, q, k, v, local_weight, covariance, mean_k, mean_v, num_heads, scale, hw_shape,
        num_prefix_tokens, center, valid_hw)


@inline_attention_backward_op.register_fake
def _(grad, q, k, v, local_weight, covariance, mean_k, mean_v, num_heads, scale, hw_shape,
      num_prefix_tokens, center, valid_hw, backend):
    inputs = (q, k, v) if local_weight is None else (q, k, v, local_weight)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _save_for_backward(ctx, inputs, output):
    q, k, v, local_weight, *ctx.settings = inputs
    _, covariance, mean_k, mean_v = output
    ctx.mark_non_differentiable(covariance, mean_k, mean_v)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, local_weight, covariance, mean_k, mean_v)


def _backward(ctx, grad, *_):
    num_inputs = 4 + len(ctx.settings)
    if grad is None:
        return (None,) * num_inputs
    grads = inline_attention_backward_op(grad, *ctx.saved_tensors, *ctx.settings)
    return tuple(grads) + (None,) * (num_inputs - len(grads))


inline_attention_op.register_autograd(_backward, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.mminline.inline_attention)
def _forward_flops(q_shape, k_shape, v_shape, local_weight_shape, num_heads, scale, hw_shape, num_prefix_tokens,
                   center, valid_hw, *_, **__) -> int:
    """Count 2 per multiply-add, as FlopCounterMode does: k^T v, q times that, and nine taps per value."""
    batch, num_tokens, channels = q_shape
    if valid_hw is None:
        map_tokens = batch * (num_tokens - num_prefix_tokens)
    else:
        map_tokens = sum(rows * columns for rows, columns in zip(valid_hw[::2], valid_hw[1::2]))
    flops = 2 * (2 * (map_tokens + batch * num_prefix_tokens) * channels * (channels // num_heads))
    if local_weight_shape is not None:
        flops += 2 * 9 * map_tokens * channels
    return flops


@register_flop_formula(torch.ops.mminline.inline_attention_backward)
def _backward_flops(grad_shape, q_shape, k_shape, v_shape, local_weight_shape, covariance_shape, mean_k_shape,
                    mean_v_shape, *settings, **_) -> int:
    """Every product of the forward has two gradients, each at its price."""
    return 2 * _forward_flops(q_shape, k_shape, v_shape, local_weight_shape, *settings)


def _register_autocast(device_type: str) -> None:
    """Under autocast: inputs in the autocast type, statistics in float32 whatever autocast says."""
    def kernel(q, k, v, local_weight, *settings):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v, local_weight = (
            x.to(dtype) if x is not None and x.is_floating_point() else x for x in (q, k, v, local_weight))
        with torch.autocast(device_type, enabled=False):
            return inline_attention_op(q, k, v, local_weight, *settings)

    torch.library.impl('mminline::inline_attention', f'Autocast{device_type.upper()}', kernel, lib=_LIBRARY)


# torch.library.custom_op fixes an autocast type when it is registered; users choose it per context.
_LIBRARY = torch.library.Library('mminline', 'FRAGMENT')
for _device_type in ('cpu', 'cuda'):
    _register_autocast(_device_type)
