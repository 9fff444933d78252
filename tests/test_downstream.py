"""The example of a downstream project: it trains as a command, and the documentation shows what is in it."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mminline.datasets import make_shapes

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / 'examples/downstream_project'
DOCUMENT = (ROOT / 'docs/downstream.md').read_text(encoding='utf-8')


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """A copy of the project in a folder of its own, with data where its config expects them."""
    folder = tmp_path_factory.mktemp('downstream') / 'project'
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns('data', 'work_dirs', '__pycache__'))
    make_shapes(folder / 'data/shapes', num_images=8)
    return folder


def run(project, *args):
    return subprocess.run([sys.executable, 'train.py', *args], cwd=project, capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS='1'))


def test_it_trains(project):
    result = run(project, 'configs/inline_swin_retinanet.py', '--work-dir', 'run', '--cfg-options',
                 'train_cfg.max_epochs=1', 'model.test_cfg.score_thr=0.0',  # hardly trained, it is sure of nothing
                 'default_hooks.logger.interval=1', 'train_dataloader.num_workers=0',
                 'train_dataloader.persistent_workers=False', 'val_dataloader.num_workers=0',
                 'val_dataloader.persistent_workers=False')
    assert result.returncode == 0, result.stderr[-3000:]
    output = result.stdout + result.stderr
    losses = [float(loss) for loss in re.findall(r'Epoch\(train\).* loss: (\S+)', output)]
    assert losses and all(0 < loss < 100 for loss in losses)
    assert 'coco/bbox_mAP' in output
    state = torch.load(project / 'run/epoch_1.pth')['state_dict']
    # The project's own neck around mminline's layers, and mminline's backbone.
    assert state['neck.blocks.0.attn.q.weight'].shape == (64, 64)
    assert 'backbone.layers.0.blocks.0.attn.residual.0.weight' in state


def test_a_misspelt_name_of_the_project_is_explained(project):
    result = run(project, 'configs/inline_swin_retinanet.py', '--cfg-options',
                 'model.neck.type=my_project.ContextFNP')
    assert result.returncode == 2
    assert 'my_project.ContextFNP is not registered as a model' in result.stderr
    assert 'Traceback' not in result.stderr


def test_documentation_shows_what_is_there():
    sources = [path.read_text(encoding='utf-8') for path in EXAMPLE.rglob('*.py')]
    shown = re.findall(r'```python\n(.*?)```', DOCUMENT, re.DOTALL)
    assert len(shown) == 3
    for block in shown:
        assert any(block.rstrip('\n') in source for source in sources), block
    listed = re.findall(r'^(\S+\.\w+) {2,}', DOCUMENT, re.MULTILINE)
    assert len(listed) == 5 and all((EXAMPLE / name).exists() for name in listed)
    [commands] = re.findall(r'```bash\n(.*?)```', DOCUMENT, re.DOTALL)
    scripts = [line.split()[1:] for line in commands.splitlines() if line.startswith('python')]
    assert scripts and all((EXAMPLE / word).exists() for words in scripts for word in words)
