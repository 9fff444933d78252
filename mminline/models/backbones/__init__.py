"""The backbones; each is registered as ``mminline.<name>``."""
from .pvt import InLinePVT

__all__ = ['InLinePVT']
