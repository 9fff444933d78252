"""Reading checkpoints without running anything that is in them.

A ``.pth`` file is a pickle and may name any function to be called. torch's restricted unpickler
(``weights_only=True``) calls only what was registered with :func:`torch.serialization.add_safe_globals`,
and a checkpoint of an mmengine run names a few things that torch does not know. Registering the real ones
would open the door again: with the real ``getattr`` a file changes builtins, with the real
``HistoryBuffer`` its class-wide table of functions, and with the real ``numpy.dtype`` it makes an array of
pointers of its own choosing. Each name is therefore mapped to a stand-in that accepts exactly what a run
saves: plain numeric arrays and numbers, and scalar histories.

Importing this module also puts :func:`load_from_local` in the place of mmengine's loader of local files and
has mmengine's downloads read with ``weights_only=True``: resuming, testing, inference and
``init_cfg=dict(type='Pretrained')`` all read through mmengine's ``CheckpointLoader``.
"""
import math
import os
import pickle
from collections import OrderedDict

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint as mmengine_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader

_NUMERIC_DTYPES = ('b1', 'i1', 'i2', 'i4', 'i8', 'u1', 'u2', 'u4', 'u8', 'f2', 'f4', 'f8')


def _no_attribute(owner, name):
    """Stands in for ``getattr``, by which pickle refers to the statistics methods of a HistoryBuffer."""
    if owner is not _SavedHistory:
        raise pickle.UnpicklingError(f'it asks for the attribute {name!r} of {owner!r}.')


class _SavedHistory:
    """Stands in for HistoryBuffer until its state is read, then becomes a real one.

    Only the two arrays and the length are taken from the file, never the table of statistics methods.
    """

    def __setstate__(self, state):
        try:
            logs, counts = state['_log_history'], state['_count_history']
            max_length = state['max_length']
        except (LookupError, TypeError):
            raise pickle.UnpicklingError('a HistoryBuffer lacks its arrays or its length.') from None
        for values in (logs, counts):
            if not isinstance(values, _SavedArray) or values.ndim != 1:
                raise pickle.UnpicklingError('the values of a HistoryBuffer are not a 1-d numeric array.')
        if type(max_length) is not int or not len(logs) == len(counts) <= max_length:
            raise pickle.UnpicklingError(
                f'a HistoryBuffer has {len(logs)} values, {len(counts)} counts and the maximum length '
                f'{max_length!r}.')
        self.__dict__ = vars(HistoryBuffer(logs, counts, max_length))
        self.__class__ = HistoryBuffer


class _SavedDType:
    """Stands in for ``numpy.dtype``; holds a built-in boolean, integer or floating-point type."""

    def __init__(self, code, align=False, copy=False):
        if not isinstance(code, str) or code not in _NUMERIC_DTYPES:
            raise pickle.UnpicklingError(f'it holds a numpy type other than plain numbers: {code!r}.')
        self.dtype = np.dtype(code)

    def __setstate__(self, state):
        for byte_order in '<>|':
            if state == (3, byte_order, None, None, None, -1, -1, 0):
                self.dtype = self.dtype.newbyteorder(byte_order)
                return
        raise pickle.UnpicklingError(f'it changes the numpy type {self.dtype} to {state!r}.')


class _SavedArray(np.ndarray):
    """Stands in for ``numpy.ndarray``: is one, is saved as one, but only takes numbers from a file."""

    def __new__(cls, *args, **kwargs):
        # Direct construction could make a view of memory that a later __setstate__ frees.
        raise pickle.UnpicklingError('it makes a numpy array by other means than numpy saves one.')

    def __setstate__(self, state):
        if self.size:
            raise pickle.UnpicklingError('it fills a numpy array twice.')
        try:
            _, shape, saved_dtype, fortran_order, data = state
            dtype = saved_dtype.dtype
            matches = len(data) == math.prod(shape) * dtype.itemsize
        except (AttributeError, TypeError, ValueError):
            matches = False
        if not (matches and type(saved_dtype) is _SavedDType and type(data) is bytes
                and all(type(size) is int and size >= 0 for size in shape)):
            raise pickle.UnpicklingError('the data of a numpy array do not fit its shape and type.')
        super().__setstate__((1, shape, dtype, bool(fortran_order), data))

    def __reduce_ex__(self, protocol):
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _new_array(array_type, shape, typecode):
    """Stands in for numpy's ``_reconstruct``: an empty array, which ``__setstate__`` fills next."""
    if array_type is not _SavedArray:
        raise pickle.UnpicklingError(f'it makes a numpy array of {array_type!r}.')
    return np.ndarray.__new__(_SavedArray, 0)


def _number(dtype, data):
    """Stands in for numpy's ``scalar``."""
    if type(dtype) is not _SavedDType or type(data) is not bytes or len(data) != dtype.dtype.itemsize:
        raise pickle.UnpicklingError('the data of a numpy number do not fit its type.')
    return np.frombuffer(data, dtype.dtype)[0]


_STAND_INS = {
    'builtins.getattr': _no_attribute,
    'mmengine.logging.history_buffer.HistoryBuffer': _SavedHistory,
    'numpy.dtype': _SavedDType,
    'numpy.ndarray': _SavedArray,
    'numpy._core.multiarray._reconstruct': _new_array,  # numpy 2
    'numpy._core.multiarray.scalar': _number,
    'numpy.core.multiarray._reconstruct': _new_array,  # numpy 1
    'numpy.core.multiarray.scalar': _number,
    # The configuration inside the files that the InLine authors publish; yacs itself is not needed.
    'yacs.config.CfgNode': OrderedDict,
}


def allow_run_checkpoints():
    """Lets ``torch.load(..., weights_only=True)`` read checkpoints of mmengine runs and official files.

    Called by ``import mminline``. May be called any number of times. Whatever else was registered under one
    of the names of the stand-ins is dropped: the real ``getattr`` and the real HistoryBuffer, often
    registered for the same purpose, are not safe (see the head of this module).
    """
    stand_ins = {(stand_in, name) for name, stand_in in _STAND_INS.items()}
    others = set(torch.serialization.get_safe_globals()) - stand_ins
    kept = {entry for entry in others if _global_name(entry) not in _STAND_INS}
    if kept != others:
        torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*kept, *stand_ins])


def _global_name(entry):
    """The name under which torch's unpickler knows an entry of its list of safe globals."""
    return entry[1] if isinstance(entry, tuple) else f'{entry.__module__}.{entry.__qualname__}'


def load_weights_file(path, map_location='cpu'):
    """Reads a checkpoint, of any kind, without running anything that is in it.

    Args:
        path (str | Path): a local file, or anything else that mmengine's ``CheckpointLoader`` knows
            (``https://...``, ``torchvision://...``).
        map_location: as for :func:`torch.load`.

    Returns:
        dict: what was saved. A pickled yacs ``CfgNode`` comes out as an OrderedDict.

    Raises:
        FileNotFoundError: there is no such file.
        pickle.UnpicklingError: the file holds more than tensors and plain data; names what was refused.
        RuntimeError: the file is damaged, incomplete or no checkpoint.
    """
    return CheckpointLoader.load_checkpoint(os.fspath(path), map_location)


@CheckpointLoader.register_scheme(prefixes='', force=True)
def load_from_local(filename, map_location=None):
    """mmengine's loader of local files, always with ``weights_only=True``.

    The environment variable ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` has no say in it. Errors are those of
    :func:`load_weights_file`.
    """
    filename = os.path.expanduser(filename)
    if not os.path.isfile(filename):
        raise FileNotFoundError(f'there is no checkpoint file {filename}')
    allow_run_checkpoints()
    try:
        checkpoint = torch.load(filename, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise _explained(error, filename) from None
    except Exception as error:  # torch meets a damaged file with a dozen kinds of exception
        raise _damaged(error, filename) from error
    return _without_config_code(checkpoint)


def _load_url(url, **kwargs):
    """mmengine's ``load_url`` with ``weights_only=True``."""
    allow_run_checkpoints()
    try:
        checkpoint = torch.hub.load_state_dict_from_url(url, weights_only=True, **kwargs)
    except pickle.UnpicklingError as error:
        raise _explained(error, url) from None
    return _without_config_code(checkpoint)


# All of mmengine's loaders that download (http://, torchvision://, open-mmlab://, ...) call this one
# function, and torch.hub's own default is weights_only=False.
mmengine_checkpoint.load_url = _load_url


def _without_config_code(checkpoint):
    """Drops ``meta['config']``, which mmengine's resume would run as Python but no longer saves."""
    if isinstance(checkpoint, dict) and 'meta' in checkpoint:
        meta = checkpoint['meta']
        if isinstance(meta, dict) and 'config' in meta:
            del meta['config']
    return checkpoint


def _explained(error, source):
    """A short error in the place of torch's, which advises to load the file with ``weights_only=False``."""
    reason = str(error.__context__ or error)  # torch wraps the unpickler's own message in its advice
    if 'Unsupported operand' in reason:
        return _damaged(reason, source)
    reason = reason.split(' Please use `torch.serialization')[0]
    return pickle.UnpicklingError(
        f'{source} was not loaded, for safety: {reason} A checkpoint should hold tensors and plain data.')


def _damaged(error, source):
    reason = error if isinstance(error, str) else f'{type(error).__name__}: {error}'.rstrip(': ')
    return RuntimeError(f'{source} cannot be read as a checkpoint; it seems damaged or incomplete ({reason})')
