"""The toolboxes' data preprocessors, which here also tell the backbone how much of a padded batch each image fills.

A toolbox is imported when its preprocessor is built, not with this module.
"""
import functools
import importlib
from typing import Tuple

import torch
import torch.nn.functional as F
from torch import nn

from mminline.registry import MODELS

from .backbones.base import VALID_SIZE
from .layers.embed import missing_to_multiple

TOTAL_STRIDE = 32


class AttachesValidSize:
    """Mixin before a toolbox's data preprocessor: attaches each image's valid size to the batch.

    The batch gets the attribute ``mminline_valid_size``, a list of (height, width) in pixels: each image's own size,
    rounded up to the backbone's total stride as if it were alone, but not beyond the batch.

    Args:
        stride: Total stride of the backbone: 32, for InLine-DeiT 16.
        kwargs: Arguments of the toolbox's class, which refuses those it does not know.
    """

    def __init__(self, stride: int = TOTAL_STRIDE, **kwargs):
        super().__init__(**kwargs)
        if stride < 1:
            raise ValueError(f'stride must be positive, got {stride}')
        self.stride = stride

    def forward(self, data: dict, training: bool = False) -> dict:
        sizes = [tuple(image.shape[-2:]) for image in data['inputs']]
        data = super().forward(data, training)
        inputs, samples = data['inputs'], data.get('data_samples')
        if samples:  # augmentations of the batch may have resized the images
            sizes = [sample.metainfo.get('img_shape', size)[:2] for sample, size in zip(samples, sizes)]
        setattr(inputs, VALID_SIZE, [self._valid_size(size, inputs.shape[-2:]) for size in sizes])
        return data

    def _valid_size(self, size: Tuple[int, int], batch_size: Tuple[int, int]) -> Tuple[int, int]:
        return tuple(min(edge + missing_to_multiple(edge, self.stride), most) for edge, most in zip(size, batch_size))


class PadsToTheLargest:
    """Mixin before MMSegmentation's data preprocessor, which refuses to test images of different size together."""

    def forward(self, data: dict, training: bool = False) -> dict:
        images, samples = data['inputs'], data.get('data_samples')
        if training or not samples or len({image.shape for image in images}) == 1:
            return super().forward(data, training)
        parts = [super(PadsToTheLargest, self).forward(dict(inputs=[image], data_samples=[sample]))
                 for image, sample in zip(images, samples)]
        shape = tuple(max(part['inputs'].shape[axis] for part in parts) for axis in (2, 3))
        batch, samples = [], []
        for part in parts:
            (sample,), image = part['data_samples'], part['inputs']
            bottom, right = (edge - own for edge, own in zip(shape, image.shape[2:]))
            batch.append(F.pad(image, (0, right, 0, bottom), value=self.pad_val))
            padding = sample.metainfo.get('img_padding_size', (0, 0, 0, 0))  # left, right, top, bottom
            sample.set_metainfo(dict(
                img_padding_size=(padding[0], padding[1] + right, padding[2], padding[3] + bottom), pad_shape=shape))
            samples.append(sample)
        return dict(inputs=torch.cat(batch), data_samples=samples)


@MODELS.register_module()
def DetDataPreprocessor(**kwargs) -> nn.Module:
    """Build MMDetection's ``DetDataPreprocessor`` with :class:`AttachesValidSize`."""
    return _toolbox_class('mmdet', 'DetDataPreprocessor', (AttachesValidSize,))(**kwargs)


@MODELS.register_module()
def SegDataPreprocessor(**kwargs) -> nn.Module:
    """Build MMSegmentation's ``SegDataPreProcessor`` with :class:`AttachesValidSize` and :class:`PadsToTheLargest`."""
    return _toolbox_class('mmseg', 'SegDataPreProcessor', (AttachesValidSize, PadsToTheLargest))(**kwargs)


@functools.cache
def _toolbox_class(toolbox: str, name: str, mixins: Tuple[type, ...]) -> type:
    try:
        base = getattr(importlib.import_module(f'{toolbox}.models'), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'this data preprocessor needs {toolbox}: {error}', name=error.name) from error
    return type(name, (*mixins, base), {})
