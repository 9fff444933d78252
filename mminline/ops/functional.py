"""The front door of InLine attention: checks, then the first backend that takes the input."""
import functools
import logging
import os
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from .export import inline_attention_export
from .library import inline_attention_op
from .reference import inline_attention_reference

logger = logging.getLogger(__name__)


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
        valid_hw: Valid (rows, columns) of tokens of each image of a padded batch, Python integers. Means, covariance
            and local term cover these first rows and columns only; all other tokens of the map give zeros and get
            zero gradients. Default: all tokens are valid.
        num_prefix_tokens: Number of leading tokens (a class token) that take part in the global term only.
        center: False drops the mean terms: ``out_i = scale / N * q_i . (k^T v)`` plus the local term.
        backend: 'cuda' | 'aten' | 'reference' forces one. Default: the one that the environment variable
            ``MMINLINE_BACKEND`` names, else the first of 'cuda' and 'aten' that takes the input; the choice is
            logged at debug level.

    Returns:
        (B, N, C) in q's type.

    Raises:
        ValueError: for malformed input; the message quotes what was received.
        NotImplementedError: for input that no backend, or not the forced one, supports.
    """
    _check_tokens(q, k, v, num_heads)
    _check_local(q, local_weight, hw_shape, num_prefix_tokens)
    valid_hw = _check_valid(valid_hw, q.shape[0], hw_shape)
    if scale is None:
        scale = (q.shape[-1] // num_heads) ** -0.5
    if torch.jit.is_tracing():  # as torch.onnx.export does
        if valid_hw is not None:
            raise NotImplementedError(f'a model with valid_hw cannot be traced or exported to ONNX, got {valid_hw}')
        return inline_attention_export(
            q, k, v, num_heads, scale, local_weight, hw_shape, num_prefix_tokens, center)
    backend = _choose_backend(q, num_heads, backend)
    if backend == 'reference':
        return inline_attention_reference(
            q, k, v, num_heads, scale, local_weight, hw_shape, num_prefix_tokens, center, valid_hw)
    flat_valid_hw = None if valid_hw is None else [size for valid in valid_hw for size in valid]
    return inline_attention_op(
        q, k, v, local_weight, num_heads, float(scale), hw_shape, num_prefix_tokens, center, flat_valid_hw, backend)[0]


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


def _check_valid(valid_hw: Optional[Sequence[Tuple[int, int]]], batch: int, hw_shape: Optional[Tuple[int, int]]
                 ) -> Optional[List[Tuple[int, int]]]:
    """Return the valid (rows, columns) of each image, or None where all of every map is valid."""
    if valid_hw is None:
        return None
    if hw_shape is None:
        raise ValueError('valid_hw needs hw_shape=(H, W)')
    valid_hw = [tuple(valid) for valid in valid_hw]
    if len(valid_hw) != batch:
        raise ValueError(f'valid_hw must have one (rows, columns) for each of {batch} images, got {valid_hw}')
    for valid in valid_hw:
        if len(valid) != 2 or not all(1 <= size <= whole for size, whole in zip(valid, hw_shape)):
            raise ValueError(f'valid_hw must lie between (1, 1) and hw_shape {tuple(hw_shape)}, got {valid}')
    return None if set(valid_hw) <= {tuple(hw_shape)} else valid_hw


@torch.compiler.assume_constant_result  # a compiled model asks while it is compiled
def gpu_problem() -> Optional[str]:
    """Say why this process can run no CUDA kernel, or None."""
    return _find_gpu_problem()


@functools.cache
def _find_gpu_problem() -> Optional[str]:
    """Start Triton, once. That compiles some C: a missing compiler shows here, not in the middle of a model."""
    problem = None
    if not torch.cuda.is_available() or torch.version.hip is not None:
        problem = 'no NVIDIA GPU is available'
    else:
        try:
            import triton
            if TorchVersion(triton.__version__) < '3.6':
                problem = f'the kernels need Triton 3.6, got {triton.__version__}'
            triton.runtime.driver.active.get_current_target()
        except Exception as error:  # whatever it is, PyTorch alone still works
            problem = f'Triton does not start: {" ".join(str(error).split())}'
    if problem is not None:
        logger.info('InLine attention runs on plain PyTorch: %s', problem)
    return problem


def _cuda_declines(q: Tensor, num_heads: int) -> Optional[str]:
    if q.is_cuda or not torch.cuda.is_available():  # CPU tensors shall not wake up a GPU
        problem = gpu_problem()
        if problem is not None:
            return problem
    if not q.is_cuda:
        return f'the kernels need a GPU, got tensors on {q.device.type}'
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f'the kernels need compute capability 8.0, got {capability[0]}.{capability[1]}'
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f'the kernels take float16, bfloat16 and float32, got {q.dtype}'
    if q.shape[-1] // num_heads > 64:
        return f'the kernels take up to 64 channels per head, got {q.shape[-1] // num_heads}'
    return None


def _takes_everything(q: Tensor, num_heads: int) -> None:
    return None


# In order of preference; each predicate says why its backend declines, or None.
BACKENDS = {'cuda': _cuda_declines, 'aten': _takes_everything, 'reference': _takes_everything}


def _choose_backend(q: Tensor, num_heads: int, requested: Optional[str]) -> str:
    """Return the requested backend, or raise; without a request, the first that does not decline."""
    if requested is None:
        requested = os.environ.get('MMINLINE_BACKEND')
    if requested is not None:
        if requested not in BACKENDS:
            raise ValueError(f'backend must be one of {tuple(BACKENDS)} or None, got {requested!r}')
        reason = BACKENDS[requested](q, num_heads)
        if reason is not None:
            raise NotImplementedError(f'backend {requested!r} declines: {reason}')
        _log_choice(requested, 'requested')
        return requested
    refusals = []
    for name, declines in BACKENDS.items():
        reason = declines(q, num_heads)
        if reason is None:
            break
        refusals.append(f'{name} declines: {reason}')
    _log_choice(name, '; '.join(refusals) or 'the first choice')
    return name


def _log_choice(name: str, reason: str) -> None:
    if not torch.compiler.is_compiling():
        _log_choice_once(name, reason)


@functools.cache
def _log_choice_once(name: str, reason: str) -> None:
    logger.debug('InLine attention backend: %s (%s)', name, reason)
