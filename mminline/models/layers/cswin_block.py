"""CSwin's block: its projections lie in the block, and attention runs in branches of the channels."""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mminline.ops import inline_attention

from .attention import LocalKernels, linear_attention, merge_heads, split_heads
from .block import Block
from .embed import unflatten_tokens
from .windows import from_windows, pad_map, to_windows, window_mask


class CSwinBranch(nn.Module):
    """Base of a branch: attention without projections, plus ``get_v``, a depthwise convolution of v."""

    def __init__(self, embed_dims: int, num_heads: int):
        super().__init__()
        if num_heads < 1 or embed_dims % num_heads:
            raise ValueError(f'num_heads must divide embed_dims={embed_dims}, got {num_heads}')
        self.num_heads = num_heads
        self.get_v = nn.Conv2d(embed_dims, embed_dims, kernel_size=3, padding=1, groups=embed_dims)

    def convolve_v(self, v: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        """Return ``get_v`` of tokens (B, N, C)."""
        return self.get_v(unflatten_tokens(v.transpose(1, 2), 2, hw_shape)).flatten(2).transpose(1, 2)


class InLineBranch(CSwinBranch):
    """InLine attention over the whole map; ``local_term`` and ``center`` as of :class:`InLineAttention`."""

    def __init__(self, embed_dims: int, num_heads: int, local_term: bool = True, center: bool = True):
        super().__init__(embed_dims, num_heads)
        self.residual = LocalKernels(embed_dims, num_heads) if local_term else None
        self.center = center

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: Tuple[int, int], mean_token: Tensor) -> Tensor:
        local_weight = self.residual(mean_token) if self.residual is not None else None
        out = inline_attention(q, k, v, self.num_heads, local_weight=local_weight, hw_shape=hw_shape,
                               center=self.center)
        return out + self.convolve_v(v, hw_shape)


class LinearBranch(CSwinBranch):
    """Plain linear attention over the whole map."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: Tuple[int, int], mean_token: Tensor) -> Tensor:
        out = linear_attention(*(split_heads(part, self.num_heads) for part in (q, k, v)))
        return merge_heads(out) + self.convolve_v(v, hw_shape)


class StripeBranch(CSwinBranch):
    """Softmax attention in stripes of the whole map's height or width.

    Args:
        split_size: Thickness of a stripe in tokens; None for one stripe, the whole map.
        vertical: Stripes of the map's height, rather than of its width.
    """

    def __init__(self, embed_dims: int, num_heads: int, split_size: Optional[int], vertical: bool = True):
        super().__init__(embed_dims, num_heads)
        self.split_size = split_size
        self.vertical = vertical

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: Tuple[int, int], mean_token: Tensor) -> Tensor:
        height, width = stripe = hw_shape
        if self.split_size is not None:
            stripe = (height, self.split_size) if self.vertical else (self.split_size, width)
        batch = q.shape[0]
        maps = [pad_map(unflatten_tokens(part, 1, hw_shape), stripe) for part in (q, k, v)]
        padded_shape = maps[0].shape[1:3]
        q, k, v = (to_windows(part, stripe) for part in maps)
        # A stripe that is the whole map has no padding.
        mask = None if self.split_size is None else window_mask(hw_shape, stripe, 0, q.device)
        if mask is not None:
            mask = mask.repeat(batch, 1, 1, 1)
        heads = [split_heads(part, self.num_heads) for part in (q, k, v)]
        # get_v works stripe by stripe: its zero padding lies at each stripe's own border.
        out = merge_heads(F.scaled_dot_product_attention(*heads, attn_mask=mask)) + self.convolve_v(v, stripe)
        return from_windows(out, stripe, padded_shape)[:, :height, :width].flatten(1, 2)


class CSwinBlock(Block):
    """Pre-norm block whose branches each attend with their share of the channels.

    Args:
        branches: The branches; they share the channels equally.
        Other arguments as of :class:`Block`.
    """

    def __init__(self, branches: Tuple[CSwinBranch, ...], embed_dims: int, mlp_ratio: float, drop_path: float,
                 norm_cfg: dict, with_cp: bool):
        super().__init__(None, embed_dims, mlp_ratio, drop_path, norm_cfg, with_cp)
        self.qkv = nn.Linear(embed_dims, embed_dims * 3)
        self.attns = nn.ModuleList(branches)
        self.proj = nn.Linear(embed_dims, embed_dims)

    def attend(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        parts = [part.chunk(len(self.attns), dim=-1) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)]
        # Unlike in the other families, the mean is that of the tokens before their norm.
        means = x.mean(dim=1).chunk(len(self.attns), dim=-1)
        outs = [attn(q, k, v, hw_shape, mean) for attn, q, k, v, mean in zip(self.attns, *parts, means)]
        return self.proj(torch.cat(outs, dim=-1))
