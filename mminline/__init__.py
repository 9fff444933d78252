"""InLine attention backbones for MMDetection and MMSegmentation.

Importing this package registers nothing yet: the registries of :mod:`mminline.registry` import the
modules when a config first names one (``type='mminline.InLinePVT'``). It needs torch, mmengine and mmcv
(or mmcv-lite), neither mmcv's compiled ops nor a toolbox.
"""
from .safe_loading import allow_run_checkpoints
from .version import __version__

# torch reads checkpoints with weights_only=True; a run's checkpoint holds a few more names than tensors.
allow_run_checkpoints()

__all__ = ['__version__']
