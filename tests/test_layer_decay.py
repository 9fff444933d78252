"""Learning rates by layer, for the four families; and what a run with them writes for TensorBoard."""
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from mminline.engine.layer_decay import backbone_layers
from mminline.models import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin

PYRAMID = dict(embed_dims=(16, 16, 32, 32), num_heads=(1, 2, 2, 2), depths=(1, 2, 1, 1))
KINDS = ('inline', 'softmax', 'linear', 'softmax')
FAMILIES = {
    'pvt': lambda: InLinePVT({**PYRAMID, 'mlp_ratios': (2,) * 4}, attn_types=KINDS, pretrain_img_size=32),
    'swin': lambda: InLineSwin({**PYRAMID, 'attn_types': KINDS}),
    'cswin': lambda: InLineCSwin({**PYRAMID, 'num_heads': (2,) * 4, 'attn_types': KINDS}),
    'deit': lambda: InLineDeiT(dict(embed_dims=16, num_heads=2, depth=5, pretrain_img_size=32), out_indices=(1, 4)),
}
# One learning rate for each layer, from 1.0 of the heads: 0.5 ** 6 for the embedding, 5 blocks, norms of the outputs.
LISTED = {
    'pvt': [
        (1 / 64, ['patch_embed1', 'pos_embed1']), (1 / 32, ['block1.0']),
        (1 / 16, ['patch_embed2', 'pos_embed2', 'block2.0']), (1 / 8, ['block2.1']),
        (1 / 4, ['patch_embed3', 'pos_embed3', 'block3.0']), (1 / 2, ['patch_embed4', 'pos_embed4', 'block4.0'])],
    'swin': [
        (1 / 64, ['patch_embed']), (1 / 32, ['layers.0.blocks.0']), (1 / 16, ['layers.0.downsample',
                                                                             'layers.1.blocks.0']),
        (1 / 8, ['layers.1.blocks.1']), (1 / 4, ['layers.1.downsample', 'layers.2.blocks.0']),
        (1 / 2, ['layers.2.downsample', 'layers.3.blocks.0']), (1, ['norm0', 'norm1', 'norm2', 'norm3'])],
    'cswin': [
        (1 / 64, ['stage1_conv_embed']), (1 / 32, ['stage1.0']), (1 / 16, ['merge1', 'stage2.0']),
        (1 / 8, ['stage2.1']), (1 / 4, ['merge2', 'stage3.0']), (1 / 2, ['merge3', 'stage4.0']),
        (1, ['norm0', 'norm1', 'norm2', 'norm3'])],
    'deit': [
        (1 / 64, ['patch_embed', 'pos_embed', 'cls_token']), (1 / 32, ['blocks.0']), (1 / 16, ['blocks.1']),
        (1 / 8, ['blocks.2']), (1 / 4, ['blocks.3']), (1 / 2, ['blocks.4']), (1, ['norm'])],
}


class Model(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(32, 2)


def make_wrapper(model, **paramwise_cfg):
    init_default_scope('mmdet')  # the prefix finds the constructor from any toolbox
    return build_optim_wrapper(model, dict(
        constructor='mminline.LayerDecayOptimWrapperConstructor', type='OptimWrapper',
        optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.05), paramwise_cfg=paramwise_cfg))


def documented(word):
    """The settings in that example of docs/training.md in which a word appears."""
    document = (Path(__file__).parents[1] / 'docs/training.md').read_text(encoding='utf-8')
    [block] = [block for block in re.findall(r'```python\n(.*?)```', document, re.DOTALL) if word in block]
    scope = {}
    exec(block, scope)  # noqa: S102 (our own text)
    return scope


def settings_by_name(wrapper):
    return {name: (group['lr'], group['weight_decay'])
            for group in wrapper.optimizer.param_groups for name in group['param_names']}


@pytest.mark.parametrize('family', FAMILIES)
def test_learning_rate_of_each_layer(family):
    model = Model(FAMILIES[family]())
    wrapper = make_wrapper(model, decay_rate=0.5, num_layers=5)
    settings = settings_by_name(wrapper)
    assert settings.keys() == dict(model.named_parameters()).keys()
    listed = {}
    for rate, modules in LISTED[family]:
        for name, (lr, decay) in settings.items():
            if any(re.match(rf'backbone\.{re.escape(module)}(\.|$)', name) for module in modules):
                assert lr == rate, name
                assert decay == 0.05
                listed[name] = rate
    assert listed.keys() == settings.keys() - {'head.weight', 'head.bias'}
    assert settings['head.weight'][0] == 1
    # Grouped by learning rate, and every parameter is in one group with its own name.
    groups = wrapper.optimizer.param_groups
    assert len(groups) == 7
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is parameter for group in groups
               for name, parameter in zip(group['param_names'], group['params']))
    assert all(group['lr'] == group['lr_scale'] for group in groups)


def test_documented_config():
    init_default_scope('mmseg')
    wrapper = build_optim_wrapper(Model(FAMILIES['swin']()), documented('decay_rate')['optim_wrapper'])
    settings = settings_by_name(wrapper)
    assert settings['backbone.patch_embed.proj.weight'] == (pytest.approx(1e-4 * 0.9 ** 6), 0.05)
    assert settings['backbone.norm3.weight'] == (1e-4, 0)


def test_stages():
    layers, num_layers = backbone_layers(FAMILIES['swin'](), 'stage_wise')
    assert num_layers == 4
    assert [layers[f'{name}.weight'] for name in (
        'patch_embed.proj', 'layers.0.blocks.0.norm1', 'layers.0.downsample.norm', 'layers.1.blocks.1.norm1',
        'layers.3.blocks.0.norm1', 'norm3')] == [0, 1, 2, 2, 4, 5]


def test_other_options_of_mmengine():
    """No weight decay where paramwise_cfg says so, its multipliers on top of the layers', frozen stages left out."""
    backbone = InLineSwin({**PYRAMID, 'attn_types': KINDS}, frozen_stages=1)
    wrapper = make_wrapper(Model(backbone), decay_rate=0.5, norm_decay_mult=0., bias_decay_mult=0., custom_keys={
        'relative_position_bias_table': dict(decay_mult=0.), 'head': dict(lr_mult=10.)})
    settings = settings_by_name(wrapper)
    assert settings['backbone.layers.1.blocks.0.norm1.weight'] == (1 / 16, 0)
    assert settings['backbone.layers.1.blocks.0.mlp.fc1.bias'] == (1 / 16, 0)
    assert settings['backbone.layers.1.blocks.0.attn.relative_position_bias_table'] == (1 / 16, 0)
    assert settings['backbone.layers.1.blocks.0.mlp.fc1.weight'] == (1 / 16, 0.05)
    assert settings['head.weight'] == (10, 0.05)
    assert not any(name.startswith(('backbone.patch_embed', 'backbone.layers.0')) for name in settings)


@pytest.mark.parametrize('paramwise_cfg, message', [
    (dict(), r'needs a decay_rate in \(0, 1\], got None'),
    (dict(decay_rate=1.5), r'in \(0, 1\], got 1.5'),
    (dict(decay_rate=0.9, decay_typ='stage_wise'), "no option 'decay_typ'; did you mean decay_type?"),
    (dict(decay_rate=0.9, decay_type='block_wise'), "one of .*, got 'block_wise'"),
    (dict(decay_rate=0.9, num_layers=12), r'InLineDeiT has 5 layers to decay over \(layer_wise\), .* num_layers=12'),
])
def test_refused(paramwise_cfg, message):
    with pytest.raises(ValueError, match=message):
        make_wrapper(Model(FAMILIES['deit']()), **paramwise_cfg)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="Linear has a parameter 'weight', which is in none of their layers"):
        make_wrapper(Model(nn.Linear(2, 2)), decay_rate=0.9)
    with pytest.raises(ValueError, match='a model with a backbone, got Linear'):
        make_wrapper(nn.Linear(2, 2), decay_rate=0.9)


# ---- a run ------------------------------------------------------------------------------------------------
class Images(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(3, 32, 32)


class Trained(BaseModel):
    def __init__(self):
        super().__init__()
        self.backbone = FAMILIES['pvt']()

    def forward(self, image, mode):
        return dict(loss=self.backbone(image[None])[-1].square().mean())


@pytest.mark.skipif(not importlib.util.find_spec('tensorboard'), reason='tensorboard is not installed')
@pytest.mark.parametrize('visualizer', ['DetLocalVisualizer', 'SegLocalVisualizer'])
def test_tensorboard(tmp_path, visualizer):
    """A run whose visualiser has a TensorBoard backend, as docs say, leaves its curves for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runner = Runner(
        default_scope='mmdet' if visualizer.startswith('Det') else 'mmseg', work_dir=str(tmp_path), model=Trained(),
        train_dataloader=dict(dataset=Images(), batch_size=1, sampler=dict(type='DefaultSampler', shuffle=False)),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(constructor='mminline.LayerDecayOptimWrapperConstructor',
                           optimizer=dict(type='AdamW', lr=1e-3), paramwise_cfg=dict(decay_rate=0.5)),
        default_hooks=dict(logger=dict(type='LoggerHook', interval=1), checkpoint=None),
        experiment_name=tmp_path.name,
        visualizer=dict(type=visualizer, name=tmp_path.name, **documented('Tensorboard')['visualizer']))
    runner.train()
    [folder] = tmp_path.glob('*/vis_data')
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {'loss', 'lr'} <= set(events.Tags()['scalars'])
    losses = [event.value for event in events.Scalars('loss')]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert [event.value for event in events.Scalars('base_lr')] == pytest.approx([1e-3] * 4)
