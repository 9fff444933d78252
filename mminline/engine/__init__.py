"""What acts around the models during a run: hooks, optimiser wrappers and their constructors."""
from .checkpoint import SafeCheckpointHook
from .checkpoint_guard import CheckpointGuardHook
from .layer_decay import LayerDecayOptimWrapperConstructor
from .precision import AmpOptimWrapper
from .precision_guard import PrecisionGuardHook
from .sync_bn import BroadcastBuffersHook, replace_sync_bn

__all__ = ['AmpOptimWrapper', 'BroadcastBuffersHook', 'CheckpointGuardHook', 'LayerDecayOptimWrapperConstructor',
           'PrecisionGuardHook', 'SafeCheckpointHook', 'replace_sync_bn']
