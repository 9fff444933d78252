"""Builds the model of a config: with a run's weights, or only its structure."""
import copy
import pickle
from pathlib import Path
from typing import Optional, Union

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, MODELS, DefaultScope
from torch import Tensor, nn

from .models.pretrained import check_finite, check_same_parameters
from .preflight import RunError, check_names, explain_unknown_name
from .runs import drop_pretrained, innermost_dataset
from .safe_loading import load_weights_file


def build_model(cfg: Config) -> nn.Module:
    """Build a config's model.

    Raises:
        RunError: if the config names something unknown.
    """
    return build_part(cfg, cfg.model)


def build_part(cfg: Config, part: dict) -> nn.Module:
    """As :func:`build_model`, for a part of the model, such as ``cfg.model.backbone``."""
    check_names(cfg)
    try:
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            return MODELS.build(part)
    except KeyError as error:
        raise explain_unknown_name(error) or error from error


def build_on_meta(cfg: Config) -> nn.Module:
    """As :func:`build_model`, on the meta device, which takes no memory and computes nothing."""
    with torch.device('meta'):
        return build_model(cfg)


def load_model(cfg: Config, checkpoint: Union[str, Path], device: Optional[str] = None) -> nn.Module:
    """Build a config's model for inference, with the weights of a run.

    Args:
        cfg: A config of MMDetection or MMSegmentation; it is left as it is.
        checkpoint: A file that a run saved, or one made of it by :func:`mminline.publish.publish_checkpoint`.
        device: As torch names it; by default the accelerator, if there is one.

    Returns:
        The model, in evaluation mode. Its ``dataset_meta`` has the ``classes`` that the checkpoint names (else those
        of the config's test data) and the ``palette`` of the config's test data (``'random'`` if that has none).

    Raises:
        RunError: if the checkpoint cannot be read or does not fit the model, or if there is no such device.
    """
    device = _find_device(device or get_device())
    content = read_checkpoint(checkpoint)
    cfg = copy.deepcopy(cfg)
    drop_pretrained(cfg.model)
    model = revert_sync_batchnorm(build_model(cfg))
    check_fit(model, content, checkpoint, cfg)
    model.load_state_dict(content['state_dict'])
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        dataset_meta = DATASETS.build(dict(innermost_dataset(cfg), lazy_init=True)).metainfo  # reads no file
    trained_on = (content.get('meta') or {}).get('dataset_meta') or {}
    model.dataset_meta = {'palette': 'random', **dataset_meta, **{
        key.lower(): value for key, value in trained_on.items() if key.lower() == 'classes'}}
    return model.to(device).eval()


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        raise RunError(f'cannot use the device {name}: {str(error).splitlines()[0]}') from error
    return device


# ---- a run's checkpoint -------------------------------------------------------------------------------
def read_checkpoint(path: Union[str, Path]) -> dict:
    """Read a file that a run saved, without running anything that is in it.

    Raises:
        RunError: if it cannot be read, or is no checkpoint of a run.
    """
    try:
        content = load_weights_file(path)
    except (FileNotFoundError, pickle.UnpicklingError, RuntimeError) as error:
        raise RunError(str(error)) from error
    state_dict = content.get('state_dict') if isinstance(content, dict) else None
    if not isinstance(state_dict, dict) or not all(isinstance(value, Tensor) for value in state_dict.values()):
        raise RunError(f'{path} is no checkpoint of a run: it has no state_dict of tensors')
    return content


def check_fit(model: nn.Module, content: dict, checkpoint: Union[str, Path], cfg: Config) -> None:
    """Check that a checkpoint has exactly the parameters and buffers of a model, and that all are finite.

    Raises:
        RunError: if one is missing, unknown, of another shape or not finite.
    """
    try:
        check_same_parameters(model, content['state_dict'])
    except ValueError as error:
        raise RunError(f'the weights in {checkpoint} are not those of the model of {cfg.filename}: {error}. '
                       "The run's own config is in its work dir.") from None
    try:
        check_finite(content['state_dict'], str(checkpoint))
    except ValueError as error:
        raise RunError(str(error)) from None
