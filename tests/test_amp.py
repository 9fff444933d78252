"""Mixed precision on a CPU: bf16, where the operators of the toolboxes take it."""
from pathlib import Path

import pytest
import torch
from mmengine.registry import OPTIM_WRAPPERS

from mminline.analysis.resolution_report import make_batch
from mminline.build import build_model
from mminline.engine.precision import CpuAmpOptimWrapper
from mminline.runs import read_config

ROOT = Path(__file__).parents[1]
DETECTOR = ROOT / 'configs/demo/inline_pvt_maskrcnn_shapes.py'
SEGMENTOR = ROOT / 'configs/demo/inline_swin_upernet_shapes.py'
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason='with an accelerator, mmengine\'s own class is built')


def build_optim_wrapper(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return OPTIM_WRAPPERS.build(dict(type='mminline.AmpOptimWrapper', optimizer=optimizer, **options))


def output_types(model, names, train):
    """The types of what some layers return in a call of ``train``."""
    types = {}

    def note(name):
        def hook(module, inputs, output):
            types[name] = output[0].dtype if isinstance(output, tuple) else output.dtype
        return hook

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in names]
    losses = train()
    for handle in handles:
        handle.remove()
    return types, losses


@pytest.fixture
def step(monkeypatch):
    """Builds a demo's model and takes a training step; returns the types, the losses and the model."""
    torch.manual_seed(0)

    def take(config, scope, names, **options):
        model = build_model(read_config(config)).train()
        if scope == 'mmseg':
            model.data_preprocessor.size = (64, 64)
        wrapper = build_optim_wrapper(model, **options)
        assert isinstance(wrapper, CpuAmpOptimWrapper)
        types, losses = output_types(model, names, lambda: model.train_step(make_batch(scope, 64, 2), wrapper))
        return types, losses, model

    return take


def test_detector(step):
    """Heads compute in fp32: mmcv's RoIAlign and NMS know no bf16 on a CPU."""
    types, losses, model = step(DETECTOR, 'mmdet', ['backbone.block1.0.mlp.fc1', 'neck.fpn_convs.0.conv'])
    assert types == {'backbone.block1.0.mlp.fc1': torch.bfloat16, 'neck.fpn_convs.0.conv': torch.float32}
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 'forward' not in vars(model.backbone)  # as it was


def test_segmentor(step):
    types, losses, model = step(
        SEGMENTOR, 'mmseg', ['backbone.layers.0.blocks.0.mlp.fc1', 'decode_head.conv_seg'], dtype='bfloat16')
    assert set(types.values()) == {torch.bfloat16}
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize('options, error, message', [
    (dict(dtype='float16'), ValueError, "on a CPU needs dtype 'bfloat16', got 'float16'"),
    (dict(dtyp='bfloat16'), TypeError, 'dtyp')])
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        build_optim_wrapper(torch.nn.Linear(1, 1), **options)
