"""Two gloo processes on the CPU train what one process trains."""
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mminline.datasets import make_shapes
from mminline.safe_loading import load_weights_file

from .test_sync_bn import run

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('whole runs')]

# Logs of a run are those of its first process; this writes the mean over all.
LOSSES = """
import json
import mmengine
from mmengine.dist import all_reduce_dict, is_main_process

@mmengine.HOOKS.register_module()
class WriteLosses(mmengine.hooks.Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        losses = {name: value for name, value in outputs.items() if 'loss' in name}
        all_reduce_dict(losses, 'mean')
        if is_main_process():
            with open('losses.jsonl', 'a') as file:
                file.write(json.dumps({name: float(value) for name, value in losses.items()}) + '\\n')
"""

SEGMENTOR = f"""
_base_ = {str(ROOT / 'configs/demo/inline_swin_upernet_shapes.py')!r}
custom_imports = dict(imports=['mminline', 'losses'])
custom_hooks = [dict(type='WriteLosses')]
norm_cfg = dict(type='GN', num_groups=4)  # what a batch norm does depends on how many images a process has
model = dict(
    backbone=dict(arch=dict(embed_dims=(16, 16, 16, 16), num_heads=(1, 1, 1, 1), depths=(1, 1, 1, 1))),
    decode_head=dict(in_channels=[16, 16, 16, 16], channels=16, norm_cfg=norm_cfg),
    auxiliary_head=dict(in_channels=16, channels=16, norm_cfg=norm_cfg))
# No random crop or flip: processes draw different random numbers.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='Resize', scale=(128, 128), keep_ratio=False),
    dict(type='PackSegInputs')
]
train_dataloader = dict(sampler=dict(shuffle=False), dataset=dict(pipeline=train_pipeline))
train_cfg = dict(max_iters=5, val_interval=5)
# Adam would turn the rounding errors of tiny gradients into steps of full length.
optim_wrapper = dict(_delete_=True, type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
param_scheduler = []
default_hooks = dict(checkpoint=dict(interval=5))
"""

DETECTOR = f"""
_base_ = {str(ROOT / 'configs/demo/inline_pvt_maskrcnn_shapes.py')!r}
custom_imports = dict(imports=['mminline', 'losses'])
custom_hooks = [dict(type='WriteLosses')]
model = dict(
    backbone=dict(arch=dict(
        embed_dims=(16, 16, 32, 32), num_heads=(1, 1, 2, 2), depths=(1, 1, 1, 1), mlp_ratios=(2, 2, 2, 2))),
    neck=dict(in_channels=[16, 16, 32, 32]))
# Images 1, 3, 5 ... have no objects: without shuffling, the second process never sees one.
train_dataloader = dict(
    batch_size=2, sampler=dict(shuffle=False), dataset=dict(filter_cfg=dict(filter_empty_gt=False)))
train_cfg = dict(max_epochs=3, val_interval=3)
param_scheduler = []
default_hooks = dict(checkpoint=dict(interval=3))
"""


def train(config, folder, work_dir, processes, batch_size):
    """Trains in a folder; returns its losses by iteration and its weights."""
    tool = ['dist_train.sh', config, str(processes)] if processes > 1 else ['train.py', config]
    (folder / 'losses.jsonl').unlink(missing_ok=True)
    run(*tool, '--work-dir', work_dir, '--cfg-options', f'train_dataloader.batch_size={batch_size}', cwd=folder)
    losses = [json.loads(line) for line in (folder / 'losses.jsonl').read_text().splitlines()]
    last = (folder / work_dir / 'last_checkpoint').read_text()
    return losses, load_weights_file(last)['state_dict']


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))  # where the configs' losses.py is
    make_shapes(tmp_path / 'data/shapes', num_images=22)
    for name, text in (('losses', LOSSES), ('segmentor', SEGMENTOR), ('detector', DETECTOR)):
        (tmp_path / f'{name}.py').write_text(text)
    return tmp_path


def test_gradients_of_the_backbones(tmp_path):
    """In float64, relative to the norm of all gradients; with frozen stages and recomputation, too."""
    subprocess.run(
        [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2', '--standalone',
         ROOT / 'tests/gradients_of_two_processes.py', 'errors.json'], cwd=tmp_path, check=True)
    errors = json.loads((tmp_path / 'errors.json').read_text())
    assert {case.split(',')[0] for case in errors} == {'pvt', 'swin', 'cswin', 'deit'} and len(errors) >= 40
    assert {case: error for case, error in errors.items() if not error < 1e-12} == {}


def test_segmentor_gives_the_losses_of_one_process(folder):
    """Two processes with two images each against one with the same four, five steps of SGD."""
    losses, weights = train('segmentor.py', folder, 'one', processes=1, batch_size=4)
    losses_of_two, weights_of_two = train('segmentor.py', folder, 'two', processes=2, batch_size=2)
    assert len(losses) == 5 and len({loss['loss'] for loss in losses}) == 5
    for one, two in zip(losses, losses_of_two, strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    torch.testing.assert_close(dict(weights_of_two), dict(weights), rtol=1e-3, atol=1e-5)  # names the tensor


def test_detector_with_images_without_objects_and_an_uneven_last_batch(folder):
    """DistributedDataParallel itself refuses a parameter without a gradient."""
    annotations = folder / 'data/shapes/coco/annotations/train.json'
    content = json.loads(annotations.read_text())
    empty = {image['id'] for image in content['images'][1::2]}
    content['annotations'] = [item for item in content['annotations'] if item['image_id'] not in empty]
    annotations.write_text(json.dumps(content))

    losses, _ = train('detector.py', folder, 'run', processes=2, batch_size=2)
    assert len(losses) == 3 * 6  # 11 images for each process: five batches of two and one of one
    assert all(math.isfinite(value) for loss in losses for value in loss.values())
    first, last = (sum(loss['loss'] for loss in losses[part]) for part in (slice(6), slice(-6, None)))
    assert last < 0.9 * first
