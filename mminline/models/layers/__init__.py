"""Layers that shape tokens around the attention op."""
from .attention import InLineAttention, LinearAttention, LocalKernels, SoftmaxAttention
from .block import Block
from .embed import PatchEmbed, resize_position_table

__all__ = ['Block', 'InLineAttention', 'LinearAttention', 'LocalKernels', 'PatchEmbed', 'SoftmaxAttention',
           'resize_position_table']
