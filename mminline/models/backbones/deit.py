"""InLine-DeiT: plain transformer of one scale with a class token."""
from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
from mmcv.cnn import build_norm_layer
from torch import Tensor, nn

from mminline.registry import MODELS

from ..layers import (
    Block,
    InLineAttention,
    LinearAttention,
    PatchEmbed,
    SoftmaxAttention,
    resize_position_table,
    to_map,
)
from .base import (
    InLineBackbone,
    IntPair,
    check_attn_types,
    check_out_indices,
    check_positive,
    drop_path_ramp,
    init_as_authors,
    map_shape,
    resolve_arch,
    square_shape,
    to_size,
)

ARCHS = {
    'tiny': dict(embed_dims=192, num_heads=6, depth=12, pretrain_img_size=224),
    'small': dict(embed_dims=320, num_heads=10, depth=12, pretrain_img_size=288),
    'base': dict(embed_dims=384, num_heads=12, depth=12, pretrain_img_size=448),
}
PATCH_SIZE = 16
MLP_RATIO = 4
NORM = dict(type='LN', eps=1e-6)
ATTENTIONS = {'inline': InLineAttention, 'linear': LinearAttention, 'softmax': SoftmaxAttention}


@MODELS.register_module()
class InLineDeiT(InLineBackbone):
    """DeiT with InLine attention (`Bridging the Divide <https://arxiv.org/abs/2412.06590>`_).

    Takes images of any size; all maps have stride 16 (see :class:`mminline.models.SimplePyramid` for a
    pyramid). The class token takes part in attention and is left out of the maps. Blocks after the last
    output do not exist.

    Args:
        arch: 'tiny', 'small', 'base', or a dict with the keys ``embed_dims``, ``num_heads``, ``depth`` and
            ``pretrain_img_size``.
        in_channels: Channels of the image.
        attn_types: One stage: one kind for all blocks, or one tuple of a kind per block; 'inline', 'softmax'
            or 'linear'.
        local_term: Inline blocks add the local term, a 3x3 convolution with kernels made from the image.
        center: Inline blocks subtract the means that make their attention injective.
        out_indices: Blocks whose maps are returned; the last of them goes through the final norm.
        frozen_stages: Freezes the embedding (0) and the first blocks (1 ... depth); -1 freezes nothing.
        drop_path_rate: Stochastic depth of the last block; earlier blocks ramp up to it from 0.
        with_cp: Recompute blocks in the backward pass to save memory.
        pad_aware: Images of a padded batch give what they give alone; see :meth:`forward`.
        pretrain_img_size: Image size, in pixels, that the position table is laid out for. Default: that of
            ``arch``.
        init_cfg: As in :class:`mminline.models.InLinePVT`.
    """

    def __init__(self, arch: Union[str, dict] = 'tiny', in_channels: int = 3, attn_types: Sequence = ('inline',),
                 local_term: bool = True, center: bool = True, out_indices: Sequence[int] = (11,),
                 frozen_stages: int = -1, drop_path_rate: float = 0., with_cp: bool = False, pad_aware: bool = True,
                 pretrain_img_size: Optional[IntPair] = None,
                 init_cfg: Optional[Union[dict, List[dict]]] = None):
        settings = resolve_arch(arch, ARCHS)
        embed_dims, depth = settings['embed_dims'], settings['depth']
        check_positive(in_channels=in_channels)
        super().__init__(frozen_stages, depth, pad_aware, init_cfg)
        (kinds,) = check_attn_types(attn_types, (depth,), ATTENTIONS)
        self.out_indices = check_out_indices(out_indices, depth)
        self.out_strides = (PATCH_SIZE,) * len(self.out_indices)
        image_size = to_size('pretrain_img_size', pretrain_img_size or settings['pretrain_img_size'])
        self.table_shape = map_shape(image_size, PATCH_SIZE)
        (rates,) = drop_path_ramp(drop_path_rate, (depth,))

        self.patch_embed = PatchEmbed(in_channels, embed_dims, PATCH_SIZE, norm_cfg=None)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dims))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.table_shape[0] * self.table_shape[1], embed_dims))
        for parameter in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(parameter, std=0.02)
        options = dict(inline=dict(local_term=local_term, center=center), linear={}, softmax={})
        self.blocks = nn.ModuleList()
        for kind, rate in zip(kinds[:self.out_indices[-1] + 1], rates):
            attn = ATTENTIONS[kind](embed_dims, settings['num_heads'], joint_qkv=True, num_prefix_tokens=1,
                                    **options[kind])
            self.blocks.append(Block(attn, embed_dims, MLP_RATIO, rate, NORM, with_cp))
        self.norm = build_norm_layer(NORM, embed_dims)[1]
        self.apply(init_as_authors)
        self.freeze_stages()

    def frozen_modules(self) -> List[Union[nn.Module, nn.Parameter]]:
        frozen = [self.patch_embed, self.cls_token, self.pos_embed] if self.frozen_stages >= 0 else []
        return frozen + list(self.blocks[:max(self.frozen_stages, 0)])

    def resize_tables(self, state_dict: Dict[str, Tensor], prefix: str = '') -> List[str]:
        name = f'{prefix}pos_embed'
        table = state_dict.get(name)
        if table is None or table.dim() != 3 or table.shape[1] == self.pos_embed.shape[1]:
            return []
        old_shape = square_shape(name, table.shape[1] - 1)
        state_dict[name] = resize_position_table(table, old_shape, self.table_shape, num_prefix_tokens=1)
        return [name]

    def forward_whole(self, x: Tensor) -> Tuple[Tensor, ...]:
        x, hw_shape = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + resize_position_table(self.pos_embed, self.table_shape, hw_shape, num_prefix_tokens=1)
        outs = []
        for index, block in enumerate(self.blocks):
            x = block(x, hw_shape)
            if index in self.out_indices:
                out = self.norm(x) if index == self.out_indices[-1] else x
                outs.append(to_map(out[:, 1:], hw_shape))
        return tuple(outs)
