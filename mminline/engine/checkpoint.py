"""Checkpoints that survive whatever ends a run, and from which it goes on as if nothing had happened."""
import errno
import os
import random
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterator, Optional, Union

import numpy as np
import torch
from mmengine.dist import all_gather_object, get_rank, get_world_size, is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook
from mmengine.runner import IterBasedTrainLoop, Runner

from mminline.registry import HOOKS


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, with files that are complete or not there, and with the random state.

    A checkpoint, and the file ``last_checkpoint`` that names it, is written beside its place and put there by one
    rename when it is on the disk. Only then are outdated checkpoints removed, so the disk must have room for one
    more than ``max_keep_ckpts`` (and for a second "best" one).

    ``meta['random_state']`` of a checkpoint lists for every process what :func:`get_random_state` returns. A run with
    a fixed seed that was stopped and resumed gives the numbers of one that was not, bit for bit, where the device
    computes them reproducibly and ``num_workers=0``; the random state of data loading workers is not saved. For
    that, validation leaves the random state of training as it was.

    Args:
        *args, **kwargs: Those of ``mmengine.hooks.CheckpointHook`` but ``backend_args`` and ``file_client_args``:
            checkpoints go to a local folder.

    Raises:
        TypeError: If CheckpointHook does not know an option.
        ValueError: If the checkpoints are not to go to a local folder.
        OSError: If a checkpoint cannot be written, at the time it is. All earlier ones are kept.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args:  # mmengine would stumble over it at the first checkpoint
            raise TypeError(f'SafeCheckpointHook has no option {", ".join(map(repr, self.args))}')
        if self.backend_args or self.file_client_args or '://' in str(self.out_dir or ''):
            raise ValueError(
                f'SafeCheckpointHook writes to local folders only, got out_dir={self.out_dir!r}, backend_args='
                f'{self.backend_args!r}, file_client_args={self.file_client_args!r}; use CheckpointHook for others')
        self.backend_args = dict(backend=AtomicLocalBackend.__name__)
        self._loaded_state: Optional[list] = None
        self._training_state: Optional[dict] = None

    # ---- writing ----------------------------------------------------------------------------------
    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        """In the place of mmengine's, which prunes before it saves and overwrites ``last_checkpoint``."""
        if self.max_keep_ckpts > 0 and step not in self.keep_ckpt_ids:
            # One to be pruned is still listed in the new checkpoint: if the run ends in between, resuming prunes it.
            self.keep_ckpt_ids.append(step)
            runner.message_hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))
        filename = self.filename_tmpl.format(step)
        self.last_ckpt = self.file_backend.join_path(self.out_dir, filename)
        runner.message_hub.update_info('last_ckpt', self.last_ckpt)
        runner.save_checkpoint(
            self.out_dir, filename, save_optimizer=self.save_optimizer, save_param_scheduler=self.save_param_scheduler,
            meta=dict(meta, random_state=all_gather_object(get_random_state())), by_epoch=self.by_epoch,
            backend_args=self.backend_args)
        if is_main_process():
            self.file_backend.put_text(self.last_ckpt, os.path.join(runner.work_dir, 'last_checkpoint'))
        while 0 < self.max_keep_ckpts < len(self.keep_ckpt_ids):
            outdated = self.file_backend.join_path(
                self.out_dir, self.filename_tmpl.format(self.keep_ckpt_ids.popleft()))
            # A filename_tmpl without a number gives all of them one name.
            if is_main_process() and outdated != self.last_ckpt and self.file_backend.isfile(outdated):
                self.file_backend.remove(outdated)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        """mmengine's removes the previous best checkpoint before it saves the new one; here that waits."""
        if not self.save_best:
            return
        outdated = []
        self.file_backend.remove = outdated.append
        try:
            super()._save_best_checkpoint(runner, metrics)
        finally:
            del self.file_backend.remove
        # The new one has taken the place of the old one where their names are the same.
        best = [self.best_ckpt_path] if len(self.key_indicators) == 1 else self.best_ckpt_path_dict.values()
        for path in set(outdated).difference(best):  # the main process alone lists any
            self.file_backend.remove(path)

    # ---- random state -----------------------------------------------------------------------------
    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self._loaded_state = checkpoint.get('meta', {}).get('random_state')

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        if self.max_keep_ckpts > 0:
            self.keep_ckpt_ids = deque(self.keep_ckpt_ids)  # without a maximum: pruning is done here
        if runner.iter > 0:  # resumed, not only initialised with the weights of a checkpoint
            self._restore_random_state(runner)

    def _restore_random_state(self, runner: Runner) -> None:
        states = self._loaded_state
        if not states or len(states) != get_world_size():
            runner.logger.warning(
                f'The checkpoint has the random state of {len(states or [])} processes and this run has '
                f'{get_world_size()}: it goes on with other random numbers than if it had not been stopped.')
            return
        state, loop = states[get_rank()], runner.train_loop
        if isinstance(loop, IterBasedTrainLoop):
            loop.dataloader_iterator = _with_state_after(loop.dataloader_iterator, loop.iter, state)
        else:
            set_random_state(state)

    def before_val(self, runner: Runner) -> None:
        self._training_state = get_random_state()

    def after_val_epoch(self, runner: Runner, metrics: dict) -> None:
        # A checkpoint is saved before validation, which a resumed run does not repeat.
        set_random_state(self._training_state)
        super().after_val_epoch(runner, metrics)


def _with_state_after(batches: Iterator, steps: int, state: dict) -> Iterator:
    """Yields the batches; before it loads the one after ``steps``, it sets the random state.

    mmengine's loop skips what was trained on before by loading it, which draws random numbers, and offers no hook
    between that and loading what comes next.
    """
    for _ in range(steps):
        yield next(batches)
    set_random_state(state)
    yield from batches


def get_random_state() -> dict:
    """The state of all generators that a training draws from, as tensors and plain numbers.

    Returns:
        dict: ``python``, ``numpy`` and ``torch``, and ``cuda`` (of the current device) where there is one.
    """
    name, keys, *others = np.random.get_state()
    state = dict(python=random.getstate(), numpy=(name, torch.from_numpy(keys.astype(np.int64)), *others),
                 torch=torch.get_rng_state())
    if torch.cuda.is_available():
        state['cuda'] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict) -> None:
    """Puts back what :func:`get_random_state` returned; its tensors may be on any device."""
    random.setstate(state['python'])
    name, keys, *others = state['numpy']
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *others))
    torch.set_rng_state(state['torch'].cpu())
    if 'cuda' in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'].cpu())


@register_backend('AtomicLocalBackend')
class AtomicLocalBackend(LocalBackend):
    """mmengine's backend of local files, with files that are replaced as a whole or not at all."""

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        """Write a file, and return when it is on the disk.

        It is written as ``.NAME.tmp`` in the same folder and renamed. What a killed process left under that name is
        overwritten by the next one.

        Raises:
            OSError: If it cannot be written. What was there under its name still is.
        """
        path = Path(filepath)
        temporary = path.with_name(f'.{path.name}.tmp')
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, 'wb') as file:
                file.write(obj)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            with suppress(OSError):
                temporary.unlink()
            if isinstance(error, OSError):
                raise OSError(error.errno, f'could not write {len(obj):,} bytes, what was there before is kept: '
                                           f'{error.strerror}', str(path)) from error
            raise
        _sync_folder(path.parent)

    def put_text(self, obj: str, filepath: Union[str, Path], encoding: str = 'utf-8') -> None:
        self.put(obj.encode(encoding), filepath)


def _sync_folder(folder: Path) -> None:
    """Makes a rename in it outlast a power failure, where the file system can do that."""
    if os.name == 'nt':
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
