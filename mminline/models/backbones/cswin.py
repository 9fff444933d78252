"""InLine-CSwin: inline blocks over the whole map in early stages, softmax in crossed stripes in late ones."""
from typing import List, Optional, Sequence, Tuple, Union

from mmcv.cnn import build_norm_layer
from torch import Tensor, nn

from mminline.registry import MODELS

from ..layers import CSwinBlock, InLineBranch, LinearBranch, StripeBranch, pad_to_multiple, unflatten_tokens
from .base import (
    NormedPyramid,
    check_attn_types,
    check_per_stage,
    check_positive,
    drop_path_ramp,
    init_as_authors,
    resolve_arch,
)

ARCHS = {
    'tiny': dict(embed_dims=(64, 128, 256, 512), num_heads=(2, 4, 8, 16), depths=(2, 4, 18, 1),
                 attn_types=('inline', 'inline', 'softmax', 'softmax')),
    'small': dict(embed_dims=(64, 128, 256, 512), num_heads=(2, 4, 8, 16), depths=(3, 6, 29, 2),
                  attn_types=('inline', 'inline', 'softmax', 'softmax')),
    'base': dict(embed_dims=(96, 192, 384, 768), num_heads=(4, 8, 16, 32), depths=(3, 6, 29, 2),
                 attn_types=('inline', 'inline', 'softmax', 'softmax')),
}
MLP_RATIO = 4
NORM = dict(type='LN')
KINDS = ('inline', 'linear', 'softmax')
# Thickness of softmax stripes in the stages before the third, as in CSwin itself.
EARLY_SPLIT_SIZES = (1, 2)


class Merge(nn.Module):
    """Halves a map: a 3x3 convolution of stride 2, and a norm of the tokens."""

    def __init__(self, embed_dims: int, out_dims: int):
        super().__init__()
        self.conv = nn.Conv2d(embed_dims, out_dims, kernel_size=3, stride=2, padding=1)
        self.norm = build_norm_layer(NORM, out_dims)[1]

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tuple[Tensor, Tuple[int, int]]:
        """Return tokens (B, H/2 * W/2, out_dims), rounded up, and their (H/2, W/2)."""
        x = self.conv(unflatten_tokens(x.transpose(1, 2), 2, hw_shape))
        return self.norm(x.flatten(2).transpose(1, 2)), tuple(x.shape[2:])


class ToTokens(nn.Module):
    """(B, C, H, W) to (B, H*W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


@MODELS.register_module()
class InLineCSwin(NormedPyramid):
    """CSwin with InLine attention (`Bridging the Divide <https://arxiv.org/abs/2412.06590>`_).

    Takes images of any size. Inline blocks see the whole map in one branch; softmax blocks work in vertical
    stripes with one half of the channels and horizontal ones with the other, in stage 4 on the whole map.
    Stages after the last output do not exist.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with the keys ``embed_dims``, ``num_heads``, ``depths`` and
            ``attn_types``, four values each.
        in_channels: Channels of the image.
        attn_types: Attention of each stage, or a tuple of its blocks: 'inline', 'softmax' or 'linear'.
            Default: those of ``arch``.
        local_term: Inline blocks add the local term, a 3x3 convolution with kernels made from the image;
            ``get_v`` does not depend on it.
        center: Inline blocks subtract the means that make their attention injective.
        split_size: Thickness of a softmax stripe of stage 3 in tokens; 12 for the weights made at 384 pixels.
        out_indices: Stages whose maps are returned, of strides 4, 8, 16 and 32, each normalised.
        frozen_stages: Freezes the patch embedding (0) and the first stages (1 ... 4); -1 freezes nothing.
        drop_path_rate: Stochastic depth of the last block; earlier blocks ramp up to it from 0.
        with_cp: Recompute blocks in the backward pass to save memory.
        pad_aware: Images of a padded batch give what they give alone; see :meth:`forward`.
        init_cfg: As in :class:`mminline.models.InLinePVT`.
    """

    def __init__(self, arch: Union[str, dict] = 'tiny', in_channels: int = 3,
                 attn_types: Optional[Sequence] = None, local_term: bool = True, center: bool = True,
                 split_size: int = 7, out_indices: Sequence[int] = (0, 1, 2, 3), frozen_stages: int = -1,
                 drop_path_rate: float = 0., with_cp: bool = False, pad_aware: bool = True,
                 init_cfg: Optional[Union[dict, List[dict]]] = None):
        super().__init__(out_indices, frozen_stages, pad_aware, init_cfg)
        settings = {name: check_per_stage(name, values, self.NUM_STAGES)
                    for name, values in resolve_arch(arch, ARCHS).items()}
        check_positive(in_channels=in_channels, split_size=split_size)
        self.split_sizes = (*EARLY_SPLIT_SIZES, split_size, None)
        self.inline_options = dict(local_term=local_term, center=center)
        embed_dims, depths = settings['embed_dims'], settings['depths']
        kinds = check_attn_types(attn_types or settings['attn_types'], depths, KINDS)
        rates = drop_path_ramp(drop_path_rate, depths)

        self.stage1_conv_embed = nn.Sequential(
            nn.Conv2d(in_channels, embed_dims[0], kernel_size=7, stride=4, padding=2), ToTokens(),
            build_norm_layer(NORM, embed_dims[0])[1])
        for stage in range(self.num_stages):
            dims, heads = embed_dims[stage], settings['num_heads'][stage]
            self.add_module(f'stage{stage + 1}', nn.ModuleList(
                CSwinBlock(self._make_branches(kind, dims, heads, self.split_sizes[stage]), dims, MLP_RATIO, rate,
                           NORM, with_cp)
                for kind, rate in zip(kinds[stage], rates[stage])))
            if stage + 1 < self.num_stages:
                self.add_module(f'merge{stage + 1}', Merge(dims, embed_dims[stage + 1]))
        self.add_norms(embed_dims)
        self.apply(init_as_authors)
        self.freeze_stages()

    def _make_branches(self, kind: str, embed_dims: int, num_heads: int, split_size: Optional[int]) -> tuple:
        if kind == 'inline':
            return (InLineBranch(embed_dims, num_heads, **self.inline_options),)
        if kind == 'linear':
            return (LinearBranch(embed_dims, num_heads),)
        if split_size is None:
            return (StripeBranch(embed_dims, num_heads, None),)
        if num_heads % 2 or embed_dims % num_heads:
            raise ValueError(f'num_heads of stripes in two directions must be even and divide embed_dims={embed_dims}, '
                             f'got {num_heads}')
        return tuple(StripeBranch(embed_dims // 2, num_heads // 2, split_size, vertical) for vertical in (True, False))

    def frozen_modules(self) -> List[Union[nn.Module, nn.Parameter]]:
        frozen = [self.stage1_conv_embed] if self.frozen_stages >= 0 else []
        for stage in range(min(self.frozen_stages, self.num_stages)):
            names = (f'stage{stage + 1}', f'merge{stage + 1}', f'norm{stage}')
            frozen += [getattr(self, name) for name in names if hasattr(self, name)]
        return frozen

    def forward_whole(self, x: Tensor) -> Tuple[Tensor, ...]:
        x = pad_to_multiple(x, 4)
        hw_shape = (x.shape[2] // 4, x.shape[3] // 4)
        x = self.stage1_conv_embed(x)
        outs = []
        for index in range(self.num_stages):
            for block in getattr(self, f'stage{index + 1}'):
                x = block(x, hw_shape)
            if index in self.out_indices:
                outs.append(self.normed_map(index, x, hw_shape))
            if index + 1 < self.num_stages:
                x, hw_shape = getattr(self, f'merge{index + 1}')(x, hw_shape)
        return tuple(outs)
