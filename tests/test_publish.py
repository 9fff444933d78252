"""tools/publish_checkpoint.py: what is in the file, what is not, and that others can use it."""
import copy
import hashlib
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdet.apis import DetInferencer
from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.logging import HistoryBuffer
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import MODELS, DefaultScope

from mminline.preflight import RunError
from mminline.publish import inference_config, publish_checkpoint

ROOT = Path(__file__).parents[1]
DEMO = ROOT / 'configs/demo/inline_pvt_maskrcnn_shapes.py'
HOME = '/home/someone'


def load_demo() -> Config:
    cfg = Config.fromfile(DEMO)
    cfg.work_dir = f'{HOME}/work_dirs/demo'
    cfg.load_from = f'{HOME}/start.pth'
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.data_root = f'{HOME}/shapes'
    cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=f'{HOME}/weights.pth')
    return cfg


@pytest.fixture(scope='module')
def model():
    with DefaultScope.overwrite_default_scope('mmdet'):
        return MODELS.build(Config.fromfile(DEMO).model)


def run_checkpoint(model, cfg: Config) -> dict:
    """What a run saves, in the types that it saves."""
    return dict(
        meta=dict(cfg=cfg.pretty_text, seed=1, experiment_name='demo_20260101', time='20260101_000000', epoch=10,
                  iter=1000, mmengine_version='0.10.7', dataset_meta=dict(classes=('circle', 'square', 'triangle'))),
        state_dict=copy.deepcopy(model.state_dict()),
        message_hub=dict(log_scalars={'train/loss': HistoryBuffer([0.5], [1])}, runtime_info={'cfg': cfg.pretty_text},
                         resumed_keys={}),
        optimizer=dict(state={0: dict(exp_avg=torch.zeros(1000))}, param_groups=[dict(lr=1e-3, params=[0])]),
        param_schedulers=[dict(last_step=10, gamma=np.float64(0.1))])


@pytest.fixture
def saved(model, tmp_path):
    """The path of a run's checkpoint, and its config."""
    cfg = load_demo()
    path = tmp_path / 'epoch_10.pth'
    torch.save(run_checkpoint(model, cfg), path)
    return path, cfg


@pytest.fixture
def restores_safe_globals():
    found = torch.serialization.get_safe_globals()
    yield
    torch.serialization.add_safe_globals(found)


def test_content(saved, model, tmp_path, restores_safe_globals):
    path, cfg = saved
    published = publish_checkpoint(cfg, path, tmp_path / 'new' / 'folder')
    digest = hashlib.sha256(published.read_bytes()).hexdigest()
    assert published.name == f'inline_pvt_maskrcnn_shapes-{digest[:8]}.pth'
    assert list(published.parent.iterdir()) == [published]

    torch.serialization.clear_safe_globals()  # no help from this project
    content = torch.load(published, weights_only=True)
    assert set(content) == {'meta', 'state_dict'}
    assert set(content['meta']) == {'cfg', 'dataset_meta', 'epoch', 'iter', 'mmengine_version', 'mminline_version'}
    assert content['meta']['epoch'] == 10
    torch.testing.assert_close(dict(content['state_dict']), dict(model.state_dict()), rtol=0, atol=0)
    assert HOME.encode() not in published.read_bytes()


def test_same_content_gets_the_same_name(saved, tmp_path):
    path, cfg = saved
    again = path.with_name('copy.pth')
    checkpoint = torch.load(path, weights_only=True)
    checkpoint['meta']['time'] = 'later'
    torch.save(checkpoint, again)
    names = {publish_checkpoint(cfg, source, tmp_path / source.stem).name for source in (path, again)}
    assert len(names) == 1


def test_averaged_weights(model, tmp_path):
    """mmengine's own hook swaps the weights when it saves: those to be published are the averaged ones."""
    average = ExponentialMovingAverage(model, momentum=0.5)
    trained = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 1
    average.update_parameters(trained)  # the first one copies
    average.update_parameters(model)
    hook = EMAHook()
    hook.src_model, hook.ema_model = trained, average
    cfg = load_demo()
    checkpoint = run_checkpoint(trained, cfg)
    hook.before_save_checkpoint(SimpleNamespace(epoch=1, iter=1), checkpoint)
    torch.save(checkpoint, tmp_path / 'epoch_10.pth')

    content = torch.load(publish_checkpoint(cfg, tmp_path / 'epoch_10.pth', tmp_path), weights_only=True)
    assert 'ema_state_dict' not in content
    name = 'backbone.patch_embed1.proj.weight'
    torch.testing.assert_close(content['state_dict'][name], model.state_dict()[name] + 0.5)


def test_inferencer_needs_nothing_else(saved, tmp_path, monkeypatch):
    path, cfg = saved
    published = publish_checkpoint(cfg, path, tmp_path)
    monkeypatch.chdir(tmp_path)
    inferencer = DetInferencer(weights=str(published), device='cpu', show_progress=False)
    assert inferencer.visualizer.dataset_meta['classes'] == ('circle', 'square', 'triangle')
    image = np.random.default_rng(0).integers(256, size=(48, 80, 3), dtype=np.uint8)
    [prediction] = inferencer(image, no_save_vis=True)['predictions']
    assert set(prediction) >= {'bboxes', 'scores', 'labels'}


@pytest.mark.parametrize('name', ['inline_pvt_maskrcnn', 'inline_swin_upernet'])
def test_inference_config(name):
    cfg = Config.fromfile(ROOT / f'configs/{name}.py')
    before = cfg.pretty_text
    kept = inference_config(cfg)
    assert cfg.pretty_text == before
    assert set(kept) == {'default_scope', 'custom_imports', 'model', 'test_dataloader', 'test_cfg', 'visualizer'} | (
        {'tta_model', 'tta_pipeline'} & set(cfg))
    assert kept.model.backbone.init_cfg is None
    assert kept.test_dataloader.dataset.pipeline == cfg.test_dataloader.dataset.pipeline
    assert not {'data_root', 'ann_file', 'data_prefix'} & set(kept.test_dataloader.dataset)
    assert Config.fromstring(kept.pretty_text, '.py').to_dict() == kept.to_dict()


# ---- refused ------------------------------------------------------------------------------------------
def test_weights_of_another_model_are_refused(saved, tmp_path):
    path, cfg = saved
    cfg.model.roi_head.bbox_head.num_classes = 5
    with pytest.raises(RunError, match=r'are not those of the model of .*shapes\.py: 2 parameters differ, such as '
                                       r'roi_head\.bbox_head\.fc_cls\.bias, \(4,\) in the checkpoint and \(6,\)'):
        publish_checkpoint(cfg, path, tmp_path / 'new')
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('content, message', [
    (None, 'there is no checkpoint file'),
    (b'', 'it seems damaged or incomplete'),
    (dict(model={}), 'is no checkpoint of a run: it has no state_dict'),
    ([1, 2], 'is no checkpoint of a run: it has no state_dict'),
    (dict(state_dict={}, extra=SimpleNamespace()), 'was not loaded, for safety'),
])
def test_other_files_are_refused(content, message, tmp_path):
    path = tmp_path / 'file.pth'
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(RunError, match=message):
        publish_checkpoint(load_demo(), path, tmp_path / 'new')


def test_interrupted_writing_leaves_nothing(saved, tmp_path, monkeypatch):
    path, cfg = saved

    def full_disk(content, file):
        file.write(b'half of it')
        raise OSError('No space left on device')

    monkeypatch.setattr(torch, 'save', full_disk)
    with pytest.raises(OSError, match='No space left'):
        publish_checkpoint(cfg, path, tmp_path / 'new')
    assert list((tmp_path / 'new').iterdir()) == []


def test_command_line(model, tmp_path, monkeypatch, capsys):
    checkpoint = tmp_path / 'epoch_10.pth'
    torch.save(run_checkpoint(model, load_demo()), checkpoint)

    def publish(*args) -> None:
        monkeypatch.setattr(sys, 'argv', ['publish_checkpoint.py', *map(str, args)])
        runpy.run_path(str(ROOT / 'tools/publish_checkpoint.py'), run_name='__main__')

    publish(DEMO, checkpoint)
    match = re.fullmatch(r'(.+-[0-9a-f]{8}\.pth): \d+\.\d MB\n', capsys.readouterr().out)
    assert Path(match[1]).parent == tmp_path and Path(match[1]).exists()
    with pytest.raises(SystemExit) as end:
        publish(DEMO, tmp_path / 'nothing.pth')
    assert end.value.code == 2 and 'there is no checkpoint file' in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        publish(DEMO, checkpoint, '--out-dir', checkpoint)
    assert end.value.code == 2 and f"cannot write: [Errno 17] File exists: '{checkpoint}'" in capsys.readouterr().err
