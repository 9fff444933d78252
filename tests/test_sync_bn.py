"""A config with SyncBN trains and tests on one process and on two, without a GPU."""
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import ConfigDict

from mminline.datasets import make_shapes
from mminline.engine import replace_sync_bn

ROOT = Path(__file__).parents[1]
LINE = 'SyncBN cannot run on several CPU processes: replaced by BN in 2 places'

SMALL = f"""
_base_ = {str(ROOT / 'configs/demo/inline_swin_upernet_shapes.py')!r}
model = dict(
    backbone=dict(arch=dict(embed_dims=(16, 16, 16, 16), num_heads=(1, 1, 1, 1), depths=(1, 1, 1, 1))),
    decode_head=dict(in_channels=[16, 16, 16, 16], channels=16),
    auxiliary_head=dict(in_channels=16, channels=16))
train_dataloader = dict(batch_size=2)
train_cfg = dict(max_iters=4, val_interval=2)
# Statistics change a lot in few steps: those of two processes are far apart.
optim_wrapper = dict(optimizer=dict(lr=1e-2))
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
"""


def test_replace_sync_bn():
    norm = dict(type='SyncBN', requires_grad=True)
    model = ConfigDict(backbone=dict(type='ResNet', norm_cfg=dict(type='BN')), neck=None,
                       head=[dict(norm_cfg=norm), dict(convs=(norm,))])
    assert replace_sync_bn(model) == 2
    assert model.head[0].norm_cfg == dict(type='BN', requires_grad=True)
    assert model.head[1].convs[0].type == 'BN'
    assert replace_sync_bn(model) == 0


def run(script, *args, cwd):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    interpreter = 'bash' if script.endswith('.sh') else sys.executable
    result = subprocess.run(
        [interpreter, ROOT / 'tools' / script, *args], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={
            **os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PORT': port, 'PYTHON': sys.executable})
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout


def last_scores(output):
    return re.findall(r'aAcc: (\S+)  mIoU: (\S+)  mAcc: (\S+)', output)[-1]


@pytest.mark.slow
@pytest.mark.xdist_group('whole runs')
@pytest.mark.parametrize('processes', [1, 2])
def test_train_and_test(tmp_path, processes):
    make_shapes(tmp_path / 'data/shapes', num_images=30)
    (tmp_path / 'small.py').write_text(SMALL)
    kind, number = ('dist_{}.sh', [str(processes)]) if processes > 1 else ('{}.py', [])
    trained = run(kind.format('train'), 'small.py', *number, '--work-dir', 'run', cwd=tmp_path)
    tested = run(kind.format('test'), 'small.py', 'run/iter_4.pth', *number, cwd=tmp_path)
    assert last_scores(tested) == last_scores(trained)
    assert trained.count(LINE) == tested.count(LINE) == (processes > 1)
