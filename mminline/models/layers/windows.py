"""Softmax attention inside windows of a map, at any size.

A map that the window does not divide is padded at the bottom and right. Every token carries the number of
its region, padding is a region of its own, and a token attends only to its region: one comparison masks
both the padding and what a shift brought together from opposite borders.
"""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import MultiheadAttention, merge_heads, split_heads
from .embed import missing_to_multiple, unflatten_tokens


def pad_map(x: Tensor, window: Tuple[int, int]) -> Tensor:
    """Pad maps (B, H, W, C) with zeros at the bottom and right until the window divides them."""
    bottom, right = (missing_to_multiple(size, edge) for size, edge in zip(x.shape[1:3], window))
    return F.pad(x, (0, 0, 0, right, 0, bottom))


def to_windows(x: Tensor, window: Tuple[int, int]) -> Tensor:
    """Cut maps (B, H, W, C) into (B * num_windows, window_h * window_w, C)."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // window[0], window[0], width // window[1], window[1], channels)
    return x.transpose(2, 3).reshape(-1, window[0] * window[1], channels)


def from_windows(x: Tensor, window: Tuple[int, int], padded_shape: Tuple[int, int]) -> Tensor:
    """Undo :func:`to_windows`: (B * num_windows, window_h * window_w, C) to (B, H, W, C)."""
    rows, columns = padded_shape[0] // window[0], padded_shape[1] // window[1]
    x = x.reshape(-1, rows, columns, window[0], window[1], x.shape[-1])
    return x.transpose(2, 3).reshape(-1, *padded_shape, x.shape[-1])


def roll_map(x: Tensor, shift: int) -> Tensor:
    """Roll maps (B, H, W, C) up and to the left by ``shift`` tokens."""
    if not torch.jit.is_tracing():
        return x.roll((-shift, -shift), dims=(1, 2))
    # ONNX rolls by constants only; here the map's size decides.
    rows, columns = (rolled_positions(size, shift, x.device) for size in x.shape[1:3])
    return x.index_select(1, rows).index_select(2, columns)


def rolled_positions(size: int, shift: int, device: torch.device) -> Tensor:
    """Return where the tokens of one axis come from, (size,), when it is rolled by ``shift`` towards its start."""
    return (torch.arange(size, device=device) + shift) % size


def window_mask(hw_shape: Tuple[int, int], window: Tuple[int, int], shift: int, device: torch.device
                ) -> Optional[Tensor]:
    """Return where tokens of a window attend to each other, (num_windows, 1, L, L) booleans with L = h * w.

    Args:
        hw_shape: (H, W) of the map before it is padded.
        window: (height, width) of a window in tokens.
        shift: Tokens that the padded map is rolled up and to the left.

    Returns:
        None where every token attends to its whole window.
    """
    padded_shape = tuple(size + missing_to_multiple(size, edge) for size, edge in zip(hw_shape, window))
    # A traced mask serves other sizes too.
    if not torch.jit.is_tracing() and shift == 0 and padded_shape == tuple(hw_shape):
        return None
    axes = []
    for size, padded in zip(hw_shape, padded_shape):
        padding = rolled_positions(padded, shift, device) >= size
        # After the roll, the last `shift` positions come from the opposite border.
        wrapped = torch.arange(padded, device=device) >= padded - shift
        axes.append(padding * 2 + wrapped)
    region = axes[0][:, None] * 4 + axes[1]
    region = to_windows(region[None, :, :, None], window).squeeze(-1)
    return region[:, None, :, None] == region[:, None, None, :]


class WindowAttention(MultiheadAttention):
    """Swin's softmax attention in windows with a bias for each relative position.

    Args:
        window_size: Edge of a window in tokens.
        shifted: Shift the windows by half their edge, on maps larger than a window.
    """

    def __init__(self, embed_dims: int, num_heads: int, window_size: int, shifted: bool):
        super().__init__(embed_dims, num_heads, joint_qkv=True)
        self.window_size = window_size
        self.shifted = shifted
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window_size - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        position = torch.stack(torch.meshgrid([torch.arange(window_size)] * 2, indexing='ij')).flatten(1)
        offset = position[:, :, None] - position[:, None, :] + window_size - 1
        self.register_buffer(
            'relative_position_index', offset[0] * (2 * window_size - 1) + offset[1], persistent=False)

    def bias(self) -> Tensor:
        """Return the bias of every pair of tokens of a window, (1, num_heads, L, L)."""
        return self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1).unsqueeze(0)

    def shift(self, hw_shape: Tuple[int, int]) -> int:
        """Return by how many tokens a map is rolled: by none where one window covers its height or width."""
        if not self.shifted:
            return 0
        if torch.jit.is_tracing():  # sizes are tensors: a branch on them would hold for all sizes
            return self.window_size // 2 * (torch.stack(hw_shape).amin() > self.window_size).long()
        return self.window_size // 2 if min(hw_shape) > self.window_size else 0

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        height, width = hw_shape
        window = (self.window_size, self.window_size)
        batch, shift = x.shape[0], self.shift(hw_shape)
        x = pad_map(unflatten_tokens(x, 1, hw_shape), window)
        padded_shape = x.shape[1:3]
        x = to_windows(roll_map(x, shift), window)
        bias = self.bias()
        mask = window_mask(hw_shape, window, shift, x.device)
        if mask is not None:
            bias = bias.masked_fill(~mask, float('-inf')).repeat(batch, 1, 1, 1)
        q, k, v = (split_heads(part, self.num_heads) for part in self.project(x))
        x = self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))))
        x = roll_map(from_windows(x, window, padded_shape), -shift)
        return x[:, :height, :width].flatten(1, 2)
