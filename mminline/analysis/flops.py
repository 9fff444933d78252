"""Multiply-adds and parameters of a config's model, part by part.

As "FLOPs" are given in this field, a multiply-add counts as one, and what counts are the convolutions, matrix
products and attention of one image's inference; normalisation, activations, resizing and RoIAlign do not. PyTorch's
``FlopCounterMode`` counts them on the meta device, where nothing is computed: it takes a second, no memory, and
gives the same number whatever backend the attention op would run on.
"""
import os
import re
from collections import Counter
from contextlib import contextmanager
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from mmengine.config import Config
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import mminline.ops  # noqa: F401  torch.ops.mminline
from mminline.build import build_on_meta
from mminline.models.layers.embed import missing_to_multiple

# MMDetection's convention for two-stage detectors.
NUM_PROPOSALS = 1000
NUM_MASK_ROIS = 100
DETECTION_SHAPE = (800, 1280)  # stands for test images of 1333x800
SEGMENTATION_SHAPE = (512, 512)

# Parts of a backbone by the names of its modules and parameters; the first that matches counts, else it is 'other'
# (norms and position tables, which multiply nothing).
BACKBONE_PARTS = {
    'patch embedding, merging': r'^patch_embed|^stage1_conv_embed|^merge\d|\.downsample\.',
    'projections': r'\.(q|kv|qkv|proj|sr)(\.|$)',
    'attention, global': r'\.attns?(\.\d+)?(\.relative_position_bias_table)?$',
    'attention, local': r'\.(residual|get_v)(\.|$)',
    'MLP': r'\.mlp\.',
}


class Part(NamedTuple):
    """What one part of a model costs, such as ``('backbone', 'MLP')`` or ``('roi_head.mask_head', '')``."""
    module: str
    kind: str
    multiply_adds: int
    parameters: int
    growth: Optional[float]  # its multiply-adds for twice the tokens, as a multiple; None if not counted


class Complexity(NamedTuple):
    """What a model costs for one image of ``shape`` = (height, width) pixels."""
    shape: Tuple[int, int]
    parts: List[Part]

    @property
    def multiply_adds(self) -> int:
        return sum(part.multiply_adds for part in self.parts)

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    def __str__(self) -> str:
        return f'total: {self.multiply_adds / 1e9:.1f} G multiply-adds, {self.parameters / 1e6:.1f} M parameters'


# ---- a config -----------------------------------------------------------------------------------------
def analyse_config(cfg: Config, shape: Optional[Sequence[int]] = None, with_growth: bool = True) -> Complexity:
    """Return what a config's model costs for one image.

    Two-stage detectors are counted by MMDetection's convention, with 1000 proposals and 100 mask RoIs in every
    stage of their heads, whatever proposals the weights would give. Segmentors are counted for the whole image at
    once; their auxiliary heads, which only training runs, have parameters but no multiply-adds.

    Args:
        cfg: A config of MMDetection or MMSegmentation.
        shape: (height, width) of the image in pixels. Default: :func:`default_shape`. Detectors pad it as their
            config says.
        with_growth: Count an image of twice the width as well, for the growth.

    Raises:
        RunError: if the config names something unknown.
        ValueError: if the shape is not two positive numbers.
        NotImplementedError: for a two-stage detector with other heads than MMDetection's standard and cascade ones.
    """
    model = build_on_meta(cfg)
    if getattr(model, 'with_roi_head', False):
        model = TwoStageInference(model)
    shape = check_shape(shape or default_shape(cfg))
    divisor = cfg.model.get('data_preprocessor', {}).get('pad_size_divisor', 1)
    padded = [size + missing_to_multiple(size, divisor) for size in shape]
    return analyse_model(model, padded, with_growth)._replace(shape=shape)


def default_shape(cfg: Config) -> Tuple[int, int]:
    """Return the (height, width), in pixels, that a config's model is usually counted at.

    Detection: the scale of the test pipeline, and 800x1280 for the usual 1333x800. Segmentation: the crop.
    """
    if cfg.default_scope == 'mmseg':
        return tuple(cfg.model.get('data_preprocessor', {}).get('size') or SEGMENTATION_SHAPE)
    scale = next((transform.get('scale') for transform in cfg.get('test_pipeline', ())
                  if transform['type'] == 'Resize'), None)
    return DETECTION_SHAPE if scale is None or tuple(scale) == (1333, 800) else (min(scale), max(scale))


def check_shape(shape: Sequence[int]) -> Tuple[int, int]:
    """Return (height, width) as a tuple of two positive ints."""
    shape = tuple(shape)
    if len(shape) != 2 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f'shape must be a positive height and width in pixels, got {shape}')
    return shape


class TwoStageInference(nn.Module):
    """What MMDetection's convention counts of a two-stage detector.

    The RoI heads get features of a fixed number of boxes: what boxes the RPN finds depends on its weights, and
    cutting features out of the maps is not counted.
    """

    def __init__(self, detector: nn.Module):
        super().__init__()
        kind = type(detector.roi_head).__name__
        if kind not in ('StandardRoIHead', 'CascadeRoIHead') or detector.roi_head.with_shared_head:
            raise NotImplementedError(
                f'can count StandardRoIHead and CascadeRoIHead without a shared head, got {kind}')
        self.backbone = detector.backbone
        self.neck = detector.neck if detector.with_neck else nn.Identity()
        self.rpn_head = detector.rpn_head
        self.roi_head = detector.roi_head

    def forward(self, image: Tensor) -> None:
        self.rpn_head(self.neck(self.backbone(image)))
        roi_head = self.roi_head
        self._run_on_rois(image, roi_head.bbox_roi_extractor, roi_head.bbox_head, NUM_PROPOSALS)
        if roi_head.with_mask:
            self._run_on_rois(image, roi_head.mask_roi_extractor, roi_head.mask_head, NUM_MASK_ROIS)

    @staticmethod
    def _run_on_rois(image: Tensor, extractors: nn.Module, heads: nn.Module, num_rois: int) -> None:
        if not isinstance(heads, nn.ModuleList):  # a cascade has one of each per stage
            extractors, heads = [extractors], [heads]
        for extractor, head in zip(extractors, heads):
            head(image.new_empty(num_rois, extractor.out_channels, *extractor.roi_layers[0].output_size))


# ---- any model ----------------------------------------------------------------------------------------
def analyse_model(model: nn.Module, shape: Sequence[int], with_growth: bool = True) -> Complexity:
    """Return what a model on the meta device costs for one image of (height, width) pixels.

    Args:
        model: A module that takes an image, with a ``backbone`` and any other parts.
        shape: Height and width in pixels.
        with_growth: Count an image of twice the width as well, for the growth.
    """
    height, width = shape
    costs = count_multiply_adds(model, shape)
    doubled = count_multiply_adds(model, (height, 2 * width)) if with_growth else {}
    parameters = Counter()
    for name, parameter in model.named_parameters():
        parameters[_part_of(name)] += parameter.numel()
    # Modules in the model's order, kinds in the table's.
    modules = [module for module, _ in [*parameters, *costs]]
    kinds = [*BACKBONE_PARTS, 'other', '']
    names = sorted({*parameters, *costs}, key=lambda name: (modules.index(name[0]), kinds.index(name[1])))
    parts = [Part(*name, costs[name], parameters[name], doubled[name] / costs[name] if name in doubled else None)
             for name in names]
    return Complexity(tuple(shape), parts)


def count_multiply_adds(model: nn.Module, shape: Sequence[int]) -> Counter:
    """Count a model's multiply-adds by (module, kind) for one image, see :class:`Part`.

    Args:
        model: As of :func:`analyse_model`, on the meta device.
        shape: Height and width in pixels.
    """
    model.eval()
    formula = flop_registry[torch.ops.mminline.inline_attention]
    local_terms = 0

    def global_term(q, k, v, local_weight, *settings, **_) -> int:
        nonlocal local_terms
        flops = formula(q, k, v, None, *settings)
        local_terms += formula(q, k, v, local_weight, *settings) - flops
        return flops

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.mminline.inline_attention: global_term})
    with _any_backend(), torch.no_grad(), counter:
        model(torch.empty(1, 3, *shape, device='meta'))
    costs = Counter({('backbone', 'attention, local'): local_terms})
    for name, flops in _own_flops(counter).items():
        costs[_part_of(name)] += flops
    # The counter counts 2 per multiply-add; + drops what has none.
    return +Counter({part: flops // 2 for part, flops in costs.items()})


@contextmanager
def _any_backend() -> Iterator[None]:
    """Lets no environment variable ask for a backend that cannot run on the meta device."""
    name = 'MMINLINE_BACKEND'
    before = os.environ.get(name)
    os.environ[name] = 'aten'
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _own_flops(counter: FlopCounterMode) -> Counter:
    """Return what each module computes outside of its submodules, by the name of the module."""
    totals = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items() if name != 'Global'}
    own = Counter(totals)
    for name, flops in totals.items():
        parent = name.rpartition('.')[0]
        while parent and parent not in totals:  # a list of modules is not called
            parent = parent.rpartition('.')[0]
        if parent:
            own[parent] -= flops
    # The counter's names begin with the class of the model.
    return Counter({name.partition('.')[2]: flops for name, flops in own.items()})


def _part_of(name: str) -> Tuple[str, str]:
    """Return the (module, kind) that a name counts for: 'backbone.block1.0.mlp.fc1' is ('backbone', 'MLP')."""
    module, _, rest = name.partition('.')
    if module == 'roi_head':
        return f'{module}.{rest.partition(".")[0]}', ''
    if module != 'backbone':
        return module, ''
    return module, next((kind for kind, pattern in BACKBONE_PARTS.items() if re.search(pattern, rest)), 'other')


# ---- for the reader -----------------------------------------------------------------------------------
def complexity_table(complexity: Complexity) -> Table:
    """A table of all parts, for rich to print."""
    height, width = complexity.shape
    table = Table(title=f'One image of {width}x{height} pixels (width x height)', title_justify='left')
    table.add_column('part', no_wrap=True)
    for column in ('multiply-adds\nG', 'share', 'growth\nN to 2N', 'parameters\nM'):
        table.add_column(column, justify='right')

    def add(label: str, parts: List[Part], style: Optional[str] = None) -> None:
        cost = sum(part.multiply_adds for part in parts)
        doubled = sum(part.multiply_adds * part.growth for part in parts if part.growth is not None)
        table.add_row(label, f'{cost / 1e9:.2f}', f'{cost / complexity.multiply_adds:.1%}',
                      f'{doubled / cost:.2f}x' if cost else '',
                      f'{sum(part.parameters for part in parts) / 1e6:.2f}', style=style)

    for module in dict.fromkeys(part.module for part in complexity.parts):
        parts = [part for part in complexity.parts if part.module == module]
        add(module, parts)
        for part in parts:
            if part.kind:
                add(f'  {part.kind}', [part], style='dim')
    add('total', complexity.parts, style='bold')
    return table


def complexity_dict(complexity: Complexity) -> dict:
    """The same in plain numbers, for JSON."""
    return dict(shape=list(complexity.shape), multiply_adds=complexity.multiply_adds,
                parameters=complexity.parameters, parts=[part._asdict() for part in complexity.parts])
