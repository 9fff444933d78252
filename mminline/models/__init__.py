"""Models of mminline; importing this registers them."""
from .backbones import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin
from .data_preprocessors import DetDataPreprocessor, SegDataPreprocessor
from .necks import SimplePyramid

__all__ = ['DetDataPreprocessor', 'InLineCSwin', 'InLineDeiT', 'InLinePVT', 'InLineSwin', 'SegDataPreprocessor',
           'SimplePyramid']
