"""Builds the model of a config where only its structure is asked for."""
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from .preflight import check_names, explain_unknown_name


def build_on_meta(cfg: Config) -> nn.Module:
    """Build a config's model on the meta device, which takes no memory and computes nothing.

    Raises:
        RunError: if the config names something unknown.
    """
    check_names(cfg)
    try:
        with DefaultScope.overwrite_default_scope(cfg.default_scope), torch.device('meta'):
            return MODELS.build(cfg.model)
    except KeyError as error:
        raise explain_unknown_name(error) or error from error
