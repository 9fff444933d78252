"""The prefix ``mminline.`` works from every toolbox's registry, in a fresh process, from any directory."""
import importlib.util
import subprocess
import sys

import pytest

BUILD = "backbone = MODELS.build(dict(type='mminline.InLinePVT', arch='tiny')); assert backbone.pos_embed1.numel()"


def run(tmp_path, *lines: str) -> None:
    result = subprocess.run([sys.executable, '-c', '\n'.join(lines)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize('toolbox', ['mmengine', 'mmdet', 'mmseg', 'mminline'])
def test_builds_from_each_registry(tmp_path, toolbox):
    run(tmp_path, f'from {toolbox}.registry import MODELS', BUILD)


def test_builds_under_a_foreign_default_scope(tmp_path):
    run(tmp_path, 'from mmengine.registry import DefaultScope, MODELS',
        "DefaultScope.get_instance('run', scope_name='mmdet')", BUILD)


@pytest.mark.parametrize('times', [1, 2])
def test_custom_imports_any_number_of_times(tmp_path, times):
    (tmp_path / 'config.py').write_text("custom_imports = dict(imports=['mminline', 'mminline.models'])")
    run(tmp_path, 'from mmengine.config import Config', *["Config.fromfile('config.py')"] * times,
        'from mmdet.registry import MODELS', BUILD)


def test_downstream_modules_share_the_registry(tmp_path):
    run(tmp_path, 'from mminline.registry import MODELS', 'from torch import nn',
        '@MODELS.register_module()', 'class MyNeck(nn.Module):', '    pass',
        'from mmdet.registry import MODELS as DET',
        "assert type(DET.build(dict(type='mminline.MyNeck'))) is MyNeck")


def test_import_loads_no_toolbox_and_no_compiled_ops(tmp_path):
    run(tmp_path, 'import sys, mminline, mminline.models, mminline.ops',
        "loaded = [name for name in ('mmdet', 'mmseg', 'mmcv.ops', 'mmcv._ext') if name in sys.modules]",
        'assert not loaded, loaded')


@pytest.mark.skipif(not all(importlib.util.find_spec(name) for name in ('mmpretrain', 'torchvision')),
                    reason='mmpretrain imports torchvision, which is not installed: it pins a torch of its own')
def test_backbone_of_a_classifier(tmp_path):
    run(tmp_path, 'import torch, mmpretrain.models', 'from mmpretrain.registry import MODELS',
        "neck = dict(type='GlobalAveragePooling')",
        "head = dict(type='LinearClsHead', num_classes=10, in_channels=768)",
        "backbone = dict(type='mminline.InLineSwin')",
        "model = MODELS.build(dict(type='ImageClassifier', backbone=backbone, neck=neck, head=head))",
        'assert model(torch.zeros(1, 3, 64, 64), mode="tensor").shape == (1, 10)')
