"""Batch norm where SyncBN cannot run: several processes on the CPU."""
import torch.distributed
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mminline.registry import HOOKS


def replace_sync_bn(model_cfg) -> int:
    """Turns every ``type='SyncBN'`` of a model's config, changed in place, into ``'BN'``; returns how many."""
    if isinstance(model_cfg, dict):
        replaced = int(model_cfg.get('type') == 'SyncBN')
        if replaced:
            model_cfg['type'] = 'BN'
        return replaced + sum(map(replace_sync_bn, model_cfg.values()))
    if isinstance(model_cfg, (list, tuple)):
        return sum(map(replace_sync_bn, model_cfg))
    return 0


@HOOKS.register_module()
class BroadcastBuffersHook(Hook):
    """Before a validation, gives all processes the buffers of the first one, which is the one that saves.

    Running statistics of a plain batch norm differ from process to process: without this hook a validation
    would mix several models, none of which is quite the saved one.
    """

    def before_val_epoch(self, runner: Runner) -> None:
        for buffer in runner.model.buffers():
            torch.distributed.broadcast(buffer, src=0)
