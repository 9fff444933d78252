"""The guard names the layer where numbers stop being finite, in training, validation and test, under autocast."""
import copy

import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn

from mminline.engine import PrecisionGuardHook
from mminline.models import InLinePVT
from mminline.registry import HOOKS

from .test_pvt import NARROW


class Model(BaseModel):
    """Images through a backbone in any precision; ``break_it`` changes the backbone before call ``at_call``."""

    def __init__(self, break_it=None, at_call=0, autocast=None):
        super().__init__()
        self.backbone = InLinePVT(NARROW, pretrain_img_size=64)
        self.break_it, self.at_call, self.autocast = break_it, at_call, autocast
        self.calls = 0
        self.watched = []  # per call, whether any layer has a hook

    def forward(self, inputs, data_samples=None, mode='loss'):
        if self.break_it is not None and self.calls == self.at_call:
            self.break_it(self.backbone)
        self.calls += 1
        self.watched.append(any(layer._forward_hooks or layer._forward_pre_hooks for layer in self.modules()))
        with torch.autocast('cpu', self.autocast, enabled=self.autocast is not None):
            maps = self.backbone(torch.stack(inputs))
        return dict(loss=maps[-1].float().square().mean()) if mode == 'loss' else [maps]


@torch.no_grad()
def overflow_in_fc2(backbone):
    """fc1 then gives 0 ... 10^4, all finite in float16, and fc2's sum of 64 of them is not."""
    mlp = backbone.block2[1].mlp
    nn.init.constant_(mlp.fc1.bias, 1e4)
    nn.init.constant_(mlp.fc2.weight, 1)


@torch.no_grad()
def overflow_in_attention(backbone):
    """Queries of 3 * 10^4, keys and values of some 100 are finite, the attention's output of some 10^7 is not."""
    attn = backbone.block1[0].attn
    attn.q.bias.fill_(3e4)
    attn.kv.weight[[0, 33], 0] = 100  # the first key and the second value go together


@torch.no_grad()
def nan_in_a_norm(backbone):
    backbone.block3[0].norm1.weight[3] = float('nan')


def make_runner(work_dir, model, iterations=2, image=None, **options):
    images = torch.randn(iterations, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    if image is not None:
        images[:] = image
    data = dict(dataset=[dict(inputs=image) for image in images], batch_size=1,
                sampler=dict(type='DefaultSampler', shuffle=False), collate_fn=dict(type='pseudo_collate'))
    return Runner(
        model, str(work_dir), experiment_name=work_dir.name, default_hooks=dict(checkpoint=None, logger=None),
        custom_hooks=[dict(type='mminline.PrecisionGuardHook', **options)],
        train_dataloader=data, train_cfg=dict(by_epoch=False, max_iters=iterations, val_interval=iterations),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.)),
        val_dataloader=copy.deepcopy(data), val_cfg=dict(), val_evaluator=Evaluator([]),
        test_dataloader=copy.deepcopy(data), test_cfg=dict(), test_evaluator=Evaluator([]))


@pytest.mark.parametrize('mode, break_it, message', [
    ('train', overflow_in_fc2,
     r'train iteration 2: the output of backbone.block2.1.mlp.fc2 \(Linear\) is not finite. '
     r'Input of backbone.block2.1.mlp.fc2: float16 \(1, 16, 64\) from 1e\+04 to 1e\+04, 0.00% not finite.$'),
    ('test', overflow_in_attention,
     r'test iteration 2: backbone.block1.0.attn \(InLineAttention\) made numbers that are not finite and handed them '
     r'to backbone.block1.0.attn.proj \(Linear\). Input of backbone.block1.0.attn: float32 \(1, 64, 32\) from -'),
    ('val', nan_in_a_norm,
     r'val iteration 2: the output of backbone.block3.0.norm1 \(LayerNorm\) is not finite. .* '
     r'Parameters of it that are not finite: weight.$'),
], ids=['overflow_in_fc2', 'overflow_in_attention', 'nan_parameter'])
def test_names_layer_and_input(tmp_path, mode, break_it, message):
    at_call = 3 if mode == 'val' else 1  # validation follows two iterations of training
    runner = make_runner(tmp_path, Model(break_it, at_call, torch.float16), interval=1)
    with pytest.raises(FloatingPointError, match=message):
        runner.test() if mode == 'test' else runner.train()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in runner.model.modules())


def test_data_that_is_not_finite(tmp_path):
    message = (r'data_preprocessor \(BaseDataPreprocessor\) received an input that is not finite. '
               r'.* float32 \(3, 32, 32\), 100.00% not finite')
    with pytest.raises(FloatingPointError, match=message):
        make_runner(tmp_path, Model(), image=float('inf')).train()


def test_warns_once_an_iteration_and_goes_on(tmp_path):
    model = Model(nan_in_a_norm)
    make_runner(tmp_path, model, iterations=2, action='warn', interval=1).test()
    log, = tmp_path.glob('*/*.log')
    warnings = [line for line in log.read_text().splitlines() if 'is not finite' in line]
    assert model.calls == len(warnings) == 2
    assert all('WARNING' in line and 'backbone.block3.0.norm1' in line for line in warnings)


def test_attached_only_in_checked_iterations(tmp_path):
    model = Model()
    make_runner(tmp_path, model, iterations=5, interval=3).train()
    assert model.watched == [True, False, False, True, False] * 2  # training, then validation


def test_checked_iteration_computes_the_same(tmp_path):
    image = torch.randn(3, 32, 32)
    model = Model().eval()
    expected = model([image], mode='predict')[0]
    hook = PrecisionGuardHook()
    runner = make_runner(tmp_path, model)
    hook._before_iter(runner, 0, mode='test')
    assert all(torch.equal(a, b) for a, b in zip(model([image], mode='predict')[0], expected))
    assert model.watched == [False, True]


def test_recomputed_layers(tmp_path):
    """Checkpointing runs layers again in the backward pass, and leaves the last one in its middle."""
    model = Model()
    for stage in (model.backbone.block1, model.backbone.block2, model.backbone.block3, model.backbone.block4):
        for block in stage:
            block.with_cp = True
    make_runner(tmp_path, model, interval=1).train()
    assert model.watched == [True] * 4


@pytest.mark.parametrize('options, message', [
    (dict(action='stop'), r"action must be one of \('raise', 'warn'\), got 'stop'"),
    (dict(interval=0), 'interval must be a positive int, got 0'),
    (dict(interval=2.5), 'got 2.5'),
])
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        HOOKS.build(dict(type='mminline.PrecisionGuardHook', **options))
