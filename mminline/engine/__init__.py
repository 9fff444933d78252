"""What acts around the models during a run: hooks, optimiser wrappers and their constructors."""
from .checkpoint import SafeCheckpointHook
from .layer_decay import LayerDecayOptimWrapperConstructor
from .precision import AmpOptimWrapper
from .precision_guard import PrecisionGuardHook
from .resume_guard import ResumeGuardHook
from .sync_bn import BroadcastBuffersHook, replace_sync_bn

__all__ = ['AmpOptimWrapper', 'BroadcastBuffersHook', 'LayerDecayOptimWrapperConstructor', 'PrecisionGuardHook',
           'ResumeGuardHook', 'SafeCheckpointHook', 'replace_sync_bn']
