"""Kills a training with SIGKILL again and again, resumes it each time, and compares it with one that was left alone.

A small segmentor saves a checkpoint after each iteration. Every second kill comes while one is being written, the first
to fourth since the start, the others at a random time after it. After each kill, all checkpoints must be readable, and
the last one must not be older than before. In the end the weights must be, bit for bit, those of an uninterrupted
training.

Exit status: 0 if all of that holds, 1 if not.
"""
import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from mmengine.logging import MMLogger
from mmengine.runner import find_latest_checkpoint
from rich.console import Console
from rich.progress import track

from mminline import runs
from mminline.datasets import make_shapes
from mminline.safe_loading import load_weights_file

ROOT = Path(__file__).resolve().parents[1]
LONGEST_LIFE = 8.0  # seconds from the start to a kill at a random time; the first iteration takes about two
POLL_SECONDS = 2e-4
MAX_WAIT = 120  # seconds for a checkpoint to be written, on whatever machine

CONFIG = f"""
_base_ = {str(ROOT / 'configs/demo/inline_swin_upernet_shapes.py')!r}
model = dict(
    backbone=dict(arch=dict(embed_dims=(16, 32, 32, 32), num_heads=(1, 1, 1, 1), depths=(1, 1, 1, 1))),
    decode_head=dict(in_channels=[16, 32, 32, 32], channels=16),
    auxiliary_head=dict(in_channels=32, channels=16))
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = dict(num_workers=0, persistent_workers=False)
train_cfg = dict(max_iters=1000000, val_interval=1000000)
default_hooks = dict(
    logger=dict(interval=1), checkpoint=dict(type='mminline.SafeCheckpointHook', interval=1, max_keep_ckpts=2))
"""


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description='Kill a training again and again, and see whether it survives.')
    parser.add_argument('--kills', type=int, default=50, metavar='N', help='how often (%(default)s)')
    parser.add_argument('--seed', type=int, default=0, metavar='S', help='of the random moments (%(default)s)')
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error(f'--kills must be at least 1, got {args.kills}')
    return args


class Training:
    """A training in a folder, that runs in processes forked from this one: importing everything takes the longest."""

    def __init__(self, folder: Path, work_dir: str):
        self.config = folder / 'small.py'
        self.data_root = folder / 'shapes/ade'
        self.work_dir = folder / work_dir
        self.log = folder / f'{work_dir}.log'

    def start(self, **options) -> int:
        """Start it, or go on with it; return the number of its process."""
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            with self.log.open('a') as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            runs.train(runs.load_config(SimpleNamespace(
                config=self.config, cfg_options=dict(data_root=str(self.data_root), **options), launcher='none',
                local_rank=0, work_dir=str(self.work_dir))), resume='auto')
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def run(self, max_iters: int) -> dict:
        """Run it to its end and return its weights."""
        _, status = os.waitpid(self.start(**{'train_cfg.max_iters': max_iters}), 0)
        if status:
            raise SystemExit(f'A training failed:\n{self.log.read_text()[-3000:]}')
        return load_weights_file(find_latest_checkpoint(str(self.work_dir)))['state_dict']

    def being_written(self) -> set[str]:
        return {path.name for path in self.work_dir.glob('.iter_*.pth.tmp')}

    def iterations(self) -> int:
        """Return those of the last checkpoint, after reading every checkpoint that is there."""
        saved = {str(path): load_weights_file(path)['meta']['iter'] for path in self.work_dir.glob('*.pth')}
        last = find_latest_checkpoint(str(self.work_dir))
        return saved[last] if last else 0


def stop_while_writing(training: Training, process: int, count: int) -> None:
    """Stop the process (SIGSTOP) while it is writing its checkpoint number ``count``, or a later one."""
    end = time.monotonic() + MAX_WAIT
    seen = set()
    while True:
        writing = training.being_written()
        seen |= writing
        if writing and len(seen) >= count:
            os.kill(process, signal.SIGSTOP)
            os.waitpid(process, os.WUNTRACED)
            if training.being_written():
                return
            os.kill(process, signal.SIGCONT)  # it was complete before the signal came
        if time.monotonic() > end or os.waitpid(process, os.WNOHANG)[0]:
            raise SystemExit(f'No checkpoint was written:\n{training.log.read_text()[-3000:]}')
        time.sleep(POLL_SECONDS)


def main(argv=None):
    args = parse_args(argv)
    chance = random.Random(args.seed)
    torch.set_num_threads(1)  # other threads would not survive a fork
    MMLogger.get_current_instance().setLevel('WARNING')  # not a line for each checkpoint that is read
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_shapes(folder / 'shapes', num_images=12)
        (folder / 'small.py').write_text(CONFIG)
        killed = Training(folder, 'killed')
        iterations = half_written = 0
        for number in track(range(args.kills), description='kills'):
            # A file that an earlier kill left must not be taken for one that is being written.
            for leftover in killed.work_dir.glob('.*.tmp'):
                leftover.unlink()
            process = killed.start()
            if number % 2:
                time.sleep(chance.uniform(0, LONGEST_LIFE))
            else:
                stop_while_writing(killed, process, count=chance.randint(1, 4))
            os.kill(process, signal.SIGKILL)
            if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != -signal.SIGKILL:
                raise SystemExit(f'A training failed:\n{killed.log.read_text()[-3000:]}')
            half_written += bool(killed.being_written())
            before, iterations = iterations, killed.iterations()
            if iterations < before:
                raise SystemExit(f'Kill {number + 1} took iterations {iterations + 1} to {before} away.')
        resumed = killed.run(iterations + 2)
        whole = Training(folder, 'whole').run(iterations + 2)
        differing = [name for name in whole if not torch.equal(whole[name], resumed[name])]
    Console(soft_wrap=True).print(
        f'{args.kills} kills, {half_written} of them left a checkpoint half written; all other checkpoints were '
        f'readable.\nAfter {iterations + 2} iterations {len(differing)} of {len(whole)} tensors differ from those of a '
        'training that was not killed.')
    sys.exit(bool(differing))


if __name__ == '__main__':
    main()
