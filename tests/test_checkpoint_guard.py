"""A checkpoint with other shapes is refused before the first step, unless training may start from it."""
import copy

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

from mminline.models import InLinePVT
from mminline.preflight import RunError

from .test_pvt import NARROW


class Model(BaseModel):
    def __init__(self, pretrain_img_size=64, num_classes=3):
        super().__init__()
        self.backbone = InLinePVT(NARROW, pretrain_img_size=pretrain_img_size)
        self.head = torch.nn.Conv2d(64, num_classes, 1)

    def forward(self, inputs, data_samples=None, mode='loss'):
        return dict(loss=self.head(self.backbone(torch.stack(inputs))[-1]).square().mean())


def run(work_dir, model, starts_training=False, **options):
    data = dict(dataset=[dict(inputs=torch.ones(3, 32, 32))] * 2, sampler=dict(type='DefaultSampler', shuffle=False),
                batch_size=1, collate_fn=dict(type='pseudo_collate'))
    runner = Runner(model, str(work_dir), train_dataloader=copy.deepcopy(data),
                    train_cfg=dict(by_epoch=True, max_epochs=options.pop('max_epochs', 1)),
                    optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
                    custom_hooks=[dict(type='mminline.CheckpointGuardHook', starts_training=starts_training)],
                    **options)
    runner.train()
    return runner


@pytest.fixture
def checkpoint(tmp_path):
    run(tmp_path / 'first', Model(), experiment_name='first')
    return str(tmp_path / 'first' / 'epoch_1.pth')


def test_resume_into_the_same_model(tmp_path, checkpoint):
    runner = run(tmp_path / 'second', Model(), load_from=checkpoint, resume=True, max_epochs=2, experiment_name='same')
    assert runner.iter == 4


def test_resume_into_another_size_is_refused(tmp_path, checkpoint):
    with pytest.raises(RunError, match=r'cannot resume from .*epoch_1.pth: 4 parameters differ, such as '
                                       r'backbone.pos_embed1, \(1, 256, 32\) in the checkpoint and \(1, 576, 32\) in '
                                       r'the model'):
        run(tmp_path / 'second', Model(96), load_from=checkpoint, resume=True, max_epochs=2, experiment_name='refused')


def test_loading_into_another_size_resizes(tmp_path, checkpoint):
    runner = run(tmp_path / 'second', Model(96), load_from=checkpoint, experiment_name='loaded')
    assert runner.iter == 2


def test_another_head_may_start_from_it(tmp_path, checkpoint):
    model = Model(num_classes=5)
    with pytest.raises(RunError, match=r'cannot use .*: 2 parameters differ, such as head.bias, \(3,\) in'):
        run(tmp_path / 'second', model, load_from=checkpoint, experiment_name='tested')
    runner = run(tmp_path / 'third', model, starts_training=True, load_from=checkpoint, experiment_name='started')
    assert runner.iter == 2


def test_another_backbone_may_not(tmp_path, checkpoint):
    other = torch.load(checkpoint)
    other['state_dict'] = {name.replace('mlp.fc', 'ffn.'): value for name, value in other['state_dict'].items()}
    torch.save(other, tmp_path / 'other.pth')
    with pytest.raises(RunError, match='cannot use .*other.pth: these weights do not fit InLinePVT, .* missing '
                                       r'\(block1.0.mlp.fc1.weight, .* unexpected \(block1.0.ffn.1.weight'):
        run(tmp_path / 'second', Model(), starts_training=True, load_from=str(tmp_path / 'other.pth'),
            experiment_name='other')


@pytest.mark.parametrize('starts_training, message', [
    (False, r'\d+ parameters differ, such as \S+, none in the checkpoint'),
    (True, 'these weights do not fit InLinePVT, .* 0.0% loaded')])
def test_a_file_of_another_layout(tmp_path, checkpoint, starts_training, message):
    """As the authors' files are: what it holds is no state dict of a whole model."""
    torch.save(dict(model=torch.load(checkpoint)['state_dict']), tmp_path / 'official.pth')
    with pytest.raises(RunError, match=f'cannot use .*official.pth: {message}'):
        run(tmp_path / 'second', Model(), starts_training=starts_training, load_from=str(tmp_path / 'official.pth'),
            experiment_name=f'layout-{starts_training}')
