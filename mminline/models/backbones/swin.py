"""InLine-Swin: inline blocks over the whole map in early stages, shifted softmax windows in late ones."""
from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from torch import Tensor, nn

from mminline.registry import MODELS

from ..layers import Block, InLineAttention, LinearAttention, PatchEmbed, WindowAttention, pad_map, unflatten_tokens
from .base import (
    NormedPyramid,
    check_attn_types,
    check_per_stage,
    check_positive,
    drop_path_ramp,
    init_as_authors,
    resolve_arch,
    square_shape,
)

ARCHS = {
    'tiny': dict(embed_dims=(96, 192, 384, 768), num_heads=(3, 6, 12, 24), depths=(2, 2, 6, 2),
                 attn_types=('inline', 'inline', 'inline', 'softmax')),
    'small': dict(embed_dims=(96, 192, 384, 768), num_heads=(3, 6, 12, 24), depths=(2, 2, 18, 2),
                  attn_types=('inline', 'inline', 'softmax', 'softmax')),
    'base': dict(embed_dims=(128, 256, 512, 1024), num_heads=(4, 8, 16, 32), depths=(2, 2, 18, 2),
                 attn_types=('inline', 'inline', ('inline',) * 2 + ('softmax',) * 16, 'softmax')),
}
MLP_RATIO = 4
NORM = dict(type='LN')
KINDS = ('inline', 'linear', 'softmax')


class PatchMerging(nn.Module):
    """Joins 2 x 2 tokens into one of ``out_dims`` channels, in the order (0,0), (1,0), (0,1), (1,1)."""

    def __init__(self, embed_dims: int, out_dims: int):
        super().__init__()
        self.norm = build_norm_layer(NORM, 4 * embed_dims)[1]
        self.reduction = nn.Linear(4 * embed_dims, out_dims, bias=False)

    def forward(self, x: Tensor, hw_shape: Tuple[int, int]) -> Tuple[Tensor, Tuple[int, int]]:
        """Return tokens (B, H/2 * W/2, out_dims), rounded up, and their (H/2, W/2)."""
        x = pad_map(unflatten_tokens(x, 1, hw_shape), (2, 2))
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        return self.reduction(self.norm(x.flatten(1, 2))), tuple(x.shape[1:3])


class SwinStage(nn.Module):
    """The blocks of one stage, and the merging that leads to the next."""

    def __init__(self, blocks: Sequence[nn.Module], downsample: Optional[PatchMerging]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample


@MODELS.register_module()
class InLineSwin(NormedPyramid):
    """Swin with InLine attention (`Bridging the Divide <https://arxiv.org/abs/2412.06590>`_).

    Takes images of any size. Inline blocks see the whole map and are never shifted; softmax blocks work in
    windows, every second one shifted. Stages after the last output do not exist.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with the keys ``embed_dims``, ``num_heads``, ``depths`` and
            ``attn_types``, four values each.
        in_channels: Channels of the image.
        attn_types: Attention of each stage, or a tuple of its blocks: 'inline', 'softmax' or 'linear'.
            Default: those of ``arch``.
        local_term: Inline blocks add the local term, a 3x3 convolution with kernels made from the image.
        center: Inline blocks subtract the means that make their attention injective.
        window_size: Edge of a softmax window in tokens; 12 for the weights made at 384 pixels.
        out_indices: Stages whose maps are returned, of strides 4, 8, 16 and 32, each normalised.
        frozen_stages: Freezes the patch embedding (0) and the first stages (1 ... 4); -1 freezes nothing.
        drop_path_rate: Stochastic depth of the last block; earlier blocks ramp up to it from 0.
        with_cp: Recompute blocks in the backward pass to save memory.
        pad_aware: Images of a padded batch give what they give alone; see :meth:`forward`.
        init_cfg: As in :class:`mminline.models.InLinePVT`.
    """

    def __init__(self, arch: Union[str, dict] = 'tiny', in_channels: int = 3,
                 attn_types: Optional[Sequence] = None, local_term: bool = True, center: bool = True,
                 window_size: int = 7, out_indices: Sequence[int] = (0, 1, 2, 3), frozen_stages: int = -1,
                 drop_path_rate: float = 0., with_cp: bool = False, pad_aware: bool = True,
                 init_cfg: Optional[Union[dict, List[dict]]] = None):
        super().__init__(out_indices, frozen_stages, pad_aware, init_cfg)
        settings = {name: check_per_stage(name, values, self.NUM_STAGES)
                    for name, values in resolve_arch(arch, ARCHS).items()}
        check_positive(in_channels=in_channels, window_size=window_size)
        self.window_size = window_size
        self.inline_options = dict(local_term=local_term, center=center)
        embed_dims, depths = settings['embed_dims'], settings['depths']
        kinds = check_attn_types(attn_types or settings['attn_types'], depths, KINDS)
        rates = drop_path_ramp(drop_path_rate, depths)

        self.patch_embed = PatchEmbed(in_channels, embed_dims[0], 4, norm_cfg=NORM)
        self.layers = nn.ModuleList()
        for stage in range(self.num_stages):
            dims, heads = embed_dims[stage], settings['num_heads'][stage]
            blocks = [
                Block(self._make_attention(kind, dims, heads, index), dims, MLP_RATIO, rate, NORM, with_cp)
                for index, (kind, rate) in enumerate(zip(kinds[stage], rates[stage]))]
            downsample = PatchMerging(dims, embed_dims[stage + 1]) if stage + 1 < self.num_stages else None
            self.layers.append(SwinStage(blocks, downsample))
        self.add_norms(embed_dims)
        self.apply(init_as_authors)
        self.freeze_stages()

    def _make_attention(self, kind: str, embed_dims: int, num_heads: int, index: int) -> nn.Module:
        if kind == 'softmax':
            return WindowAttention(embed_dims, num_heads, self.window_size, shifted=index % 2 == 1)
        if kind == 'linear':
            return LinearAttention(embed_dims, num_heads, joint_qkv=True)
        return InLineAttention(embed_dims, num_heads, joint_qkv=True, **self.inline_options)

    def frozen_modules(self) -> List[Union[nn.Module, nn.Parameter]]:
        frozen = [self.patch_embed] if self.frozen_stages >= 0 else []
        for stage in range(min(self.frozen_stages, len(self.layers))):
            frozen.append(self.layers[stage])
            if stage in self.out_indices:
                frozen.append(getattr(self, f'norm{stage}'))
        return frozen

    def resize_tables(self, state_dict: Dict[str, Tensor], prefix: str = '') -> List[str]:
        resized = []
        edge = 2 * self.window_size - 1
        for name, parameter in self.named_parameters(prefix.rstrip('.')):
            table = state_dict.get(name) if name.endswith('relative_position_bias_table') else None
            if table is None or table.dim() != 2 or table.shape[0] == parameter.shape[0]:
                continue
            image = table.t().unflatten(1, square_shape(name, table.shape[0])).unsqueeze(0)
            image = F.interpolate(image, size=(edge, edge), mode='bicubic', align_corners=False)
            state_dict[name] = image[0].flatten(1).t()
            resized.append(name)
        return resized

    def forward_whole(self, x: Tensor) -> Tuple[Tensor, ...]:
        x, hw_shape = self.patch_embed(x)
        outs = []
        for index, stage in enumerate(self.layers):
            for block in stage.blocks:
                x = block(x, hw_shape)
            if index in self.out_indices:
                outs.append(self.normed_map(index, x, hw_shape))
            if stage.downsample is not None:
                x, hw_shape = stage.downsample(x, hw_shape)
        return tuple(outs)
