"""Mixed precision that also runs where there is no GPU."""
from contextlib import contextmanager
from typing import Any, Iterator, Optional, Union

import torch
from mmengine.device import get_device
from mmengine.model import is_model_wrapper
from mmengine.optim import AmpOptimWrapper as AcceleratorAmpOptimWrapper
from mmengine.optim import OptimWrapper
from torch import nn

from mminline.registry import OPTIM_WRAPPERS

BFLOAT16 = (None, 'bfloat16', torch.bfloat16)


@OPTIM_WRAPPERS.register_module()
def AmpOptimWrapper(loss_scale: Union[str, float, dict] = 'dynamic', dtype: Optional[Union[str, torch.dtype]] = None,
                    **kwargs: Any) -> OptimWrapper:
    """Build mmengine's ``AmpOptimWrapper`` where there is an accelerator, else :class:`CpuAmpOptimWrapper`.

    Args:
        loss_scale: As mmengine's. bf16 has the exponents of fp32: on a CPU nothing is scaled.
        dtype: Type of autocast. On a CPU it is bf16, by default on an accelerator fp16.
        kwargs: Arguments of the class that is built, which refuses those it does not know.

    Raises:
        ValueError: If another type than bf16 is asked for on a CPU.
    """
    if get_device() != 'cpu':
        return AcceleratorAmpOptimWrapper(loss_scale=loss_scale, dtype=dtype, **kwargs)
    if dtype not in BFLOAT16:
        raise ValueError(f"mixed precision on a CPU needs dtype 'bfloat16', got {dtype!r}")
    return CpuAmpOptimWrapper(**kwargs)


class CpuAmpOptimWrapper(OptimWrapper):
    """mmengine's OptimWrapper under bf16 autocast.

    A segmentor runs under it as a whole. Of any other model the backbone does, and hands on its maps in fp32: the
    operators of mmcv that detectors use (RoIAlign, NMS) know no bf16 on a CPU.
    """

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        inner = model.module if is_model_wrapper(model) else model
        is_segmentor = hasattr(inner, 'decode_head') or not hasattr(inner, 'backbone')
        precision = torch.autocast('cpu', torch.bfloat16) if is_segmentor else _in_bfloat16(inner.backbone)
        with super().optim_context(model), precision:
            yield


@contextmanager
def _in_bfloat16(backbone: nn.Module) -> Iterator[None]:
    """Within this context, a backbone computes under bf16 autocast and returns a tuple of fp32 maps."""
    forward = backbone.forward

    def forward_in_bfloat16(*args, **kwargs):
        with torch.autocast('cpu', torch.bfloat16):
            maps = forward(*args, **kwargs)
        return tuple(x.float() for x in maps)

    backbone.forward = forward_in_bfloat16
    try:
        yield
    finally:
        del backbone.forward
