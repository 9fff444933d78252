"""Necks; each is registered as ``mminline.<name>``."""
from .simple_pyramid import LayerNorm2d, SimplePyramid

__all__ = ['LayerNorm2d', 'SimplePyramid']
