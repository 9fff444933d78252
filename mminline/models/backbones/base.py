"""What the backbones share: checked arguments, frozen stages, and weights that fit any position table."""
import math
from difflib import get_close_matches
from numbers import Real
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmengine.logging import print_log
from mmengine.model import BaseModule, initialize
from torch import Tensor, nn

from ..layers import to_map
from ..pretrained import load_pretrained

PYRAMID_STRIDES = (4, 8, 16, 32)
IntPair = Union[int, Tuple[int, int]]
# Attribute of a batched image tensor that :mod:`mminline.models.data_preprocessors` sets: a list of the valid
# (height, width) of each image in pixels.
VALID_SIZE = 'mminline_valid_size'


def resolve_arch(arch: Union[str, dict], table: Dict[str, dict]) -> dict:
    """Return the settings of a named size, or a dict of exactly the table's keys as it is."""
    if isinstance(arch, str):
        if arch not in table:
            near = get_close_matches(arch, table, n=1)
            hint = f'; did you mean {near[0]!r}?' if near else ''
            raise ValueError(f'arch must be one of {sorted(table)} or a dict, got {arch!r}{hint}')
        return dict(table[arch])
    if not isinstance(arch, dict):
        raise TypeError(f'arch must be a str or a dict, got {type(arch).__name__}')
    keys = set(next(iter(table.values())))
    if set(arch) != keys:
        raise ValueError(f'an arch dict needs exactly the keys {sorted(keys)}, got {sorted(arch)}')
    check_positive(**{name: value for name, value in arch.items() if name != 'attn_types'})
    return dict(arch)


def check_positive(**sizes: Union[float, Sequence[float]]) -> None:
    """Check numbers, or sequences of numbers, by the names of their arguments."""
    for name, value in sizes.items():
        numbers = value if isinstance(value, Sequence) else (value,)
        if not all(isinstance(number, Real) and number > 0 for number in numbers):
            raise ValueError(f'{name} must be positive, got {value!r}')


def check_per_stage(name: str, values: Sequence, num_stages: int) -> Tuple:
    """Return ``values`` as a tuple of one value per stage."""
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != num_stages:
        raise ValueError(f'{name} must have {num_stages} values, one per stage, got {values!r}')
    return tuple(values)


def check_attn_types(attn_types: Sequence, depths: Sequence[int], known: Sequence[str]) -> List[Tuple[str, ...]]:
    """Return the attention kind of every block of every stage.

    Args:
        attn_types: Per stage one kind for all of its blocks, or a tuple of one kind per block.
        depths: Blocks of each stage.
        known: The kinds there are.
    """
    per_block = []
    for kinds, depth in zip(check_per_stage('attn_types', attn_types, len(depths)), depths):
        kinds = (kinds,) * depth if isinstance(kinds, str) else tuple(kinds)
        if len(kinds) != depth:
            raise ValueError(f'attn_types of a stage must be one word or {depth}, one per block, got {kinds!r}')
        for kind in kinds:
            if kind not in known:
                raise ValueError(f'attn_types must be of {sorted(known)}, got {kind!r}')
        per_block.append(kinds)
    return per_block


def check_out_indices(out_indices: Sequence[int], num_stages: int) -> Tuple[int, ...]:
    """Return the output indices: at least one, ascending, in [0, num_stages)."""
    out_indices = tuple(out_indices)
    if not out_indices or out_indices != tuple(sorted(set(out_indices))) \
            or out_indices[0] < 0 or out_indices[-1] >= num_stages:
        raise ValueError(f'out_indices must be ascending indices in [0, {num_stages}), got {out_indices}')
    return out_indices


def check_probability(name: str, value: float) -> float:
    """Return a rate that lies in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f'{name} must be in [0, 1), got {value}')
    return value


def drop_path_ramp(drop_path_rate: float, depths: Sequence[int]) -> List[List[float]]:
    """Return the stochastic depth of every block of every stage, from 0 up to ``drop_path_rate``."""
    # The rates are numbers even where the model is built without memory, under torch.device('meta').
    rates = torch.linspace(0, check_probability('drop_path_rate', drop_path_rate), sum(depths), device='cpu')
    return [part.tolist() for part in rates.split(list(depths))]


def to_size(name: str, size: IntPair) -> Tuple[int, int]:
    """Return (height, width) for a positive int or pair of them, in pixels."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f'{name} must be a positive int or (height, width), got {size!r}')
    return pair


def square_shape(name: str, num_tokens: int) -> Tuple[int, int]:
    """Return the (H, W) of a stored position table, which files keep as a number of tokens only."""
    size = math.isqrt(num_tokens)
    if size * size != num_tokens:
        raise ValueError(f'{name} has {num_tokens} positions, which is no square map: it cannot be resized')
    return size, size


def map_shape(image_size: Tuple[int, int], stride: int) -> Tuple[int, int]:
    """Return (H, W) in tokens of an image of (height, width) pixels, padded to the stride."""
    return math.ceil(image_size[0] / stride), math.ceil(image_size[1] / stride)


def group_by_size(valid_size: Sequence[Tuple[int, int]], batch_shape: Sequence[int]
                  ) -> Dict[Tuple[int, int], List[int]]:
    """Return the images of each valid size.

    Args:
        valid_size: (height, width) of each image, in pixels.
        batch_shape: (B, C, height, width) of the batch.
    """
    sizes = [tuple(size) for size in valid_size]
    if len(sizes) != batch_shape[0]:
        raise ValueError(f'valid_size must have one (height, width) for each of {batch_shape[0]} images, got {sizes}')
    groups: Dict[Tuple[int, int], List[int]] = {}
    for image, size in enumerate(sizes):
        if len(size) != 2 or not all(1 <= edge <= whole for edge, whole in zip(size, batch_shape[2:])):
            raise ValueError(f'valid_size must lie between (1, 1) and {tuple(batch_shape[2:])}, got {size}')
        groups.setdefault(size, []).append(image)
    return groups


class InLineBackbone(BaseModule):
    """Base of the backbones.

    A subclass implements :meth:`forward_whole`, :meth:`frozen_modules` and, where it has tables that depend on a
    map's size, :meth:`resize_tables`; it sets ``out_strides``, the stride of each output map.

    A global attention, and a position table that is stretched over the map, see all of a batch's padding. With
    ``pad_aware`` they see none of it: images of one valid size are cut out of the batch and go through the layers
    together, as they would alone, and their maps are padded with zeros.
    """
    out_strides: Tuple[int, ...]

    def __init__(self, frozen_stages: int, max_frozen_stages: int, pad_aware: bool,
                 init_cfg: Optional[Union[dict, List[dict]]]):
        super().__init__(init_cfg)
        self.pad_aware = pad_aware
        if not -1 <= frozen_stages <= max_frozen_stages:
            raise ValueError(f'frozen_stages must be in [-1, {max_frozen_stages}], got {frozen_stages}')
        self.frozen_stages = frozen_stages
        self.register_load_state_dict_pre_hook(_resize_tables_before_loading)

    def forward(self, x: Tensor, valid_size: Optional[Sequence[Tuple[int, int]]] = None) -> Tuple[Tensor, ...]:
        """Return the maps of ``out_indices``, (B, C, H, W) each, for a batch of images.

        Args:
            x: Images (B, in_channels, height, width), padded at the bottom and right to one size.
            valid_size: Each image's own (height, width) in pixels; what lies outside does not exist, and the maps are
                zero there. Default: what our data preprocessors attach to ``x``, or else the whole batch. Has no
                effect with ``pad_aware=False``.
        """
        if valid_size is None:
            valid_size = getattr(x, VALID_SIZE, None)
        if valid_size is None or not self.pad_aware:
            return self.forward_whole(x)
        groups = group_by_size(valid_size, x.shape)
        if all(size == tuple(x.shape[2:]) for size in groups):
            return self.forward_whole(x)
        outs = [[None] * len(x) for _ in self.out_strides]
        shapes = [map_shape(x.shape[2:], stride) for stride in self.out_strides]
        for (height, width), images in groups.items():
            maps = self.forward_whole(x[images, :, :height, :width])
            for out, part, shape in zip(outs, maps, shapes):
                padded = F.pad(part, (0, shape[1] - part.shape[3], 0, shape[0] - part.shape[2]))
                for image, one in zip(images, padded):
                    out[image] = one
        return tuple(torch.stack(out) for out in outs)

    def forward_whole(self, x: Tensor) -> Tuple[Tensor, ...]:
        """Return the maps of ``out_indices``, (B, C, H, W) each, for images (B, in_channels, height, width) of which
        every pixel is valid."""
        raise NotImplementedError

    def frozen_modules(self) -> List[Union[nn.Module, nn.Parameter]]:
        """Return the modules and parameters that ``frozen_stages`` freezes."""
        raise NotImplementedError

    def official_names(self) -> Dict[str, str]:
        """Return what this backbone calls parameters that have another name in the official files."""
        return {}

    def resize_tables(self, state_dict: Dict[str, Tensor], prefix: str = '') -> List[str]:
        """Resize tables in ``state_dict`` that were made for another size.

        Args:
            state_dict: A checkpoint's tensors; resized tables are put in their place.
            prefix: What this backbone's names begin with there, such as ``'backbone.'``.

        Returns:
            The names of the resized tables.
        """
        return []

    def init_weights(self) -> None:
        """Apply ``init_cfg``: None keeps the authors' initialisation, ``Pretrained`` reads any known file."""
        configs: List[Dict[str, Any]] = [self.init_cfg] if isinstance(self.init_cfg, dict) else self.init_cfg or []
        pretrained = [config for config in configs if config['type'] == 'Pretrained']
        initialize(self, [config for config in configs if config['type'] != 'Pretrained'])
        for config in pretrained:
            load_pretrained(self, **{key: value for key, value in config.items() if key != 'type'})
        self._is_init = True

    def freeze_stages(self) -> None:
        """Take the frozen parts out of training; a subclass calls it when it is built."""
        for frozen in self.frozen_modules():
            frozen.requires_grad_(False)
            if isinstance(frozen, nn.Module):
                frozen.eval()

    def train(self, mode: bool = True) -> 'InLineBackbone':
        super().train(mode)
        self.freeze_stages()
        return self


class NormedPyramid(InLineBackbone):
    """A pyramid of four stages whose output maps each have a LayerNorm, ``norm0`` ... ``norm3``.

    The official files have one final norm, which is the last stage's; the others begin as identity.
    """
    NUM_STAGES = 4

    def __init__(self, out_indices: Sequence[int], frozen_stages: int, pad_aware: bool,
                 init_cfg: Optional[Union[dict, List[dict]]]):
        super().__init__(frozen_stages, self.NUM_STAGES, pad_aware, init_cfg)
        self.out_indices = check_out_indices(out_indices, self.NUM_STAGES)
        self.out_strides = tuple(PYRAMID_STRIDES[index] for index in self.out_indices)
        self.num_stages = self.out_indices[-1] + 1

    def add_norms(self, embed_dims: Sequence[int]) -> None:
        """Make the norms of the output maps; ``embed_dims`` are the channels of each stage."""
        for index in self.out_indices:
            self.add_module(f'norm{index}', build_norm_layer(dict(type='LN'), embed_dims[index])[1])

    def normed_map(self, index: int, x: Tensor, hw_shape: Tuple[int, int]) -> Tensor:
        """Return output ``index`` as a map (B, C, H, W) for tokens (B, N, C)."""
        return to_map(getattr(self, f'norm{index}')(x), hw_shape)

    def official_names(self) -> Dict[str, str]:
        return {f'norm.{name}': f'norm{self.NUM_STAGES - 1}.{name}' for name in ('weight', 'bias')}


def _resize_tables_before_loading(module: InLineBackbone, state_dict: Dict[str, Tensor], prefix: str, *_) -> None:
    for name in module.resize_tables(state_dict, prefix):
        print_log(f'resized {name} of the checkpoint to this model\'s map', logger='current')


def init_as_authors(module: nn.Module) -> None:
    """Initialise one module: linear layers truncated normal with deviation 0.02 and zero bias."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
