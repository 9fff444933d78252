"""tools/train.py and tools/test.py: what they refuse and how, what their options do, and whole runs."""
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.fileio import load

from mminline import runs
from mminline.datasets import make_shapes
from mminline.preflight import RunError, check_files, explain_unknown_name

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / 'configs/demo/inline_pvt_maskrcnn_shapes.py')
COCO = str(ROOT / 'configs/inline_pvt_maskrcnn.py')


@pytest.fixture(scope='module')
def data_root(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp('data') / 'shapes'
    make_shapes(out_dir, num_images=24)
    return out_dir / 'coco'


@pytest.fixture
def start(monkeypatch, capsys, tmp_path):
    """Runs a tool in this process up to where the runner would be built.

    Returns the config that the runner would get, or the message of a refused run.
    """
    runners = []
    monkeypatch.setattr(
        runs, '_build_runner',
        lambda cfg: runners.append(cfg) or SimpleNamespace(train=lambda: None, test=lambda: None))
    monkeypatch.chdir(tmp_path)

    def start_here(tool, *args):
        monkeypatch.setattr(sys, 'argv', [f'{tool}.py', *map(str, args)])
        try:
            runpy.run_path(str(ROOT / 'tools' / f'{tool}.py'), run_name='__main__')
        except SystemExit as end:
            assert end.code == 2 and not runners
            return capsys.readouterr().err
        return runners.pop()

    return start_here


# ---- refused runs -------------------------------------------------------------------------------------
def test_missing_files_end_in_one_message(tmp_path):
    """In a process of its own: nothing else on stderr, nothing left behind."""
    result = subprocess.run(
        [sys.executable, ROOT / 'tools/train.py', COCO], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith('Cannot train: 5 of the 5 files and folders')
    for fragment in ('data/coco/\n', 'annotations/instances_train2017.json  missing', 'train2017',
                     'annotations/instances_val2017.json', 'val2017', 'checkpoints/inline_pvt_tiny.pth',
                     'data_root=FOLDER', 'model.backbone.init_cfg.checkpoint=FILE', '--from-scratch', 'make demo'):
        assert fragment in result.stderr, fragment
    assert list(tmp_path.iterdir()) == []


REFUSED = {
    'no such config': (['nowhere.py'], 'nowhere.py: no such config file'),
    'config with a syntax error': (['broken.py'], 'broken.py cannot be read: SyntaxError'),
    'config without a toolbox': (['bare.py'], 'default_scope must be one of mmdet, mmseg, got None'),
    'option without a value': ([DEMO, '--cfg-options', 'lr'], "expected KEY=VALUE, got 'lr'"),
    'option with unbalanced brackets': ([DEMO, '--cfg-options', 'a=[1,(2]'], 'Imbalanced brackets'),
    'option that does not fit': ([DEMO, '--cfg-options', 'work_dir.x=1', 'data_root.x=1'], 'does not fit the config'),
    'misspelt option': ([DEMO, '--cfg-options', 'trian_cfg.max_epochs=1'], 'did you mean train_cfg?'),
    'misspelt class': ([DEMO, '--cfg-options', 'model.backbone.type=mminline.InLinePTV'],
                       'model.backbone.type: mminline.InLinePTV is not registered; did you mean mminline.InLinePVT?'),
    'misspelt argument': ([DEMO, '--cfg-options', 'model.backbone.drop_path=0.1'],
                          "mminline.InLinePVT has no argument 'drop_path'; did you mean drop_path_rate?"),
    'launcher without torchrun': ([DEMO, '--launcher', 'pytorch'], 'use tools/dist_train.sh'),
    'learning rate without a base': ([DEMO, '--auto-scale-lr', '--cfg-options', 'auto_scale_lr=None'],
                                     'no auto_scale_lr.base_batch_size'),
    'missing checkpoint': ([DEMO, '--resume', 'gone.pth'], r'gone.pth +missing +--resume'),
}


@pytest.mark.parametrize('args, message', REFUSED.values(), ids=REFUSED)
def test_train_refuses(start, tmp_path, monkeypatch, args, message):
    monkeypatch.delenv('RANK', raising=False)
    (tmp_path / 'broken.py').write_text('model = dict(')
    (tmp_path / 'bare.py').write_text('model = dict()')
    error = start('train', *args)
    assert re.search(message, error) or message in error, error


def test_test_refuses_a_missing_checkpoint_and_a_wrong_output(start, data_root):
    data = ['--cfg-options', f'data_root={data_root}']
    error = start('test', DEMO, 'gone.pth', *data)
    assert 'Cannot test: 1 of the 3 files' in error and re.search('gone.pth +missing +CHECKPOINT', error)
    assert '.pkl' in start('test', DEMO, 'gone.pth', '--out', 'result.json', *data)


def test_stale_last_checkpoint_is_named(start, tmp_path, data_root):
    (tmp_path / 'last_checkpoint').write_text('/gone/epoch_3.pth')
    error = start('train', DEMO, '--resume', '--work-dir', tmp_path, '--cfg-options', f'data_root={data_root}')
    assert '/gone/epoch_3.pth' in error and '--resume CHECKPOINT' in error


@pytest.mark.parametrize('name, nearest', [('FPNN', 'FPN'), ('InLinePVT', 'mminline.InLinePVT'),
                                           ('mmdet.RestNet', 'ResNet'), ('mmfoo.Qzxw', None)])
def test_unknown_types_of_the_toolboxes_name_the_nearest(name, nearest):
    with pytest.raises(KeyError) as caught:
        MODELS.build(dict(type=name))
    message = str(explain_unknown_name(caught.value))
    assert message == f'{name} is not registered as a model' + (f'; did you mean {nearest}?' if nearest else '')


def test_other_key_errors_are_left_alone():
    assert explain_unknown_name(KeyError('img_path')) is None
    assert explain_unknown_name(KeyError(3)) is None


def test_data_sets_inside_wrappers_are_checked(tmp_path):
    leaf = dict(type='CocoDataset', data_root=str(tmp_path), data_prefix=dict(img=''))
    nested = dict(type='RepeatDataset', times=2, dataset=dict(
        type='ConcatDataset', datasets=[dict(leaf, ann_file='a.json'), dict(leaf, ann_file='b.json')]))
    cfg = Config(dict(model=dict(), train_dataloader=dict(dataset=nested)))
    (tmp_path / 'a.json').touch()
    with pytest.raises(RunError, match='1 of the 2 files') as caught:
        check_files(cfg, 'train')
    assert re.search(r'b.json +missing +train_dataloader.dataset.dataset.datasets.1.ann_file', str(caught.value))
    (tmp_path / 'b.json').touch()
    check_files(cfg, 'train')


def test_other_storage_is_left_to_its_reader():
    remote = dict(data_root='s3://bucket/coco', ann_file='a.json', data_prefix=dict(img='train/'))
    petrel = dict(data_root='data/coco', ann_file='a.json', backend_args=dict(backend='petrel'))
    weights = dict(init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet50'))
    check_files(Config(dict(model=dict(backbone=weights), train_dataloader=dict(dataset=remote),
                            val_dataloader=dict(dataset=petrel))), 'train')


# ---- options ------------------------------------------------------------------------------------------
def test_data_root_moves_everything_below_it(start, data_root):
    cfg = start('train', DEMO, '--cfg-options', f'data_root={data_root}')
    for split in ('train', 'val', 'test'):
        assert cfg[f'{split}_dataloader'].dataset.data_root == f'{data_root}/'
    assert cfg.val_evaluator.ann_file == cfg.test_evaluator.ann_file == f'{data_root}/annotations/val.json'


def test_options_of_train(start, data_root, tmp_path):
    cfg = start('train', DEMO, '--auto-scale-lr', '--cfg-options', f'data_root={data_root}')
    assert cfg.auto_scale_lr.enable and cfg.work_dir == 'work_dirs/inline_pvt_maskrcnn_shapes'
    assert (cfg.resume, cfg.load_from) == (False, None)

    cfg = start('train', DEMO, '--resume', '--work-dir', 'here', '--cfg-options', f'data_root={data_root}')
    assert (cfg.resume, cfg.load_from, cfg.work_dir) == (True, None, 'here')

    (tmp_path / 'some.pth').touch()
    cfg = start('train', DEMO, '--resume', 'some.pth', '--cfg-options', f'data_root={data_root}')
    assert (cfg.resume, cfg.load_from) == (True, 'some.pth')


def test_amp(start, data_root):
    data = [f'data_root={data_root}', 'optim_wrapper.type=AmpOptimWrapper']
    for options in (data[:1], data):
        cfg = start('train', DEMO, '--amp', '--cfg-options', *options)
        assert cfg.optim_wrapper.type == 'mminline.AmpOptimWrapper'
    error = start('train', DEMO, '--amp', '--cfg-options', 'optim_wrapper.type=ApexOptimWrapper')
    assert error == '--amp replaces an OptimWrapper, and the config has ApexOptimWrapper\n'


def test_from_scratch_drops_pretrained_weights_only(start, data_root):
    options = [f'data_root={data_root}', 'load_from=some.pth', 'model.backbone.init_cfg.type=Pretrained',
               'model.backbone.init_cfg.checkpoint=gone.pth']
    config = Config.fromfile(DEMO)
    config.model.backbone.init_cfg = dict()
    config.model.neck.init_cfg = [dict(type='Xavier', layer='Conv2d'), dict(type='Pretrained', checkpoint='gone')]
    config.dump('config.py')
    error = start('train', 'config.py', '--cfg-options', *options)
    assert 'Cannot train: 3 of the 7 files' in error
    cfg = start('train', 'config.py', '--from-scratch', '--cfg-options', *options)
    assert cfg.model.backbone.init_cfg is None and cfg.load_from is None
    assert cfg.model.neck.init_cfg == [dict(type='Xavier', layer='Conv2d')]


def test_options_of_test_for_detection(start, data_root, tmp_path):
    (tmp_path / 'some.pth').touch()
    data = ['--cfg-options', f'data_root={data_root}']
    cfg = start('test', DEMO, 'some.pth', '--out', 'all.pkl', '--show-dir', 'painted', *data)
    assert cfg.load_from == 'some.pth'
    assert [evaluator.type for evaluator in cfg.test_evaluator] == ['CocoMetric', 'DumpDetResults']
    assert cfg.default_hooks.visualization.draw and cfg.default_hooks.visualization.test_out_dir == 'painted'

    cfg = start('test', DEMO, 'some.pth', '--tta', *data)
    assert cfg.model.type == 'DetTTAModel' and cfg.model.module.type == 'MaskRCNN'
    assert cfg.test_dataloader.dataset.pipeline[-1].type == 'TestTimeAug'
    assert cfg.model.module.roi_head.mask_head is None and cfg.test_evaluator.metric == 'bbox'


def test_options_of_test_for_segmentation(start, data_root, tmp_path):
    (tmp_path / 'some.pth').touch()
    (tmp_path / 'seg.py').write_text("_base_ = ['mmseg::_base_/models/fpn_r50.py', "
                                     "'mmseg::_base_/datasets/ade20k.py', 'mmseg::_base_/schedules/schedule_40k.py', "
                                     "'mmseg::_base_/default_runtime.py']")
    for folder in ('images', 'annotations'):
        (tmp_path / 'ade' / folder / 'validation').mkdir(parents=True)
    cfg = start('test', 'seg.py', 'some.pth', '--out', 'maps', '--show-dir', 'painted', '--tta',
                '--cfg-options', 'data_root=ade')
    assert cfg.test_evaluator.output_dir == 'maps' and cfg.test_evaluator.keep_results
    assert cfg.default_hooks.visualization.draw and cfg.visualizer.save_dir == 'painted'
    assert cfg.model.type == 'SegTTAModel' and cfg.model.module.type == 'EncoderDecoder'
    assert cfg.test_dataloader.dataset.pipeline[-1].type == 'TestTimeAug'


# ---- whole runs: a small detector, trained once for all of these tests -----------------------------------
whole_run = [pytest.mark.slow, pytest.mark.xdist_group('whole runs')]  # one process of xdist runs them all

SMALL = f"""
_base_ = {DEMO!r}
model = dict(
    backbone=dict(arch=dict(
        embed_dims=(32, 32, 64, 64), num_heads=(1, 1, 2, 2), depths=(1, 1, 1, 1), mlp_ratios=(2, 2, 2, 2))),
    neck=dict(in_channels=[32, 32, 64, 64]),
    test_cfg=dict(rcnn=dict(score_thr=0.0)))  # hardly trained, it is sure of nothing
train_cfg = dict(max_epochs=2, val_interval=1)
param_scheduler = [dict(type='ConstantLR', factor=1.0, by_epoch=True)]  # no time to warm up
# Two epochs teach no classes, and equal zeros would prove nothing: found objects of many images count, too.
val_dataloader = dict(dataset=dict(ann_file='annotations/train.json', data_prefix=dict(img='train/')))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='data/shapes/coco/annotations/train.json', metric_items=['mAP', 'AR@100'])
test_evaluator = val_evaluator
"""

# Kills its processes, the data loaders' too, in the middle of the fourth epoch.
KILLED = """
_base_ = 'small.py'
custom_imports = dict(imports=['mminline', 'kill_hook'])
custom_hooks = [dict(type='KillHook')]
"""
KILL_HOOK = """
import os
import signal

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class KillHook(Hook):
    def after_train_iter(self, runner, **batch):
        if runner.iter == 20:
            os.killpg(0, signal.SIGKILL)
"""


def start_tool(tool, *args, cwd, log, **environment):
    """Starts a tool in a process (and group) of its own, on one thread: tests share the cores."""
    interpreter = [] if tool.endswith('.sh') else [sys.executable]
    return subprocess.Popen(
        [*interpreter, ROOT / 'tools' / tool, *map(str, args)], cwd=cwd, stdout=log, stderr=log,
        env={**os.environ, 'OMP_NUM_THREADS': '1', **environment}, start_new_session=True)


def run_tool(tool, *args, cwd, **environment):
    """Runs a tool to its end; returns its output."""
    with tempfile.TemporaryFile('w+') as log:
        status = start_tool(tool, *args, cwd=cwd, log=log, **environment).wait()
        log.seek(0)
        output = log.read()
    assert status == 0, output[-3000:]
    return output


def last_metrics(output):
    """The metrics that a run printed last, name to value."""
    line = re.findall(r'Epoch\((?:val|test)\) .*coco/.*', output)[-1]
    return dict(re.findall(r'(coco/\S+): (\S+)', line))


@pytest.fixture(scope='module')
def trained(tmp_path_factory, data_root):
    """A folder with small.py, trained for two epochs into run/, and what training printed."""
    folder = tmp_path_factory.mktemp('trained')
    (folder / 'small.py').write_text(SMALL)
    output = run_tool('train.py', 'small.py', '--work-dir', 'run', '--cfg-options', f'data_root={data_root}',
                      cwd=folder)
    return SimpleNamespace(folder=folder, checkpoint=folder / 'run/epoch_2.pth', output=output,
                           data=['--cfg-options', f'data_root={data_root}'])


@pytest.fixture
def run_copy(trained, tmp_path):
    """The trained run where a test may go on with it."""
    (tmp_path / 'small.py').write_text(SMALL)
    shutil.copytree(trained.folder / 'run', tmp_path / 'run')
    (tmp_path / 'run/last_checkpoint').write_text(str(tmp_path / 'run/epoch_2.pth'))
    return tmp_path


class TestWholeRuns:
    pytestmark = whole_run

    def test_test_repeats_the_metrics_of_training(self, trained, tmp_path):
        output = run_tool('test.py', trained.folder / 'small.py', trained.checkpoint, '--work-dir', 'tested',
                          '--out', 'all.pkl', '--show-dir', 'painted', *trained.data, cwd=tmp_path)
        metrics = last_metrics(output)
        assert metrics == last_metrics(trained.output)
        assert float(metrics['coco/bbox_AR@100']) > 0 and float(metrics['coco/segm_AR@100']) > 0
        detections = load(tmp_path / 'all.pkl')
        assert len(detections) == 24 and 'masks' in detections[0]['pred_instances']
        assert len(list(tmp_path.glob('tested/*/painted/*.jpg'))) == 24

    def test_test_time_augmentation(self, trained, tmp_path):
        output = run_tool('test.py', trained.folder / 'small.py', trained.checkpoint, '--tta', *trained.data,
                          cwd=tmp_path)
        assert {name.split('_')[0] for name in last_metrics(output)} == {'coco/bbox'}

    def test_two_more_epochs(self, trained, run_copy):
        output = run_tool('train.py', 'small.py', '--work-dir', 'run', '--resume', *trained.data,
                          'train_cfg.max_epochs=4', cwd=run_copy)
        assert 'resumed epoch: 2, iter: 12' in output
        assert re.findall(r'Epoch\(val\) \[(\d)\]\[24/24\]', output) == ['3', '4']
        checkpoint = torch.load(run_copy / 'run/epoch_4.pth')
        assert (checkpoint['meta']['epoch'], checkpoint['meta']['iter']) == (4, 24)
        assert {int(state['step']) for state in checkpoint['optimizer']['state'].values()} == {24}

    def test_goes_on_after_a_kill(self, trained, run_copy):
        (run_copy / 'killed.py').write_text(KILLED)
        (run_copy / 'kill_hook.py').write_text(KILL_HOOK)
        args = ['--work-dir', 'run', '--resume', *trained.data, 'train_cfg.max_epochs=4']
        path = run_copy / 'log'
        with path.open('w') as log:
            process = start_tool('train.py', 'killed.py', *args, cwd=run_copy, log=log, PYTHONPATH=str(run_copy))
            assert process.wait() == -signal.SIGKILL, path.read_text()[-3000:]
        assert (run_copy / 'run/epoch_3.pth').exists() and not (run_copy / 'run/epoch_4.pth').exists()

        output = run_tool('train.py', 'small.py', *args, cwd=run_copy)
        assert 'resumed epoch: 3, iter: 18' in output
        assert (run_copy / 'run/epoch_4.pth').exists()

    def test_inference_from_another_directory(self, trained, data_root, tmp_path):
        """In a fresh process: nothing but the config says that mminline is needed."""
        (tmp_path / 'infer.py').write_text(f"""
from mmdet.apis import DetInferencer, inference_detector, init_detector

config, checkpoint = {str(trained.folder / 'small.py')!r}, {str(trained.checkpoint)!r}
image = {str(data_root / 'val/000001.jpg')!r}

results = DetInferencer(config, checkpoint, device='cpu')(image, out_dir='out', pred_score_thr=0.0)
assert results['predictions'][0]['masks']

model = init_detector(config, checkpoint, device='cpu')
assert model.dataset_meta['classes'] == ('circle', 'square', 'triangle')
objects = inference_detector(model, image).pred_instances
assert len(objects.masks) == len(objects) > 0
""")
        result = subprocess.run([sys.executable, 'infer.py'], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / 'out/vis/000001.jpg').stat().st_size > 0

    def test_two_processes(self, trained, tmp_path):
        """Through torchrun; without a GPU the processes meet through gloo."""
        config = trained.folder / 'small.py'
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            environment = dict(PORT=str(free.getsockname()[1]), PYTHON=sys.executable)
        few = [*trained.data, *(f'{split}_dataloader.dataset.indices=8' for split in ('train', 'val', 'test'))]
        output = run_tool('dist_train.sh', config, 2, '--work-dir', 'run', *few, 'train_cfg.max_epochs=1',
                          cwd=tmp_path, **environment)
        assert 'GPU number: 2' in output
        tested = run_tool('dist_test.sh', config, 'run/epoch_1.pth', 2, *few, cwd=tmp_path, **environment)
        assert last_metrics(tested) == last_metrics(output)
