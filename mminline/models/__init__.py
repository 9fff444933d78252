"""Models of mminline; importing this registers them."""
from .backbones import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin
from .necks import SimplePyramid

__all__ = ['InLineCSwin', 'InLineDeiT', 'InLinePVT', 'InLineSwin', 'SimplePyramid']
