"""The registries of mminline: children of mmengine's roots with the scope ``mminline``.

Every MM toolbox finds them by the prefix alone: ``type='mminline.InLinePVT'`` in a config makes mmengine
import this module, and the registry then imports its location. A downstream project registers its own
modules here as well::

    from mminline.registry import MODELS

    @MODELS.register_module()
    class MyNeck(BaseModule):
        ...

and names them with the prefix, ``type='mminline.MyNeck'``: without it, a toolbox looks only in its own
registry.
"""
from mmengine.registry import DATASETS as MMENGINE_DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS as MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.registry import OPTIM_WRAPPERS as MMENGINE_OPTIM_WRAPPERS
from mmengine.registry import Registry

MODELS = Registry('model', parent=MMENGINE_MODELS, scope='mminline', locations=['mminline.models'])
DATASETS = Registry('dataset', parent=MMENGINE_DATASETS, scope='mminline', locations=['mminline.datasets'])
HOOKS = Registry('hook', parent=MMENGINE_HOOKS, scope='mminline', locations=['mminline.engine'])
OPTIM_WRAPPERS = Registry(
    'optim_wrapper', parent=MMENGINE_OPTIM_WRAPPERS, scope='mminline', locations=['mminline.engine'])
OPTIM_WRAPPER_CONSTRUCTORS = Registry(
    'optimizer wrapper constructor', parent=MMENGINE_OPTIM_WRAPPER_CONSTRUCTORS, scope='mminline',
    locations=['mminline.engine'])
