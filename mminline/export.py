"""Trained models as ONNX files, each compared in ONNX Runtime with PyTorch before it gets its name.

What is exported takes images as the model's data preprocessor leaves them, normalised and (B, C, height, width), and
ends where the toolboxes' own post-processing begins.
"""
import copy
import os
import warnings
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from mmengine.config import Config
from torch import Tensor, nn

from .build import load_model
from .preflight import RunError

PARTS = ('whole', 'backbone')
OPSET = 18
# Shapes are (B, height, width). Some checked ones need padding; on the last, windows of 7 are shifted in all stages.
TRACED_SHAPE = (2, 64, 96)
CHECKED_SHAPES = ((1, 96, 64), (3, 65, 43), (1, 288, 260))
CHECKED_BATCHES = (1, 3)  # where height and width are fixed
TOLERANCE = 1e-4  # relative to the norm of an output


class ExportReport(NamedTuple):
    """What :func:`export_onnx` wrote."""
    path: Path
    model: str  # what was exported
    axes: Tuple[Union[int, str], ...]  # of the input: sizes, and the names of dynamic axes
    outputs: Tuple[str, ...]
    error: float  # the largest relative error of an output, against PyTorch
    checked_shapes: Tuple[Tuple[int, int, int], ...]  # (B, height, width) of the images it was measured with

    def __str__(self) -> str:
        axes = ', '.join(map(str, self.axes))
        shapes = ', '.join(map(_by, self.checked_shapes))
        return (f'{self.path}: {self.model}, image ({axes}) to {", ".join(self.outputs)}; '
                f'{self.path.stat().st_size / 1e6:.1f} MB; relative error {self.error:.1e} in ONNX Runtime at {shapes}')


def export_onnx(cfg: Config, checkpoint: Union[str, Path], out: Union[str, Path], part: str = 'whole',
                shape: Optional[Tuple[int, int]] = None) -> ExportReport:
    """Write a trained model, or its backbone, as one ONNX file.

    The input is ``image``, (B, C, height, width), normalised. The outputs are, by part and kind of model,

    - backbone: ``map_0``, ``map_1`` and so on, the maps of its ``out_indices``;
    - segmentor: ``logits``, (B, classes, height, width), as from MMSegmentation's ``encode_decode``;
    - detector: ``cls_score_0``, ... and ``bbox_pred_0``, ..., what the dense head (RetinaNet's own, Mask R-CNN's RPN)
      returns for each map of the neck; of a detector with RoI heads also these maps, ``map_0``, ...

    Args:
        cfg: A config of MMDetection or MMSegmentation.
        checkpoint: A file that a run saved, or one made of it by :func:`mminline.publish.publish_checkpoint`.
        out: The .onnx file; one that is there is replaced.
        part: 'whole' or 'backbone'.
        shape: Height and width in pixels, for a file that takes no other. Default: any. The batch is of any size.

    Raises:
        RunError: if ONNX or ONNX Runtime is missing, ``out`` is no place for the file, the checkpoint does not fit, the
            model cannot be exported, or the file does not compute what PyTorch does. Nothing is written then.
        OSError: if the file cannot be written.
    """
    if part not in PARTS:
        raise ValueError(f'part must be one of {PARTS}, got {part!r}')
    if shape is not None and min(shape) < 1:
        raise ValueError(f'shape must be positive, got {tuple(shape)}')
    out = Path(out)
    _check_place(out)
    _check_packages()
    model = load_model(cfg, checkpoint, device='cpu')
    checked_shapes = CHECKED_SHAPES if shape is None else tuple((batch, *shape) for batch in CHECKED_BATCHES)
    unfinished = out.with_name(f'.{out.name}-{os.getpid()}.unfinished')
    try:
        _trace(model, part, shape, unfinished)
        axes, outputs, error = _compare(unfinished, _exported_part(model, part), checked_shapes)
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    backbone = type(model.backbone).__name__
    name = f'{type(model).__name__} with {backbone}' if part == 'whole' else backbone
    return ExportReport(out, name, axes, outputs, error, checked_shapes)


def _by(shape: Sequence[int]) -> str:
    return 'x'.join(map(str, shape))


def _check_place(out: Path) -> None:
    if out.suffix != '.onnx':
        raise RunError(f'{out}: the name of the file must end in .onnx')
    if not out.parent.is_dir():
        raise RunError(f'{out}: there is no folder {out.parent}')
    if out.is_dir():
        raise RunError(f'{out} is a folder')


def _check_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise RunError(f"the export needs onnx and onnxruntime: {error}\n"
                       "pip install 'mminline[export]' installs them") from error


# ---- what is exported ---------------------------------------------------------------------------------
class ExportedPart(nn.Module):
    """Images to the outputs of a file; a subclass implements :meth:`outputs`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tuple[Tensor, ...]:
        return tuple(self.outputs(image).values())

    def outputs(self, image: Tensor) -> Dict[str, Tensor]:
        """Return the outputs by name."""
        raise NotImplementedError


class BackboneMaps(ExportedPart):
    """The maps of a model's backbone."""

    def outputs(self, image: Tensor) -> Dict[str, Tensor]:
        return _numbered('map', self.model.backbone(image))


class SegmentorLogits(ExportedPart):
    """A segmentor's logits, one map of the image's size per class."""

    def outputs(self, image: Tensor) -> Dict[str, Tensor]:
        logits = self.model.decode_head(self.model.extract_feat(image))
        return dict(logits=F.interpolate(
            logits, size=image.shape[2:], mode='bilinear', align_corners=self.model.align_corners))


class DetectorMaps(ExportedPart):
    """What a detector's dense head makes of the neck's maps, and the maps themselves if RoI heads take them up."""

    def outputs(self, image: Tensor) -> Dict[str, Tensor]:
        maps = self.model.extract_feat(image)
        cls_scores, bbox_preds = _dense_head(self.model)(maps)
        return {**(_numbered('map', maps) if hasattr(self.model, 'roi_head') else {}),
                **_numbered('cls_score', cls_scores), **_numbered('bbox_pred', bbox_preds)}


def _numbered(name: str, tensors: Sequence[Tensor]) -> Dict[str, Tensor]:
    return {f'{name}_{index}': tensor for index, tensor in enumerate(tensors)}


def _dense_head(detector: nn.Module) -> nn.Module:
    return detector.rpn_head if hasattr(detector, 'rpn_head') else detector.bbox_head


def _exported_part(model: nn.Module, part: str) -> ExportedPart:
    if part == 'backbone':
        return BackboneMaps(model)
    if hasattr(model, 'decode_head') and not isinstance(model.decode_head, nn.ModuleList):
        return SegmentorLogits(model)
    if hasattr(model, 'rpn_head') or hasattr(model, 'bbox_head'):
        from mmdet.models.dense_heads.anchor_head import AnchorHead
        if isinstance(_dense_head(model), AnchorHead):
            return DetectorMaps(model)
    raise RunError(f'{type(model).__name__} can only be exported without its heads (--part backbone); known are '
                   'segmentors with one decode head and detectors with anchors')


# ---- layers whose tracing would fix the size ----------------------------------------------------------
class AdaptiveAveragePool(nn.Module):
    """``nn.AdaptiveAvgPool2d`` as a product with one matrix of averages per axis, since ONNX has it for no size but 1.

    Args:
        output_size: Height and width of the output, or one number for both.
    """

    def __init__(self, output_size: Union[int, Tuple[int, int]]):
        super().__init__()
        self.output_size = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (
            averaging_matrix(size, output_size, x) for size, output_size in zip(x.shape[2:], self.output_size))
        return rows @ x @ columns.t()


def averaging_matrix(size: int, output_size: int, like: Tensor) -> Tensor:
    """Return the matrix (output_size, size) that averages ``size`` values in ``output_size`` bins, as
    ``F.adaptive_avg_pool1d`` lays them: from floor(i * size / output_size) to ceil((i + 1) * size / output_size)."""
    edges = torch.arange(output_size + 1, device=like.device) * size
    first, end = edges[:-1] // output_size, (edges[1:] + output_size - 1) // output_size
    position = torch.arange(size, device=like.device)
    inside = (position >= first[:, None]) & (position < end[:, None])
    return inside.to(like.dtype) / (end - first)[:, None]


def _follow_any_size(segmentor: nn.Module) -> None:
    from mmseg.models.utils import Upsample
    for module in list(segmentor.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.AdaptiveAvgPool2d):
                setattr(module, name, AdaptiveAveragePool(child.output_size))
            elif isinstance(child, Upsample):  # rounds sizes with int(), which makes them constants
                setattr(module, name, nn.Upsample(child.size, child.scale_factor, child.mode, child.align_corners))


# ---- tracing and comparing ----------------------------------------------------------------------------
def _trace(model: nn.Module, part: str, shape: Optional[Tuple[int, int]], path: Path) -> None:
    model = copy.deepcopy(model)
    if hasattr(model, 'decode_head'):
        _follow_any_size(model)
    traced = _exported_part(model, part).eval()
    batch, *size = TRACED_SHAPE
    image = _random_image(traced, (batch, *(shape or size)))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # each branch on a size, in checks too; and that this exporter is the older one
        names = list(traced.outputs(image))
        axes = {name: {0: 'batch'} for name in ('image', *names)}
        if shape is None:
            for name in names:
                axes[name].update({2: f'{name}_height', 3: f'{name}_width'})
            for name in {'image', 'logits'} & {*axes}:
                axes[name].update({2: 'height', 3: 'width'})
        try:
            # Not dynamo=True: tried with torch 2.13, its symbolic sizes took minutes instead of seconds, and the
            # windows of Swin and CSwin ended in an error.
            torch.onnx.export(
                traced, (image,), path, dynamo=False, input_names=['image'], output_names=names, dynamic_axes=axes,
                opset_version=OPSET)
        except Exception as error:  # whatever the exporter does not know comes out of it in its own way
            advice = '' if shape else ' for images of any size (--shape H W exports it for one)'
            raise RunError(f'{type(model).__name__} cannot be exported{advice}: {_root_cause(error)}') from error


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    message, _, _ = str(error).strip().partition('\n')
    return f'{type(error).__name__}: {message}'


def _random_image(module: nn.Module, shape: Tuple[int, int, int]) -> Tensor:
    in_channels = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d)).in_channels
    batch, height, width = shape
    return torch.randn(batch, in_channels, height, width, generator=torch.Generator().manual_seed(height))


def _compare(path: Path, module: ExportedPart, shapes: Sequence[Tuple[int, int, int]]
             ) -> Tuple[Tuple[Union[int, str], ...], Tuple[str, ...], float]:
    """Return the axes of a file's input, the names of its outputs, and the largest relative error of one of them."""
    import onnxruntime
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    (image_input,) = session.get_inputs()
    names = tuple(output.name for output in session.get_outputs())
    errors = []
    for shape in shapes:
        image = _random_image(module, shape)
        with torch.no_grad():
            expected = module.outputs(image)
        try:
            found = session.run(names, {image_input.name: image.numpy()})
        except Exception as error:
            raise RunError(f'the exported model takes no images of {_by(shape)}: {_root_cause(error)}') from error
        for name, values in zip(names, found):
            if values.shape != tuple(expected[name].shape):
                raise RunError(f'the exported model gives {name} as {_by(values.shape)} for images of {_by(shape)}, '
                               f'PyTorch as {_by(expected[name].shape)}')
            error = (torch.from_numpy(values) - expected[name]).norm() / expected[name].norm()
            if not error <= TOLERANCE:
                raise RunError(
                    f'the exported model differs from PyTorch by {error:.1e} in {name}, for images of {_by(shape)}')
            errors.append(float(error))
    return tuple(image_input.shape), names, max(errors)
