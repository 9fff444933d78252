"""From a run's checkpoint to a file for others: the weights, and the config that inference needs."""
import copy
import hashlib
import os
from pathlib import Path
from typing import Union

import torch
from mmengine import __version__ as mmengine_version
from mmengine.config import Config
from mmengine.logging import print_log

from .build import build_on_meta, check_fit, read_checkpoint
from .runs import drop_pretrained
from .safe_loading import load_weights_file
from .version import __version__

# Of the config: what a model and its inference need. The rest is about training or the machine it ran on.
KEPT_SETTINGS = ('default_scope', 'custom_imports', 'model', 'test_dataloader', 'test_cfg', 'visualizer', 'tta_model',
                 'tta_pipeline')
PLACES = ('data_root', 'ann_file', 'data_prefix')  # of a data set, on that machine
KEPT_META = ('dataset_meta', 'epoch', 'iter')


def publish_checkpoint(cfg: Config, checkpoint: Union[str, Path], out_dir: Union[str, Path]) -> Path:
    """Write a run's weights, with the config for inference, to ``out_dir/NAME-HASH.pth``.

    NAME is that of the config file, HASH the first 8 hex digits of the file's SHA-256, where torch.hub looks for
    it. The weights are the averaged ones if the run averaged them: mmengine's EMAHook saves those as the model's.
    What is needed to resume is left out: optimiser, schedules, logs and weights before averaging. The file is what
    MMDetection and MMSegmentation load, ``DetInferencer(weights=...)`` takes it without a config.

    Args:
        cfg: The config that the model was trained with.
        checkpoint: A file that a run saved.
        out_dir: Folder for the new file; made if it is not there.

    Returns:
        The file that was written.

    Raises:
        RunError: if the checkpoint cannot be read, or its weights are not those of the config's model.
    """
    content = read_checkpoint(checkpoint)
    check_fit(build_on_meta(cfg), content, checkpoint, cfg)
    if 'ema_state_dict' in content:
        print_log('the weights are the averaged ones (EMA)', logger='current')
    meta = {key: value for key, value in (content.get('meta') or {}).items() if key in KEPT_META}
    meta.update(cfg=inference_config(cfg).pretty_text, mmengine_version=mmengine_version,
                mminline_version=__version__)
    return _save(dict(meta=meta, state_dict=content['state_dict']), Path(out_dir), Path(cfg.filename).stem)


def inference_config(cfg: Config) -> Config:
    """Return the part of a config that inference needs, without files of the machine it was used on."""
    kept = Config(copy.deepcopy({key: cfg[key] for key in KEPT_SETTINGS if key in cfg}))
    drop_pretrained(kept.model)
    _drop_places(kept.get('test_dataloader'))
    return kept


def _drop_places(node) -> None:
    if isinstance(node, dict):
        for key in PLACES:
            node.pop(key, None)
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        for value in node:
            _drop_places(value)


def _save(content: dict, out_dir: Path, name: str) -> Path:
    """Write under a name of its own until the hash is known and the file is seen to be readable."""
    out_dir.mkdir(parents=True, exist_ok=True)
    unfinished = out_dir / f'.{name}-{os.getpid()}.unfinished'
    try:
        with unfinished.open('wb') as file:  # torch.save would write the name of a path into the file
            torch.save(content, file)
        load_weights_file(unfinished)
        digest = hashlib.sha256()
        with unfinished.open('rb') as file:
            for chunk in iter(lambda: file.read(2 ** 20), b''):
                digest.update(chunk)
        path = out_dir / f'{name}-{digest.hexdigest()[:8]}.pth'
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
