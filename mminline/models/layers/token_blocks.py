"""Functions of single tokens, run over a block of tokens at a time."""
from typing import Callable, Tuple, Union

import torch
from torch import Tensor

# Elements of the widest intermediate of a block. Measured on two cores with 2 MiB of L2 cache each (docs/op.md):
# from 1 to 4 million the time is flat; larger blocks leave the cache, smaller ones are all overhead.
BLOCK_ELEMENTS = 2 ** 21
# With fewer blocks than this there is nothing to gain.
MIN_BLOCKS = 4


def map_token_blocks(function: Callable[[Tensor], Union[Tensor, Tuple[Tensor, ...]]], x: Tensor, width: int
                     ) -> Union[Tensor, Tuple[Tensor, ...]]:
    """Return ``function(x)``, computed block by block where that is faster: on a CPU, without gradients.

    An intermediate over all tokens of a large map (an MLP's hidden layer) leaves the cache; a block's does
    not, and memory for one block is enough.

    Args:
        function: Maps (..., C) to one tensor or a tuple of tensors (..., D), each token on its own.
        x: Tokens, (B, N, C).
        width: Channels of the widest intermediate.
    """
    block = max(1, BLOCK_ELEMENTS // width)
    num_tokens = x.shape[0] * x.shape[1]
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_grad_enabled() \
            or x.device.type != 'cpu' or num_tokens < MIN_BLOCKS * block:
        return function(x)
    tokens = x.flatten(0, 1)
    outs = None
    for start in range(0, num_tokens, block):
        parts = function(tokens[start:start + block])
        is_tuple = isinstance(parts, tuple)
        parts = parts if is_tuple else (parts,)
        if outs is None:
            outs = tuple(part.new_empty(num_tokens, part.shape[-1]) for part in parts)
        for out, part in zip(outs, parts):
            out[start:start + block] = part
    outs = tuple(out.unflatten(0, x.shape[:2]) for out in outs)
    return outs if is_tuple else outs[0]
