"""A pyramid of maps from the one map of a plain backbone."""
from typing import List, Optional, Sequence, Tuple, Union

import torch.nn.functional as F
from mmcv.cnn import ConvModule, build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn

from mminline.registry import MODELS

NUM_SCALES = 4  # strides 4, 8, 16 and 32
NORM = dict(type='mminline.LayerNorm2d')


@MODELS.register_module()
class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of each position of a map (B, C, H, W).

    Takes the place of GroupNorm where one image shall not depend on the padding of its batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Contiguous: mmcv's RoIAlign reads channels-last maps wrongly.
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


@MODELS.register_module()
class SimplePyramid(BaseModule):
    """Maps of strides 4, 8, 16, 32 (and 64 ...) from one of stride 16, as in `ViTDet
    <https://arxiv.org/abs/2203.16527>`_.

    The map is enlarged by transposed convolutions (x4, x2), kept, and halved by max pooling; each scale then
    has a 1x1 and a 3x3 convolution with norms. It takes the place of FPN behind a backbone like
    :class:`mminline.models.InLineDeiT`: Mask R-CNN takes five maps (``num_outs=5``), UperNet four.

    Args:
        in_channels: Channels of the backbone's map; a multiple of 4.
        out_channels: Channels of every map of the pyramid.
        num_outs: Number of maps, at least 4. Those after the fourth are the last map, subsampled, as in FPN.
        norm_cfg: Config of the norms; None for none. Default: LayerNorm over the channels.
        init_cfg: Initialiser of mmengine. Default: that of mmcv's ConvModule.
    """

    def __init__(self, in_channels: int, out_channels: int, num_outs: int = NUM_SCALES,
                 norm_cfg: Optional[dict] = NORM, init_cfg: Optional[Union[dict, List[dict]]] = None):
        super().__init__(init_cfg)
        if in_channels < 4 or in_channels % 4:
            raise ValueError(f'in_channels must be a multiple of 4, got {in_channels}')
        if out_channels < 1:
            raise ValueError(f'out_channels must be positive, got {out_channels}')
        if num_outs < NUM_SCALES:
            raise ValueError(f'num_outs must be at least {NUM_SCALES}, got {num_outs}')
        self.in_channels = in_channels
        self.num_outs = num_outs

        half, quarter = in_channels // 2, in_channels // 4
        norm = [build_norm_layer(norm_cfg, half)[1]] if norm_cfg else []
        self.scales = nn.ModuleList([
            nn.Sequential(enlarge(in_channels, half), *norm, nn.GELU(), enlarge(half, quarter)),
            enlarge(in_channels, half),
            nn.Identity(),
            # The rest of an odd map has a position of its own, as in the backbones' strides.
            nn.MaxPool2d(kernel_size=2, stride=2, ceil_mode=True),
        ])
        self.convs = nn.ModuleList(
            nn.Sequential(ConvModule(channels, out_channels, 1, norm_cfg=norm_cfg, act_cfg=None),
                          ConvModule(out_channels, out_channels, 3, padding=1, norm_cfg=norm_cfg, act_cfg=None))
            for channels in (quarter, half, in_channels, in_channels))

    def forward(self, inputs: Sequence[Tensor]) -> Tuple[Tensor, ...]:
        """Return ``num_outs`` maps (B, out_channels, ...) of 4H x 4W, 2H x 2W, H x W, H/2 x W/2 (rounded up)
        and so on, for the backbone's maps, of which the last one is used: (B, in_channels, H, W)."""
        if isinstance(inputs, Tensor):
            raise TypeError(f'SimplePyramid takes a tuple of maps, got a tensor of shape {tuple(inputs.shape)}')
        x = inputs[-1]
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f'SimplePyramid takes maps (B, {self.in_channels}, H, W), got {tuple(x.shape)}')
        outs = [conv(scale(x)) for scale, conv in zip(self.scales, self.convs)]
        while len(outs) < self.num_outs:
            outs.append(F.max_pool2d(outs[-1], kernel_size=1, stride=2))
        return tuple(outs)


def enlarge(in_channels: int, out_channels: int) -> nn.ConvTranspose2d:
    """A layer that doubles a map's height and width."""
    return nn.ConvTranspose2d(in_channels, out_channels, kernel_size=2, stride=2)
