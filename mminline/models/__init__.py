"""Models of mminline; importing this registers them."""
from .backbones import InLinePVT

__all__ = ['InLinePVT']
