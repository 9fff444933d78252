"""Runs of MMDetection and MMSegmentation configs: what tools/train.py and tools/test.py share.

A config's ``default_scope`` says which toolbox it is for. Where the two toolboxes give an option a different
meaning, the config's toolbox decides.
"""
import argparse
import copy
import inspect
import os
import os.path as osp
import warnings
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Optional, Union

import torch.distributed
from mmengine.config import Config, ConfigDict, DictAction
from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.logging import print_log
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from .engine import replace_sync_bn
from .preflight import RunError, check_files, check_names, did_you_mean, explain_unknown_name

TOOLBOXES = {'mmdet': 'MMDetection', 'mmseg': 'MMSegmentation'}


# ---- the command line that all runs share -------------------------------------------------------------
class ConfigOptions(DictAction):
    """mmengine's KEY=VALUE options; what it cannot read is an argparse error, not a traceback."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            if '=' not in value:
                raise argparse.ArgumentError(self, f'expected KEY=VALUE, got {value!r}')
        try:
            super().__call__(parser, namespace, values, option_string)
        except AssertionError as error:  # unbalanced brackets
            raise argparse.ArgumentError(self, str(error)) from error


def config_arguments() -> argparse.ArgumentParser:
    """A parent parser with what :func:`read_config` takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument('config', metavar='CONFIG', help='config file')
    parser.add_argument('--cfg-options', nargs='+', action=ConfigOptions, metavar='KEY=VALUE', default={},
                        help='settings that replace those of the config, as optim_wrapper.optimizer.lr=1e-4; '
                        'lists as KEY="[a,b]" or KEY=a,b; data_root=DIR moves every path below the data root')
    return parser


def common_arguments() -> argparse.ArgumentParser:
    """A parent parser with the options of every run."""
    parser = argparse.ArgumentParser(add_help=False, parents=[config_arguments()])
    parser.add_argument('--work-dir', metavar='DIR',
                        help="folder for logs, results and checkpoints (work_dirs/ and the config's name)")
    parser.add_argument('--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none',
                        help='what started the processes of a distributed run (%(default)s)')
    # torch.distributed.launch hands this to every process; torchrun sets the environment variable instead.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    return parser


@contextmanager
def exit_on_run_error(parser: argparse.ArgumentParser):
    """Ends a tool with the message of a :class:`RunError` on stderr (once per machine) and exit status 2."""
    try:
        yield
    except RunError as error:
        is_first = os.environ.get('LOCAL_RANK', '0') == '0'
        parser.exit(2, f'{error}\n' if is_first else None)


# ---- configs ------------------------------------------------------------------------------------------
def load_config(args: argparse.Namespace) -> Config:
    """Reads a config file and applies the options of :func:`common_arguments`.

    Raises:
        RunError: If the file is missing or broken, an option does not fit it, or its toolbox is not usable.
    """
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    if args.launcher == 'pytorch' and 'RANK' not in os.environ:
        raise RunError('--launcher pytorch is for processes that torchrun starts: '
                       'use tools/dist_train.sh or tools/dist_test.sh')
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join(
        'work_dirs', osp.splitext(osp.basename(args.config))[0])
    return cfg


def read_config(path: Union[str, Path], options: Optional[dict] = None) -> Config:
    """Reads a config file, for a run or for anything else.

    Args:
        path: The file.
        options: Settings that replace those of the config, by their dotted keys (``--cfg-options``).

    Raises:
        RunError: If the file is missing or broken, an option does not fit it, or its toolbox is not usable.
    """
    if not osp.isfile(path):
        raise RunError(f'{path}: no such config file')
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'pkg_resources is deprecated')  # mmengine finds mmdet:: with it
            cfg = Config.fromfile(path)
    except Exception as error:  # a config is code that is run: anything can come out of it
        raise RunError(f'{path} cannot be read: {type(error).__name__}: {error}') from error
    _merge_options(cfg, options or {})
    _check_toolbox(cfg, path)
    return cfg


def _merge_options(cfg: Config, options: dict) -> None:
    known = {*cfg.keys(), *inspect.signature(Runner).parameters}
    for key in options:
        # Any new key could be meant, so only what looks like a slip is refused.
        top, _, rest = key.partition('.')
        if top not in known and did_you_mean(top, known):
            raise RunError(f'--cfg-options: the config has no {top!r}{did_you_mean(top, known)}')
    if 'data_root' in options and isinstance(cfg.get('data_root'), str):
        _move_data_root(cfg, cfg.data_root, str(options['data_root']))
    try:
        cfg.merge_from_dict(options)
    except (KeyError, TypeError, IndexError) as error:
        raise RunError(f'--cfg-options does not fit the config: {error}') from error


def _move_data_root(cfg: Config, old: str, new: str) -> None:
    """Replaces a config's data root in every path built from it. (mmengine would replace the variable alone,
    which nothing reads any more.)"""
    old = old.rstrip('/')

    def move(node):
        if isinstance(node, dict):
            for key, value in node.items():
                node[key] = move(value)
        elif isinstance(node, (list, tuple)):
            return type(node)(map(move, node))
        elif isinstance(node, str) and (node == old or node.startswith(old + '/')):
            return osp.join(new, node[len(old) + 1:])
        return node

    move(cfg._cfg_dict)


def _check_toolbox(cfg: Config, path: Union[str, Path]) -> None:
    scope = cfg.get('default_scope')
    if scope not in TOOLBOXES:
        raise RunError(f"{path}: default_scope must be one of {', '.join(TOOLBOXES)}, got {scope!r}; "
                       "a config gets it from its toolbox's _base_/default_runtime.py")
    try:
        import_module('mmcv.ops')
        import_module(scope)
    except (ImportError, AssertionError) as error:  # the toolboxes assert the version of mmcv
        raise RunError(f'{path} needs {TOOLBOXES[scope]} and mmcv with its compiled ops: {error}\n'
                       'make demo and make test set everything up in .venv') from error


# ---- runs ---------------------------------------------------------------------------------------------
def train(cfg: Config, *, resume: Optional[str] = None, amp: bool = False, auto_scale_lr: bool = False,
          from_scratch: bool = False) -> None:
    """Trains the model of a config.

    Args:
        cfg: From :func:`load_config`.
        resume: A checkpoint to go on from; 'auto' takes the latest of ``cfg.work_dir``, if there is one.
        amp: Automatic mixed precision: fp16 on an accelerator, bf16 on a CPU.
        auto_scale_lr: Scale the learning rate by batch size / ``auto_scale_lr.base_batch_size``.
        from_scratch: Load no pretrained weights.

    Raises:
        RunError: If the run cannot start.
    """
    if from_scratch:
        drop_pretrained(cfg.model)
        cfg.load_from = None
    if amp:
        _use_amp(cfg)
    if auto_scale_lr:
        if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
            raise RunError('--auto-scale-lr: the config has no auto_scale_lr.base_batch_size')
        cfg.auto_scale_lr.enable = True
    if resume:
        cfg.resume = True
        cfg.load_from = None if resume == 'auto' else resume
    _guard_checkpoint(cfg, starts_training=True)
    check_names(cfg)
    check_files(cfg, 'train')
    with _failures_explained():
        _build_runner(cfg).train()


def test(cfg: Config, checkpoint: str, *, out: Optional[str] = None, show: bool = False,
         show_dir: Optional[str] = None, wait_time: float = 2, tta: bool = False) -> dict:
    """Evaluates a checkpoint on the test data of a config.

    Args:
        cfg: From :func:`load_config`.
        checkpoint: The weights to test.
        out: Detection: a .pkl file for all predictions. Segmentation: a folder for the label maps.
        show: Show each prediction in a window.
        show_dir: Folder for the painted predictions (detection: below ``cfg.work_dir``/timestamp).
        wait_time: Seconds that a window stays.
        tta: Test-time augmentation. Detection: boxes only, MMDetection merges no masks.

    Returns:
        The metrics by name, as the toolbox calls them.

    Raises:
        RunError: If the run cannot start.
    """
    cfg.load_from = checkpoint
    cfg.resume = False
    _guard_checkpoint(cfg, starts_training=False)
    is_detection = cfg.default_scope == 'mmdet'
    if show or show_dir:
        _show_predictions(cfg, show, show_dir, wait_time)
    if tta:
        _use_detection_tta(cfg) if is_detection else _use_segmentation_tta(cfg)
    if out:
        _write_detections(cfg, out) if is_detection else _write_label_maps(cfg, out)
    check_names(cfg)
    check_files(cfg, 'test')
    with _failures_explained():
        return _build_runner(cfg).test()


def _guard_checkpoint(cfg: Config, starts_training: bool) -> None:
    cfg.custom_hooks = [*(cfg.get('custom_hooks') or []),
                        dict(type='mminline.CheckpointGuardHook', starts_training=starts_training)]


def _build_runner(cfg: Config) -> Runner:
    replaced = 0
    if cfg.launcher == 'pytorch' and get_device() == 'cpu' and not is_distributed():
        # mmengine's own start selects a CUDA device; without one, processes meet through gloo.
        torch.distributed.init_process_group('gloo')
        cfg.model_wrapper_cfg = dict(
            type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False))
        # SyncBN runs on CUDA only. (mmengine replaces it by itself where a run is not distributed.)
        replaced = replace_sync_bn(cfg.model)
        if replaced:
            cfg.custom_hooks = [*(cfg.get('custom_hooks') or []), dict(type='mminline.BroadcastBuffersHook')]
    runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
    if replaced:
        runner.logger.info(f'SyncBN cannot run on several CPU processes: replaced by BN in {replaced} places of the '
                           "model's config; each process normalises by its own images")
    return runner


@contextmanager
def _failures_explained():
    try:
        yield
    except KeyError as error:
        explained = explain_unknown_name(error)
        if explained is None:
            raise
        raise explained from error
    except ValueError as error:
        if 'need at least one array to concatenate' not in str(error):  # mmengine's data set with nothing in it
            raise
        raise RunError('no image is left of a data set: filter_cfg drops small ones and those without objects of its '
                       'classes; tools/check_dataset.py CONFIG says what there is') from error


# ---- options of training ------------------------------------------------------------------------------
def drop_pretrained(node) -> None:
    """Removes every init_cfg of type Pretrained below a model's config."""
    if isinstance(node, dict):
        init_cfg = node.get('init_cfg')
        if isinstance(init_cfg, (list, tuple)):
            node['init_cfg'] = [item for item in init_cfg if item.get('type') != 'Pretrained']
        elif init_cfg and init_cfg.get('type') == 'Pretrained':
            node['init_cfg'] = None
        node = node.values()
    if not isinstance(node, str) and hasattr(node, '__iter__'):
        for value in node:
            drop_pretrained(value)


def _use_amp(cfg: Config) -> None:
    kind = cfg.optim_wrapper.get('type', 'OptimWrapper')
    if kind in ('OptimWrapper', 'AmpOptimWrapper'):
        cfg.optim_wrapper.type = 'mminline.AmpOptimWrapper'
    elif kind != 'mminline.AmpOptimWrapper':
        raise RunError(f'--amp replaces an OptimWrapper, and the config has {kind}')


# ---- options of testing -------------------------------------------------------------------------------
def _show_predictions(cfg: Config, show: bool, show_dir: Optional[str], wait_time: float) -> None:
    hook = cfg.get('default_hooks', {}).get('visualization')
    if not hook:
        raise RunError('--show and --show-dir need a visualization hook in default_hooks')
    hook.update(draw=True, interval=1)  # every image; mmseg's default is every 50th
    if show:
        hook.update(show=True, wait_time=wait_time)
    if show_dir:
        if cfg.default_scope == 'mmdet':
            hook.test_out_dir = show_dir
        else:
            cfg.visualizer.save_dir = show_dir


def innermost_dataset(cfg: Config) -> ConfigDict:
    """The test data set of a config, without the data sets that only wrap it."""
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset


def _use_detection_tta(cfg: Config) -> None:
    dataset = innermost_dataset(cfg)
    if 'tta_model' not in cfg:
        cfg.tta_model = dict(
            type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100))
    if 'tta_pipeline' not in cfg:
        # As MMDetection's own tool: the image and its mirror image, packed with what undoes the flip.
        flips = [dict(type='RandomFlip', prob=1.), dict(type='RandomFlip', prob=0.)]
        pack = dict(type='PackDetInputs', meta_keys=(
            'img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction'))
        cfg.tta_pipeline = [
            *copy.deepcopy(dataset.pipeline[:-1]), dict(type='TestTimeAug', transforms=[flips, [pack]])]
    if cfg.model.get('roi_head', {}).get('mask_head'):
        print_log('--tta: MMDetection merges boxes only; masks are neither predicted nor evaluated.', 'current')
        cfg.model.roi_head.update(mask_head=None, mask_roi_extractor=None)
        for evaluator in _as_list(cfg.test_evaluator):
            if 'segm' in evaluator.get('metric', ()):
                evaluator.metric = 'bbox'
    dataset.pipeline = cfg.tta_pipeline
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)


def _use_segmentation_tta(cfg: Config) -> None:
    for key in ('tta_model', 'tta_pipeline'):
        if key not in cfg:
            raise RunError(f'--tta: the config has no {key}')
    innermost_dataset(cfg).pipeline = cfg.tta_pipeline
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)


def _write_detections(cfg: Config, path: str) -> None:
    if not path.endswith(('.pkl', '.pickle')):
        raise RunError(f'--out: detections go to a .pkl or .pickle file, got {path}')
    cfg.test_evaluator = [*_as_list(cfg.test_evaluator), dict(type='DumpDetResults', out_file_path=path)]


def _write_label_maps(cfg: Config, folder: str) -> None:
    for evaluator in _as_list(cfg.test_evaluator):
        evaluator.update(output_dir=folder, keep_results=True)


def _as_list(evaluators) -> list:
    return list(evaluators) if isinstance(evaluators, (list, tuple)) else [evaluators]
