"""This project's registry: a child of mmengine's, found by the prefix in ``type='my_project.ContextFPN'``."""
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import Registry

MODELS = Registry('model', parent=MMENGINE_MODELS, scope='my_project', locations=['my_project.models'])
