"""The backbones; each is registered as ``mminline.<name>``."""
from .cswin import InLineCSwin
from .deit import InLineDeiT
from .pvt import InLinePVT
from .swin import InLineSwin

__all__ = ['InLineCSwin', 'InLineDeiT', 'InLinePVT', 'InLineSwin']
