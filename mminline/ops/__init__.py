"""The shared attention op."""
from .functional import inline_attention

__all__ = ['inline_attention']
