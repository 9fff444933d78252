"""The transformer block around any attention layer."""
from typing import Tuple

import torch
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .token_blocks import map_token_blocks


class MLP(nn.Module):
    """Two linear layers with a GELU between, on tokens (..., C)."""

    def __init__(self, embed_dims: int, hidden_dims: int):
        super().__init__()
        self.fc1 = nn.Linear(embed_dims, hidden_dims)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dims, embed_dims)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm block: tokens plus attention, then plus MLP.

    Args:
        attn: Attention layer; called with tokens (B, N, C) and ``hw_shape``.
        embed_dims: C.
        mlp_ratio: Hidden width of the MLP as a multiple of C.
        drop_path: Probability of leaving a residual branch out, per image.
        norm_cfg: Config of both norms.
        with_cp: Recompute the block in the backward pass to save memory.
    """

    def __init__(self, attn: nn.Module, embed_dims: int, mlp_ratio: float, drop_path: float, norm_cfg: dict,
                 with_cp: bool):
        super().__init__()
        self.norm1 = build_norm_layer(norm_cfg, embed_dims)[1]
        self.attn = attn
        self.norm2 = build_norm_layer(norm_cfg, embed_dims)[1]
        self.mlp = MLP(embed_dims, int(embed_dims * mlp_ratio))
        self.drop_path = DropPath(drop_path)
        self.with_cp = with_cp

    def attend(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        """Return the attention branch of tokens (B, N, C)."""
        return self.attn(self.norm1(x), hw_shape)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def _forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.attend(x, hw_shape))
        if self.training:  # stochastic depth goes by image, not by token
            return self._feed_forward(x)
        return map_token_blocks(self._feed_forward, x, width=self.mlp.fc1.out_features)

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(self._forward, x, hw_shape, use_reentrant=False)
        return self._forward(x, hw_shape)
