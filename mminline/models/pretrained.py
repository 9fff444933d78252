"""Reads weights for a backbone from any file its users have, and reports what fitted.

Known files: an official one of the authors (``model``, or ``state_dict_ema``, which they evaluate where it
is present), a checkpoint of an MM toolbox with or without the prefix ``backbone.``, a bare state dict.
"""
import logging
import re
from typing import Dict, NamedTuple, Tuple

from mmengine.logging import print_log
from torch import Tensor, nn

from mminline.safe_loading import load_weights_file

# Parameters that one attention kind has and another has not.
KIND_SPECIFIC = re.compile(r'\.residual\.|\.attn\.(sr|norm)\.|\.relative_position_bias_table$')
# Of a classifier: no backbone has them. Of Swin's windows: computed, not learned.
NOT_OF_A_BACKBONE = re.compile(r'^head\.|\.relative_position_index$|\.attn_mask$')
CONTAINERS = ('state_dict_ema', 'state_dict', 'model')
MIN_MATCHED = 0.9


class LoadReport(NamedTuple):
    """Names of a backbone's parameters by what a file gave them; ``unexpected`` are the file's own."""
    source: str
    matched: Tuple[str, ...]
    resized: Tuple[str, ...]
    missing: Tuple[str, ...]
    unexpected: Tuple[str, ...]

    @property
    def fraction(self) -> float:
        """Share of the parameters that got weights; those of another attention kind do not count."""
        loaded = len(self.matched) + len(self.resized)
        counted = loaded + sum(not KIND_SPECIFIC.search(name) for name in self.missing)
        return loaded / counted if counted else 0.

    def __str__(self) -> str:
        return (f'{self.source}: {len(self.matched)} parameters matched, '
                f'{len(self.resized)} resized{examples(self.resized)}, '
                f'{len(self.missing)} missing{examples(self.missing)}, '
                f'{len(self.unexpected)} unexpected{examples(self.unexpected)}; {self.fraction:.1%} loaded')


def read_state_dict(path: str) -> Tuple[Dict[str, Tensor], str]:
    """Return a file's tensors by the backbone's own names, and which part of the file they come from."""
    content = load_weights_file(path)
    if not isinstance(content, dict):
        raise ValueError(f'{path} holds no weights: it is a {type(content).__name__}, not a dict')
    container = next((name for name in CONTAINERS if isinstance(content.get(name), dict)), None)
    state_dict = {name: value for name, value in (content[container] if container else content).items()
                  if isinstance(value, Tensor)}
    if not state_dict:
        raise ValueError(f'{path} holds no weights: its entries are {sorted(map(str, content))[:10]}')
    # What a wrapper of the model (DistributedDataParallel) or a detector around it put in front.
    for prefix in ('module.', 'backbone.'):
        if any(name.startswith(prefix) for name in state_dict):
            state_dict = {name[len(prefix):]: value for name, value in state_dict.items()
                          if name.startswith(prefix)}
    state_dict = {name: value for name, value in state_dict.items() if not NOT_OF_A_BACKBONE.search(name)}
    return state_dict, f'{path} [{container}]' if container else path


def load_pretrained(backbone: nn.Module, checkpoint: str, min_matched: float = MIN_MATCHED) -> LoadReport:
    """Load a file's weights into a backbone and log one report.

    Args:
        backbone: An :class:`mminline.models.backbones.base.InLineBackbone`.
        checkpoint: Path (or URL, as mmengine takes it) of the file.
        min_matched: Least share of the parameters, in [0, 1], that must get weights. Parameters that only
            another attention kind has (``residual``, ``sr``, ``attn.norm``, bias tables) do not count
            when the file lacks them.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if too little fits, or what fits is not finite; the message names examples.
        pickle.UnpicklingError, RuntimeError: as :func:`mminline.safe_loading.load_weights_file`.
    """
    if not 0 <= min_matched <= 1:
        raise ValueError(f'min_matched must be in [0, 1], got {min_matched}')
    state_dict, source = read_state_dict(checkpoint)
    for official, own in backbone.official_names().items():
        if official in state_dict:
            state_dict[own] = state_dict.pop(official)
    report = check_fit(backbone, state_dict, source, min_matched)
    weights = {name: state_dict[name] for name in report.matched + report.resized}
    check_finite(weights, source)
    backbone.load_state_dict(weights, strict=False)
    print_log(f'pretrained weights: {report}', logger='current',
              level=logging.WARNING if report.missing else logging.INFO)
    return report


def check_fit(backbone: nn.Module, state_dict: Dict[str, Tensor], source: str,
              min_matched: float = MIN_MATCHED) -> LoadReport:
    """Check that enough of a state dict fits a backbone by name and shape, after resizing its position tables.

    Args:
        backbone: An :class:`mminline.models.backbones.base.InLineBackbone`.
        state_dict: Tensors by the backbone's own names; resized tables are put in their place.
        source: What to call it.
        min_matched: As for :func:`load_pretrained`.

    Raises:
        ValueError: if too little fits; the message names examples.
    """
    resized = backbone.resize_tables(state_dict)
    parameters = dict(backbone.named_parameters())
    fitting = {name for name in parameters.keys() & state_dict.keys()
               if state_dict[name].shape == parameters[name].shape}
    report = LoadReport(
        source,
        matched=tuple(name for name in parameters if name in fitting and name not in resized),
        resized=tuple(name for name in parameters if name in fitting and name in resized),
        missing=tuple(name for name in parameters if name not in fitting),
        unexpected=tuple(name for name in state_dict if name not in fitting))
    if report.fraction < min_matched:
        raise ValueError(f'these weights do not fit {type(backbone).__name__}, at least {min_matched:.0%} of the '
                         f'parameters must match (for Pretrained, min_matched in init_cfg): {report}')
    return report


def check_same_parameters(model: nn.Module, state_dict: Dict[str, Tensor], allow_unused: bool = False) -> None:
    """Check that a state dict has exactly the parameters and buffers of a whole model.

    Args:
        allow_unused: The state dict may have more.

    Raises:
        ValueError: if one is missing, unknown or of another shape; the message names one.
    """
    expected, saved = ({name: tuple(tensor.shape) for name, tensor in tensors.items()}
                       for tensors in (model.state_dict(), state_dict))
    names = expected if allow_unused else {*expected, *saved}
    differing = sorted(name for name in names if expected.get(name) != saved.get(name))
    if differing:
        name = differing[0]
        raise ValueError(f'{len(differing)} parameters differ, such as {name}, {saved.get(name, "none")} in the '
                         f'checkpoint and {expected.get(name, "none")} in the model')


def check_finite(state_dict: Dict[str, Tensor], source: str) -> None:
    """Check that no weight is NaN or infinite.

    Raises:
        ValueError: if one is; the message names the source and examples.
    """
    broken = tuple(name for name, value in state_dict.items() if not value.isfinite().all())
    if broken:
        raise ValueError(f'{source} holds weights that are not finite, in {len(broken)} of {len(state_dict)} tensors'
                         f'{examples(broken)}')


def examples(names: Tuple[str, ...]) -> str:
    """Return the first names in brackets; nothing for none."""
    return f' ({", ".join(names[:3])}{", ..." if len(names) > 3 else ""})' if names else ''
