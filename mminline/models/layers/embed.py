"""From pixels or maps to tokens, and the position tables added to them."""
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from torch import Tensor, nn


def missing_to_multiple(size: int, divisor: int) -> int:
    """Return what is missing from ``size`` to a multiple of ``divisor``."""
    # Not -size % divisor: torch 2.13 cannot trace the remainder of a negative symbolic size.
    return (divisor - size % divisor) % divisor


def pad_to_multiple(x: Tensor, divisor: int) -> Tensor:
    """Pad (B, C, height, width) with zeros at the bottom and right until ``divisor`` divides both sizes."""
    bottom, right = (missing_to_multiple(size, divisor) for size in x.shape[-2:])
    # Padding by nothing copies; a compiled or traced graph keeps it, to stay valid for other sizes.
    if not torch.compiler.is_compiling() and not torch.jit.is_tracing() and bottom == right == 0:
        return x
    return F.pad(x, (0, right, 0, bottom))


class PatchEmbed(nn.Module):
    """Patches of patch_size x patch_size pixels to normalised tokens; any size, padded at the bottom and right.

    Args:
        in_channels: Channels of the image or map.
        embed_dims: Channels of the tokens.
        patch_size: Edge of a patch, and the stride.
        norm_cfg: Config of the norm, or None for no norm.
    """

    def __init__(self, in_channels: int, embed_dims: int, patch_size: int, norm_cfg: Optional[dict]):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, embed_dims, kernel_size=patch_size, stride=patch_size)
        # Tokens are channels-last maps: with kernels of that layout the convolution reads and writes them directly.
        self.proj.to(memory_format=torch.channels_last)
        self.norm = nn.Identity() if norm_cfg is None else build_norm_layer(norm_cfg, embed_dims)[1]

    def forward(self, x: Tensor) -> Tuple[Tensor, Tuple[int, int]]:
        """Return tokens (B, H*W, embed_dims) and (H, W) for (B, in_channels, height, width)."""
        x = self.proj(pad_to_multiple(x, self.patch_size))
        return self.norm(x.flatten(2).transpose(1, 2)), tuple(x.shape[-2:])


def unflatten_tokens(x: Tensor, axis: int, hw_shape: Tuple[int, int]) -> Tensor:
    """Return ``x.unflatten(axis, hw_shape)``, which itself would give an ONNX file the traced map's size for ever."""
    return x.reshape(*x.shape[:axis], *hw_shape, *x.shape[axis + 1:])


def to_map(tokens: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
    """Return tokens (B, H*W, C) as a contiguous map (B, C, H, W).

    A view would be a channels-last map, the convolutions of a neck would hand that layout on, and mmcv's RoIAlign
    reads whatever it gets as contiguous NCHW.
    """
    return unflatten_tokens(tokens.transpose(1, 2), 2, hw_shape).contiguous()


def resize_position_table(table: Tensor, old_shape: Tuple[int, int], new_shape: Tuple[int, int],
                          num_prefix_tokens: int = 0) -> Tensor:
    """Resize a table of positions bilinearly, without corner alignment as in the official code.

    Args:
        table: (1, num_prefix_tokens + H*W, C).
        old_shape, new_shape: (H, W) of the map before and after, in tokens.
        num_prefix_tokens: Leading positions (of a class token) that are kept as they are.
    """
    # A traced table serves other sizes too.
    if not torch.jit.is_tracing() and old_shape == new_shape:
        return table
    prefix, image = table[:, :num_prefix_tokens], table[:, num_prefix_tokens:]
    image = image.transpose(1, 2).unflatten(2, old_shape).contiguous()  # 3x faster to resize on a CPU
    image = F.interpolate(image, size=new_shape, mode='bilinear', align_corners=False)
    return torch.cat([prefix, image.flatten(2).transpose(1, 2)], dim=1)
