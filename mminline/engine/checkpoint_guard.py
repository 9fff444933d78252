"""A checkpoint must be that of the model which it is loaded into."""
from typing import Iterator, Tuple

from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import Runner
from torch import Tensor, nn

from mminline.models.backbones.base import InLineBackbone
from mminline.models.pretrained import check_finite, check_fit, check_same_parameters
from mminline.preflight import RunError
from mminline.registry import HOOKS


@HOOKS.register_module()
class CheckpointGuardHook(Hook):
    """Refuses a checkpoint of another model, or one with weights that are not finite.

    mmengine only warns where parameters do not fit, and goes on with those of an untrained model. ``tools/train.py``
    and ``tools/test.py`` add this hook. Weights of another image size can be tested and trained on, since position
    tables are resized, but not resumed: the optimiser's state could not follow them.

    To test a model, a checkpoint may have more than its parameters: test-time augmentation leaves the mask head out.

    Args:
        starts_training: ``load_from`` gives a training its first weights: heads may differ, such as those for other
            classes, but the backbones must fit as with ``init_cfg=dict(type='Pretrained')``. Without meaning for a
            run that is resumed.

    Raises:
        RunError: When such a checkpoint was read, before it is used.
    """

    def __init__(self, starts_training: bool = False):
        self.starts_training = starts_training

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        model = runner.model
        while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
            model = model.module
        saved = {name.removeprefix('module.'): value
                 for name, value in checkpoint.get('state_dict', checkpoint).items() if isinstance(value, Tensor)}
        source = runner._load_from or f'the latest checkpoint of {runner.work_dir}'
        try:
            if runner._resume:
                check_same_parameters(model, saved)
            elif self.starts_training:
                for prefix, backbone in backbones(model):
                    check_fit(backbone, {name.removeprefix(prefix): value for name, value in saved.items()
                                         if name.startswith(prefix)}, source)
            else:
                for prefix, backbone in backbones(model):
                    backbone.resize_tables(saved, prefix)  # as loading does
                check_same_parameters(model, saved, allow_unused=True)
            check_finite(saved, source)
        except ValueError as error:
            if runner._resume:
                raise RunError(f'cannot resume from {source}: {error}. To start a new run from its weights instead, '
                               'use --cfg-options load_from=CHECKPOINT without --resume.') from None
            raise RunError(f'cannot use {source}: {error}') from None


def backbones(model: nn.Module) -> Iterator[Tuple[str, InLineBackbone]]:
    """Yield this project's backbones of a model, and what the names of their parameters begin with."""
    for name, module in model.named_modules():
        if isinstance(module, InLineBackbone):
            yield f'{name}.', module
