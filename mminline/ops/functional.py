"""The front door of InLine attention: checks, then the first backend that takes the input."""
from typing import Optional, Sequence, Tuple

from torch import Tensor

from .library import inline_attention_op
from .reference import inline_attention_reference


def inline_attention(
        q: Tensor, k: Tensor, v: Tensor, num_heads: int, *, scale: Optional[float] = None,
        local_weight: Optional[Tensor] = None, hw_shape: Optional[Tuple[int, int]] = None,
        valid_hw: Optional[Sequence[Tuple[int, int]]] = None, num_prefix_tokens: int = 0,
        center: bool = True, backend: Optional[str] = None) -> Tensor:
    r"""InLine attention, linear in the number of tokens.

    Per head, with means over the N tokens of one image (equation 5 of the paper in covariance form)::

        out_i = mean(v) + scale * q_i . Cov(k, v) + sum over the 3x3 neighbours of local_weight * v
        Cov(k, v) = 1/N * sum_j (k_j - mean(k)) (v_j - mean(v))^T

    Args:
        q, k, v: Queries, keys and values, (B, N, C) each, of one type and device; any strides.
        num_heads: Number of heads; divides C.
        scale: Factor on q.k. Default: head_dim ** -0.5.
        local_weight: One 3x3 kernel per image and channel, (B, C, 3, 3), or None for no local term.
        hw_shape: Height and width of the token map in tokens; N = num_prefix_tokens + H * W.
            Needed with ``local_weight`` or ``valid_hw``.
        valid_hw: Not implemented yet: valid (rows, columns) of tokens of each image.
        num_prefix_tokens: Number of leading tokens (a class token) that take part in the global term only.
        center: False drops the mean terms: ``out_i = scale / N * q_i . (k^T v)`` plus the local term.
        backend: 'aten' | 'reference' forces one. Default: the fastest that takes the input.

    Returns:
        (B, N, C) in q's type.

    Raises:
        ValueError: for malformed input; the message quotes what was received.
        NotImplementedError: for input that no backend, or not the forced one, supports.
    """
    _check_tokens(q, k, v, num_heads)
    _check_local(q, local_weight, hw_shape, num_prefix_tokens)
    if valid_hw is not None:
        raise NotImplementedError('valid_hw is not implemented yet: pass None')
    if scale is None:
        scale = (q.shape[-1] // num_heads) ** -0.5
    if backend == 'reference':
        return inline_attention_reference(
            q, k, v, num_heads, scale, local_weight, hw_shape, num_prefix_tokens, center)
    if backend not in (None, 'aten'):
        raise ValueError(f"backend must be 'aten', 'reference' or None, got {backend!r}")
    return inline_attention_op(
        q, k, v, local_weight, num_heads, float(scale), hw_shape, num_prefix_tokens, center, 'aten')[0]


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> None:
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(f'q, k and v must have one shape (B, N, C), got {shapes[0]}, {shapes[1]}, {shapes[2]}')
    if not q.is_floating_point() or q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f'q, k and v must have one floating point type, got {q.dtype}, {k.dtype}, {v.dtype}')
    if q.device != k.device or q.device != v.device:
        raise ValueError(f'q, k and v must be on one device, got {q.device}, {k.device}, {v.device}')
    if q.shape[1] == 0:
        raise ValueError(f'attention needs at least one token, got shape {shapes[0]}')
    if num_heads < 1 or q.shape[-1] % num_heads:
        raise ValueError(f'num_heads must divide the {q.shape[-1]} channels, got {num_heads}')


def _check_local(q: Tensor, local_weight: Optional[Tensor], hw_shape: Optional[Tuple[int, int]],
                 num_prefix_tokens: int) -> None:
    batch, num_tokens, channels = q.shape
    if num_prefix_tokens < 0:
        raise ValueError(f'num_prefix_tokens must not be negative, got {num_prefix_tokens}')
    if hw_shape is not None and num_prefix_tokens + hw_shape[0] * hw_shape[1] != num_tokens:
        raise ValueError(f'hw_shape {tuple(hw_shape)} and {num_prefix_tokens} prefix tokens do not make '
                         f'{num_tokens} tokens')
    if local_weight is None:
        return
    if hw_shape is None:
        raise ValueError('local_weight needs hw_shape=(H, W)')
    if local_weight.shape != (batch, channels, 3, 3):
        raise ValueError(f'local_weight must be {(batch, channels, 3, 3)}, got {tuple(local_weight.shape)}')
    if local_weight.device != q.device:
        raise ValueError(f'local_weight must be on {q.device}, got {local_weight.device}')
