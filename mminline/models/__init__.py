"""Models of mminline; importing this registers them."""
from .backbones import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin

__all__ = ['InLineCSwin', 'InLineDeiT', 'InLinePVT', 'InLineSwin']
