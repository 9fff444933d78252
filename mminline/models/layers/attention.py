"""Attention over the tokens of one map: inline, linear and softmax, interchangeable in a block.

All take tokens (B, N, C) and ``hw_shape=(H, W)`` with N = num_prefix_tokens + H * W, and return (B, N, C).
Parameter names are those of the official checkpoints.
"""
from typing import Tuple

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from torch import Tensor, nn

from mminline.ops import inline_attention
from mminline.ops.reference import split_heads

from .embed import unflatten_tokens
from .token_blocks import map_token_blocks


class LocalKernels(nn.Sequential):
    """Predicts the 3x3 kernel of every channel from an image's mean token, each head from its own part."""

    def __init__(self, embed_dims: int, num_heads: int):
        super().__init__(
            nn.Conv1d(embed_dims, embed_dims, kernel_size=1, groups=num_heads),
            nn.GELU(),
            nn.Conv1d(embed_dims, embed_dims * 9, kernel_size=1, groups=num_heads))

    def forward(self, mean_token: Tensor) -> Tensor:
        """Return (B, C, 3, 3) for the mean token of each image, (B, C)."""
        return super().forward(mean_token.unsqueeze(-1)).reshape(*mean_token.shape, 3, 3)


def merge_heads(x: Tensor) -> Tensor:
    """Copy (B, num_heads, N, head_dim) to (B, N, C)."""
    return x.transpose(1, 2).flatten(2)


class MultiheadAttention(nn.Module):
    """What the attention kinds share: the projections to q, k and v, and the one back.

    Args:
        embed_dims: C.
        num_heads: Number of heads; divides C.
        joint_qkv: One projection ``qkv`` instead of ``q`` and ``kv``.
        num_prefix_tokens: Number of leading tokens (a class token) that lie on no map.
    """

    def __init__(self, embed_dims: int, num_heads: int, joint_qkv: bool = False, num_prefix_tokens: int = 0):
        super().__init__()
        if num_heads < 1 or embed_dims % num_heads:
            raise ValueError(f'num_heads must divide embed_dims={embed_dims}, got {num_heads}')
        self.num_heads = num_heads
        self.num_prefix_tokens = num_prefix_tokens
        self.joint_qkv = joint_qkv
        if joint_qkv:
            self.qkv = nn.Linear(embed_dims, embed_dims * 3)
        else:
            self.q = nn.Linear(embed_dims, embed_dims)
            self.kv = nn.Linear(embed_dims, embed_dims * 2)
        self.proj = nn.Linear(embed_dims, embed_dims)

    def project(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, (B, N, C) each."""
        return map_token_blocks(self._project, x, width=3 * x.shape[-1])

    def _project(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        if self.joint_qkv:
            return self.qkv(x).chunk(3, dim=-1)
        return (self.q(x), *self.kv(x).chunk(2, dim=-1))


class InLineAttention(MultiheadAttention):
    """InLine attention (equations 5 and 6 of the paper), linear in N.

    Args:
        local_term: Add the local term, a 3x3 convolution of v with kernels made from the mean token.
        center: Subtract the means that make the attention injective; see
            :func:`mminline.ops.inline_attention`.
    """

    def __init__(self, embed_dims: int, num_heads: int, joint_qkv: bool = False, num_prefix_tokens: int = 0,
                 local_term: bool = True, center: bool = True):
        super().__init__(embed_dims, num_heads, joint_qkv, num_prefix_tokens)
        self.residual = LocalKernels(embed_dims, num_heads) if local_term else None
        self.center = center

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        q, k, v = self.project(x)
        local_weight = self.residual(x.mean(dim=1)) if self.residual is not None else None
        out = inline_attention(q, k, v, self.num_heads, local_weight=local_weight, hw_shape=hw_shape,
                               num_prefix_tokens=self.num_prefix_tokens, center=self.center)
        return self.proj(out)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain kernel linear attention with elu + 1 features, normalised, on heads (..., N, head_dim)."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    # Means instead of sums over the tokens: the ratio is the same, and half types do not overflow.
    weighted_values = k.transpose(-2, -1) @ (v / v.shape[-2])
    return q @ weighted_values / (q @ k.mean(dim=-2).unsqueeze(-1))


class LinearAttention(MultiheadAttention):
    """Plain kernel linear attention without a local term, linear in N."""

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        out = linear_attention(*(split_heads(part, self.num_heads) for part in self.project(x)))
        return self.proj(merge_heads(out))


class SoftmaxAttention(MultiheadAttention):
    """Softmax attention, quadratic in N, with PVT's spatial reduction of keys and values.

    Args:
        sr_ratio: Keys and values come from patches of sr_ratio x sr_ratio tokens; 1 for no reduction.
    """

    def __init__(self, embed_dims: int, num_heads: int, joint_qkv: bool = False, num_prefix_tokens: int = 0,
                 sr_ratio: int = 1):
        super().__init__(embed_dims, num_heads, joint_qkv, num_prefix_tokens)
        if sr_ratio > 1 and (joint_qkv or num_prefix_tokens):
            raise ValueError('spatial reduction needs a separate kv projection and no prefix tokens, got '
                             f'joint_qkv={joint_qkv}, num_prefix_tokens={num_prefix_tokens}')
        self.sr_ratio = sr_ratio
        if sr_ratio > 1:
            self.sr = nn.Conv2d(embed_dims, embed_dims, kernel_size=sr_ratio, stride=sr_ratio)
            self.norm = build_norm_layer(dict(type='LN'), embed_dims)[1]

    def reduce(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        """Return one token per patch of (B, N, C), (B, N / sr_ratio ** 2, C); a rest at the border is left out."""
        maps = unflatten_tokens(x.transpose(1, 2), 2, hw_shape)
        # A map smaller than one patch still gives one token.
        missing = [self.sr_ratio - size for size in hw_shape]
        # Traced sizes are tensors: max would make them numbers.
        missing = [size.clamp(min=0) if torch.jit.is_tracing() else max(0, size) for size in missing]
        maps = F.pad(maps, (0, missing[1], 0, missing[0]))
        return self.norm(self.sr(maps).flatten(2).transpose(1, 2))

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        if self.sr_ratio > 1:
            q, (k, v) = self.q(x), self.kv(self.reduce(x, hw_shape)).chunk(2, dim=-1)
        else:
            q, k, v = self.project(x)
        out = F.scaled_dot_product_attention(*(split_heads(part, self.num_heads) for part in (q, k, v)))
        return self.proj(merge_heads(out))
