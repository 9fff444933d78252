"""Learning rates that fall from the heads to the first layers of a backbone."""
import re
from collections import Counter
from typing import Dict, List, Optional, Tuple, Union

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn

from mminline.preflight import did_you_mean
from mminline.registry import OPTIM_WRAPPER_CONSTRUCTORS

DECAY_TYPES = ('layer_wise', 'stage_wise')
OWN_OPTIONS = ('decay_rate', 'decay_type', 'num_layers')
INHERITED_OPTIONS = ('custom_keys', 'bias_lr_mult', 'bias_decay_mult', 'norm_decay_mult', 'flat_decay_mult',
                     'dwconv_decay_mult', 'dcn_offset_lr_mult', 'bypass_duplicate')

# How the backbones name a block: PVT block1.0, Swin layers.0.blocks.0, CSwin stage1.0, DeiT blocks.0.
BLOCK = re.compile(r'(?P<stage>block\d|layers\.\d\.blocks|stage\d|blocks)\.(?P<index>\d+)\.')
# What leads to a later stage, and what to add to its number for the index of that stage, from 0.
LEADS_TO_STAGE = (
    (re.compile(r'(?:patch_embed|pos_embed)([2-4])\b'), -1),  # PVT
    (re.compile(r'layers\.(\d)\.downsample\.'), 1),  # Swin
    (re.compile(r'merge(\d)\.'), 0),  # CSwin
)
EMBEDDING = re.compile(r'(?:patch_embed1?|pos_embed1?|cls_token|stage1_conv_embed)\b')
OUTPUT_NORM = re.compile(r'norm\d?\.')


def backbone_layers(backbone: nn.Module, decay_type: str = 'layer_wise') -> Tuple[Dict[str, int], int]:
    """Return the layer of each of a backbone's parameters, and the number of layers n: 0 is the embedding of the
    image, 1 ... n are the blocks (or stages), n + 1 are the norms of the outputs.

    What lies between two stages (an embedding with its position table, a merging) counts with the block it leads to.

    Args:
        backbone: An InLinePVT, InLineSwin, InLineCSwin or InLineDeiT.
        decay_type: 'layer_wise', where every block is a layer, or 'stage_wise', where every stage is one.

    Raises:
        ValueError: If a parameter has a name that these backbones do not use.
    """
    names = [name for name, _ in backbone.named_parameters()]
    blocks = dict.fromkeys(match[0] for match in map(BLOCK.match, names) if match)
    depths = Counter(BLOCK.match(block)['stage'] for block in blocks)  # in the order of the stages
    stages = list(depths)
    starts = {}  # layer of the first block of each stage
    for index, stage in enumerate(stages):
        starts[stage] = 1 + (index if decay_type == 'stage_wise' else sum(depths[before] for before in stages[:index]))
    last = len(stages) if decay_type == 'stage_wise' else sum(depths.values())

    def layer_of(name: str) -> int:
        block = BLOCK.match(name)
        if block:
            return starts[block['stage']] + (int(block['index']) if decay_type == 'layer_wise' else 0)
        if OUTPUT_NORM.match(name):
            return last + 1
        for pattern, offset in LEADS_TO_STAGE:
            match = pattern.match(name)
            if match:
                return starts[stages[int(match[1]) + offset]]
        if EMBEDDING.match(name):
            return 0
        raise ValueError(f'learning rates by layer are for the backbones of mminline; {type(backbone).__name__} has a '
                         f'parameter {name!r}, which is in none of their layers')

    return {name: layer_of(name) for name in names}, last


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Multiplies the learning rate by ``decay_rate`` for each layer from the heads down to the image's embedding.

    For example::

        optim_wrapper = dict(
            constructor='mminline.LayerDecayOptimWrapperConstructor',
            optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
            paramwise_cfg=dict(decay_rate=0.9, norm_decay_mult=0.))

    Parameters of layer i of n get ``lr * decay_rate ** (n + 1 - i)``, with the layers of :func:`backbone_layers`;
    norms of the outputs, neck and heads get ``lr``. Weight decay and other multipliers are those of mmengine's
    constructor. Parameters with the same settings make one group, which knows its ``lr_scale`` and ``param_names``.

    Args:
        optim_wrapper_cfg: Config of the optimiser wrapper, with that of the optimiser.
        paramwise_cfg: ``decay_rate``, in (0, 1]; optionally ``decay_type``, 'layer_wise' (default) or 'stage_wise',
            and ``num_layers``, the number of blocks (or stages) that the backbone is held against; and all options of
            :class:`mmengine.optim.DefaultOptimWrapperConstructor`.

    Raises:
        ValueError: If an option is unknown or has another value, or the optimiser has no ``lr``; and, when a model
            comes, if its backbone is none of this project's, or has another number of layers.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: Optional[dict] = None):
        super().__init__(optim_wrapper_cfg, paramwise_cfg)
        for name in self.paramwise_cfg:
            if name not in OWN_OPTIONS + INHERITED_OPTIONS:
                raise ValueError(f'paramwise_cfg has no option {name!r}'
                                 f'{did_you_mean(name, OWN_OPTIONS + INHERITED_OPTIONS)}')
        self.decay_rate = self.paramwise_cfg.get('decay_rate')
        if not isinstance(self.decay_rate, (int, float)) or not 0 < self.decay_rate <= 1:
            raise ValueError(f'paramwise_cfg needs a decay_rate in (0, 1], got {self.decay_rate!r}')
        self.decay_type = self.paramwise_cfg.get('decay_type', 'layer_wise')
        if self.decay_type not in DECAY_TYPES:
            raise ValueError(f'decay_type must be one of {DECAY_TYPES}, got {self.decay_type!r}')
        if self.base_lr is None:
            raise ValueError('learning rates by layer need an lr in the config of the optimizer')

    def add_params(self, params: List[dict], module: nn.Module, prefix: str = '',
                   is_dcn_module: Optional[Union[int, float]] = None) -> None:
        """Add the parameters of a model to ``params``; arguments as in mmengine, which calls it for each submodule."""
        super().add_params(params, module, prefix, is_dcn_module)
        if prefix:
            return
        names = {parameter: name for name, parameter in module.named_parameters()}
        scales = self._scales(module)
        groups = {}
        for group in params:  # of one parameter each
            [parameter] = group.pop('params')
            name = names[parameter]
            scale = scales.get(name, 1.0)
            settings = {**group, 'lr_scale': scale, 'lr': group.get('lr', self.base_lr) * scale}
            merged = groups.setdefault(repr(sorted(settings.items())), dict(settings, params=[], param_names=[]))
            merged['params'].append(parameter)
            merged['param_names'].append(name)
        params[:] = groups.values()

    def _scales(self, model: nn.Module) -> Dict[str, float]:
        """Return the factor on the learning rate of each parameter of the model's backbone."""
        if not hasattr(model, 'backbone'):
            raise ValueError(f'learning rates by layer need a model with a backbone, got {type(model).__name__}')
        layers, num_layers = backbone_layers(model.backbone, self.decay_type)
        expected = self.paramwise_cfg.get('num_layers', num_layers)
        if expected != num_layers:
            raise ValueError(f'{type(model.backbone).__name__} has {num_layers} layers to decay over '
                             f'({self.decay_type}), paramwise_cfg says num_layers={expected}')
        print_log(f'learning rates fall by {self.decay_rate} over {num_layers} layers of the backbone '
                  f'({self.decay_type}), to {self.base_lr * self.decay_rate ** (num_layers + 1):.3g}', logger='current')
        return {f'backbone.{name}': self.decay_rate ** (num_layers + 1 - layer) for name, layer in layers.items()}
