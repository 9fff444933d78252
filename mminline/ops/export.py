"""InLine attention in operations that ONNX has, for any batch and map.

``torch.onnx.export`` does not know the operator of library.py, and a convolution grouped over batch x channels would
fix the batch: ONNX keeps the number of groups in the file. Here the covariance form is plain products and the local
term nine shifted multiply-adds.
"""
from typing import Optional, Tuple

import torch.nn.functional as F
from torch import Tensor

from .reference import local_attention, split_heads


def inline_attention_export(
        q: Tensor, k: Tensor, v: Tensor, num_heads: int, scale: float, local_weight: Optional[Tensor],
        hw_shape: Optional[Tuple[int, int]], num_prefix_tokens: int, center: bool) -> Tensor:
    """Return the attention of (B, N, C) tokens; arguments as :func:`mminline.ops.inline_attention`."""
    num_tokens = v.shape[1]
    mean_v = v.mean(dim=1, keepdim=True)
    centred_k, centred_v = (k - k.mean(dim=1, keepdim=True), v - mean_v) if center else (k, v)
    covariance = split_heads(centred_k, num_heads).transpose(-2, -1) @ split_heads(centred_v / num_tokens, num_heads)
    out = (split_heads(scale * q, num_heads) @ covariance).transpose(1, 2).flatten(2)
    if center:
        out = out + mean_v
    if local_weight is None:
        return out
    local = local_attention(v[:, num_prefix_tokens:], local_weight, hw_shape)
    return out + F.pad(local, (0, 0, num_prefix_tokens, 0))
