"""Layers that shape tokens around the attention op."""
from .attention import InLineAttention, LinearAttention, SoftmaxAttention
from .block import Block
from .cswin_block import CSwinBlock, InLineBranch, LinearBranch, StripeBranch
from .embed import PatchEmbed, pad_to_multiple, resize_position_table, to_map, unflatten_tokens
from .windows import WindowAttention, pad_map

__all__ = ['Block', 'CSwinBlock', 'InLineAttention', 'InLineBranch', 'LinearAttention', 'LinearBranch', 'PatchEmbed',
           'SoftmaxAttention', 'StripeBranch', 'WindowAttention', 'pad_map', 'pad_to_multiple',
           'resize_position_table', 'to_map', 'unflatten_tokens']
