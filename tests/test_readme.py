"""README: links lead somewhere, commands exist, and what it says about your own data set works."""
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mminline.datasets import make_shapes

ROOT = Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')
DOCUMENTS = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]


def blocks(language: str) -> list:
    return re.findall(rf'```{language}\n(.*?)```', README, re.DOTALL)


COMMANDS = [line.split('#')[0].strip() for block in blocks('bash') for line in block.splitlines() if line.strip()]
COMMANDS += re.findall(r'`(python tools/[^`]+)`', README)


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    for target in re.findall(r'\]\(([^)#]+)[^)]*\)', document.read_text(encoding='utf-8')):
        if not target.startswith(('http://', 'https://')):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize('command', COMMANDS)
def test_command(command, tmp_path):
    """A command either runs, or (without COCO and weights) says what is missing; none is misspelt."""
    words = shlex.split(command)
    if words[0] == 'make':
        result = subprocess.run([words[0], '-n', *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    elif words[0] == 'bash':
        assert (ROOT / words[1]).exists()
        assert all((ROOT / word).exists() for word in words if word.startswith('configs/'))
    elif words[0] == 'python':
        arguments = [str(ROOT / word) if word.startswith(('tools/', 'configs/')) else word for word in words[1:]]
        result = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert 'usage:' not in result.stderr
        assert 'Traceback' not in result.stderr
        if result.returncode != 0:
            assert result.returncode == 2, result.stderr
            assert any(missing in result.stderr for missing in ('data/coco', 'checkpoints/', '.pth', 'my.jpg'))
    else:
        assert words[0] == 'source'


def test_own_data_set(tmp_path):
    """The config in README reads a set whose category ids start at 3 and have gaps, and passes the checks of a run."""
    from mmdet.registry import DATASETS
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    from mminline.preflight import check_files, check_names

    make_shapes(tmp_path / 'shapes', num_images=12)
    [config] = [block for block in blocks('python') if '_base_' in block]
    config = config.replace("'configs/", f"'{ROOT}/configs/").replace("'data/mine/'", f"'{tmp_path}/shapes/coco/'")
    (tmp_path / 'mine.py').write_text(config)
    cfg = Config.fromfile(tmp_path / 'mine.py')
    cfg.model.backbone.init_cfg = None
    check_names(cfg)
    check_files(cfg, 'train')
    init_default_scope('mmdet')
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    labels = {int(label) for index in range(len(dataset))
              for label in dataset[index]['data_samples'].gt_instances.labels}
    assert labels == {0, 1, 2}
    assert dataset.metainfo['classes'] == ('circle', 'square', 'triangle')


def test_python_examples():
    examples = [block for block in blocks('python') if '_base_' not in block]
    assert len(examples) == 2
    shapes = re.search(r'# (\(1, .*\))', examples[1]).group(1)
    scope = {}
    for example in examples:
        exec(compile(example, 'README.md', 'exec'), scope)  # noqa: S102 (our own text)
    assert ', '.join(str(tuple(m.shape)) for m in scope['maps']) == shapes
    assert isinstance(scope['backbone'].pos_embed1, torch.nn.Parameter)
