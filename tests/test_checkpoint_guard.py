"""Resuming into a model with other shapes ends before the first step, with a message; loading is allowed."""
import copy

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

from mminline.models import InLinePVT
from mminline.preflight import RunError

from .test_pvt import NARROW


class Model(BaseModel):
    def __init__(self, pretrain_img_size=64):
        super().__init__()
        self.backbone = InLinePVT(NARROW, pretrain_img_size=pretrain_img_size)

    def forward(self, inputs, data_samples=None, mode='loss'):
        return dict(loss=self.backbone(torch.stack(inputs))[-1].square().mean())


def run(work_dir, model, **options):
    data = dict(dataset=[dict(inputs=torch.ones(3, 32, 32))] * 2, sampler=dict(type='DefaultSampler', shuffle=False),
                batch_size=1, collate_fn=dict(type='pseudo_collate'))
    runner = Runner(model, str(work_dir), train_dataloader=copy.deepcopy(data),
                    train_cfg=dict(by_epoch=True, max_epochs=options.pop('max_epochs', 1)),
                    optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
                    custom_hooks=[dict(type='mminline.CheckpointGuardHook')], **options)
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
