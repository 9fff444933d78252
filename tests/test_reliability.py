"""benchmarks/kill_training.py and benchmarks/training_memory.py, whose figures docs/reliability.md holds, in small."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEGMENTOR = ROOT / 'configs/demo/inline_swin_upernet_shapes.py'


def run(script, *args, cwd):
    return subprocess.run([sys.executable, ROOT / f'benchmarks/{script}.py', *map(str, args)], cwd=cwd, text=True,
                          capture_output=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='the training is forked')
def test_three_kills(tmp_path):
    result = run('kill_training', '--kills', 3, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.search(r'3 kills, [23] of them left a checkpoint half written', result.stdout)
    assert re.search(r'After \d+ iterations 0 of \d+ tensors differ', result.stdout)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='resident memory is read from /proc')
def test_memory_does_not_grow_and_recomputation_saves_it(tmp_path):
    result = run('training_memory', SEGMENTOR, '--steps', 20, '--max-edge', 128, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    peaks = [int(peak) for peak in re.findall(r'(\d+) MiB', result.stdout)]
    assert len(peaks) == 4 and peaks[3] < peaks[2]


@pytest.mark.parametrize('script, args, message', [
    ('kill_training', ['--kills', 0], '--kills must be at least 1, got 0'),
    ('training_memory', [SEGMENTOR, '--max-edge', 100], 'a multiple of 32 from 64 on, got 100'),
    ('training_memory', [SEGMENTOR, '--steps', 5], '--steps must be at least 20, got 5'),
    ('training_memory', ['gone.py'], 'gone.py: no such config file')])
def test_bad_arguments(tmp_path, script, args, message):
    result = run(script, *args, cwd=tmp_path)
    assert result.returncode == 2 and message in result.stderr and 'Traceback' not in result.stderr
