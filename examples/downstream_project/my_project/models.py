"""What this project adds to the models of MMDetection and mminline."""
from typing import Sequence, Tuple

from mmdet.models.necks import FPN
from torch import Tensor, nn

from mminline.models.layers import Block, InLineAttention, to_map

from .registry import MODELS


@MODELS.register_module()
class ContextFPN(FPN):
    """MMDetection's FPN, after a block of InLine attention over the whole of each map.

    Args:
        in_channels: Channels of each map.
        num_heads: Heads of each block.
        kwargs: Other arguments of FPN.
    """

    def __init__(self, in_channels: Sequence[int], num_heads: int = 2, **kwargs):
        super().__init__(in_channels, **kwargs)
        self.blocks = nn.ModuleList(
            Block(InLineAttention(channels, num_heads), channels, mlp_ratio=2, drop_path=0., norm_cfg=dict(type='LN'),
                  with_cp=False)
            for channels in in_channels)

    def forward(self, inputs: Tuple[Tensor, ...]) -> Tuple[Tensor, ...]:
        """Return the pyramid of maps (B, C, H, W)."""
        maps = []
        for x, block in zip(inputs, self.blocks):
            hw_shape = tuple(x.shape[2:])
            maps.append(to_map(block(x.flatten(2).transpose(1, 2), hw_shape), hw_shape))
        return super().forward(tuple(maps))
