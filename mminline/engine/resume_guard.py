"""A resumed run must be the run that was stopped."""
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner

from mminline.registry import HOOKS


@HOOKS.register_module()
class ResumeGuardHook(Hook):
    """Refuses to resume from a checkpoint whose tensors have other shapes than the model's.

    Weights of another image size can be loaded, since position tables are resized, but the optimiser's
    state cannot follow them: without this hook the first step would fail deep inside the optimiser.
    ``tools/train.py --resume`` adds it.
    """

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if not runner._resume:
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        saved = checkpoint.get('state_dict', checkpoint)
        for name, value in model.state_dict().items():
            if name in saved and saved[name].shape != value.shape:
                raise ValueError(
                    f'cannot resume: {name} is {tuple(saved[name].shape)} in the checkpoint and '
                    f'{tuple(value.shape)} in this model. To start a new run from its weights instead, '
                    f'use --cfg-options load_from=CHECKPOINT without --resume.')
