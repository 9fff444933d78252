"""InLine-PVT: a pyramid of four stages, each a patch embedding, a position table and blocks."""
from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
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
    unflatten_tokens,
)
from .base import (
    PYRAMID_STRIDES,
    InLineBackbone,
    IntPair,
    check_attn_types,
    check_out_indices,
    check_per_stage,
    check_positive,
    drop_path_ramp,
    init_as_authors,
    map_shape,
    resolve_arch,
    square_shape,
    to_size,
)

ARCHS = {
    'tiny': dict(embed_dims=(64, 128, 320, 512), num_heads=(2, 4, 10, 16), depths=(2, 2, 2, 2),
                 mlp_ratios=(8, 8, 4, 4)),
    'small': dict(embed_dims=(64, 128, 320, 512), num_heads=(2, 4, 10, 16), depths=(3, 4, 6, 3),
                  mlp_ratios=(8, 8, 4, 4)),
    'medium': dict(embed_dims=(64, 128, 320, 512), num_heads=(2, 4, 10, 16), depths=(3, 4, 18, 3),
                   mlp_ratios=(8, 8, 4, 4)),
    'large': dict(embed_dims=(64, 128, 320, 512), num_heads=(2, 4, 10, 16), depths=(3, 8, 27, 3),
                  mlp_ratios=(8, 8, 4, 4)),
}
NUM_STAGES = 4
PATCH_SIZES = (4, 2, 2, 2)
SR_RATIOS = (8, 4, 2, 1)
ATTENTIONS = {'inline': InLineAttention, 'linear': LinearAttention, 'softmax': SoftmaxAttention}


@MODELS.register_module()
class InLinePVT(InLineBackbone):
    """PVT with InLine attention (`Bridging the Divide <https://arxiv.org/abs/2412.06590>`_).

    Takes images of any size, padded at the bottom and right to the strides where they do not divide.
    Stages after the last output do not exist, so every parameter gets a gradient.

    Args:
        arch: 'tiny', 'small', 'medium', 'large', or a dict with the keys ``embed_dims``, ``num_heads``,
            ``depths`` and ``mlp_ratios``, four values each.
        in_channels: Channels of the image.
        attn_types: Attention of each stage, or a tuple of its blocks: 'inline', 'softmax' (with PVT's
            spatial reduction 8, 4, 2, 1) or 'linear'.
        local_term: Inline blocks add the local term, a 3x3 convolution with kernels made from the image.
        center: Inline blocks subtract the means that make their attention injective.
        out_indices: Stages whose maps are returned, of strides 4, 8, 16 and 32.
        frozen_stages: Freezes the first patch embedding and position table (0) and the first stages
            (1 ... 4); -1 freezes nothing.
        drop_path_rate: Stochastic depth of the last block; earlier blocks ramp up to it from 0.
        with_cp: Recompute blocks in the backward pass to save memory.
        pad_aware: Images of a padded batch give what they give alone; see :meth:`forward`.
        pretrain_img_size: Image size, in pixels, that the position tables are laid out for.
        init_cfg: None, ``dict(type='Pretrained', checkpoint=..., min_matched=0.9)`` (see
            :func:`mminline.models.pretrained.load_pretrained`), another mmengine initialiser, or a list.
    """

    def __init__(self, arch: Union[str, dict] = 'tiny', in_channels: int = 3,
                 attn_types: Sequence[str] = ('inline', 'inline', 'inline', 'inline'),
                 local_term: bool = True, center: bool = True, out_indices: Sequence[int] = (0, 1, 2, 3),
                 frozen_stages: int = -1, drop_path_rate: float = 0., with_cp: bool = False, pad_aware: bool = True,
                 pretrain_img_size: IntPair = 224,
                 init_cfg: Optional[Union[dict, List[dict]]] = None):
        super().__init__(frozen_stages, NUM_STAGES, pad_aware, init_cfg)
        settings = {name: check_per_stage(name, values, NUM_STAGES)
                    for name, values in resolve_arch(arch, ARCHS).items()}
        check_positive(in_channels=in_channels)
        embed_dims, depths = settings['embed_dims'], settings['depths']
        attn_types = check_attn_types(attn_types, depths, ATTENTIONS)
        self.out_indices = check_out_indices(out_indices, NUM_STAGES)
        self.out_strides = tuple(PYRAMID_STRIDES[index] for index in self.out_indices)
        self.num_stages = self.out_indices[-1] + 1
        image_size = to_size('pretrain_img_size', pretrain_img_size)
        self.table_shapes = [map_shape(image_size, stride) for stride in PYRAMID_STRIDES[:self.num_stages]]
        rates = drop_path_ramp(drop_path_rate, depths)

        for stage in range(self.num_stages):
            patch_embed = PatchEmbed(
                in_channels if stage == 0 else embed_dims[stage - 1], embed_dims[stage], PATCH_SIZES[stage],
                norm_cfg=dict(type='LN', eps=1e-5))
            height, width = self.table_shapes[stage]
            pos_embed = nn.Parameter(torch.zeros(1, height * width, embed_dims[stage]))
            nn.init.trunc_normal_(pos_embed, std=0.02)
            options = dict(inline=dict(local_term=local_term, center=center), linear={},
                           softmax=dict(sr_ratio=SR_RATIOS[stage]))
            blocks = nn.ModuleList()
            for kind, rate in zip(attn_types[stage], rates[stage]):
                attn = ATTENTIONS[kind](embed_dims[stage], settings['num_heads'][stage], **options[kind])
                blocks.append(Block(attn, embed_dims[stage], settings['mlp_ratios'][stage], rate,
                                    norm_cfg=dict(type='LN', eps=1e-6), with_cp=with_cp))
            setattr(self, f'patch_embed{stage + 1}', patch_embed)
            setattr(self, f'pos_embed{stage + 1}', pos_embed)
            setattr(self, f'block{stage + 1}', blocks)
        self.apply(init_as_authors)
        self.freeze_stages()

    def frozen_modules(self) -> List[Union[nn.Module, nn.Parameter]]:
        frozen = []
        if self.frozen_stages >= 0:
            frozen += [self.patch_embed1, self.pos_embed1]
        for stage in range(1, min(self.frozen_stages, self.num_stages) + 1):
            frozen += [getattr(self, f'{name}{stage}') for name in ('patch_embed', 'pos_embed', 'block')]
        return frozen

    def resize_tables(self, state_dict: Dict[str, Tensor], prefix: str = '') -> List[str]:
        resized = []
        for stage, new_shape in enumerate(self.table_shapes, start=1):
            name = f'{prefix}pos_embed{stage}'
            table = state_dict.get(name)
            if table is not None and table.dim() == 3 and table.shape[1] != new_shape[0] * new_shape[1]:
                state_dict[name] = resize_position_table(table, square_shape(name, table.shape[1]), new_shape)
                resized.append(name)
        return resized

    def forward_whole(self, x: Tensor) -> Tuple[Tensor, ...]:
        outs = []
        for stage in range(self.num_stages):
            x, hw_shape = getattr(self, f'patch_embed{stage + 1}')(x)
            table = getattr(self, f'pos_embed{stage + 1}')
            x = x + resize_position_table(table, self.table_shapes[stage], hw_shape)
            for block in getattr(self, f'block{stage + 1}'):
                x = block(x, hw_shape)
            if stage in self.out_indices:
                outs.append(to_map(x, hw_shape))
            x = unflatten_tokens(x.transpose(1, 2), 2, hw_shape)
        return tuple(outs)
