"""Pictures of what a model is trained on: images and annotations after the pipeline of a data set."""
from pathlib import Path
from typing import Any, Union

import cv2
import numpy as np
from mmengine.config import Config
from mmengine.registry import DATASETS, DefaultScope
from mmengine.runner import set_random_seed
from rich.progress import track

from ..preflight import RunError, explain_unknown_name
from .overlays import build_visualizer, draw_overlay


def browse_dataset(cfg: Config, split: str, out_dir: Union[str, Path], number: int = 20,
                   seed: int = 0) -> tuple[list[Path], dict[str, str]]:
    """Draws annotations on images spread evenly over a data set, as they come out of its pipeline.

    Args:
        cfg: A config of MMDetection or MMSegmentation.
        split: 'train', 'val' or 'test'.
        out_dir: Folder for the pictures, INDEX_NAME.jpg; made if it is not there.
        number: How many images; all, if there are fewer.
        seed: Of the pipeline's random choices.

    Returns:
        The pictures, and why others could not be drawn, by the index in the data set.

    Raises:
        ValueError: If ``number`` is less than 1.
        RunError: If the config has no such data set, or it cannot be read or is empty.
        OSError: If a picture cannot be written.
    """
    if number < 1:
        raise ValueError(f'number must be at least 1, got {number}')
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        dataset = _build(cfg, split)
        visualizer = build_visualizer(cfg, {'palette': 'random', **dataset.metainfo})
        indices = np.unique(np.linspace(0, len(dataset) - 1, number).round().astype(int)).tolist()
        out_dir = Path(out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        set_random_seed(seed)
        pictures, failed = [], {}
        for index in track(indices, description=f'{split}: drawing'):
            try:
                item = dataset[index]
            except Exception as error:  # a pipeline meets bad data with any kind of exception
                failed[f'{split} {index}'] = ' '.join(str(error).split()) or type(error).__name__
                continue
            sample = item['data_samples']
            image = item['inputs'].permute(1, 2, 0).numpy()
            name = Path(sample.get('img_path', 'image')).stem
            pictures.append(out_dir / f'{index:06d}_{name}.jpg')
            _, data = cv2.imencode('.jpg', draw_overlay(visualizer, image, sample, annotations=True))
            pictures[-1].write_bytes(data.tobytes())  # cv2.imwrite would not say that writing failed
    return pictures, failed


def _build(cfg: Config, split: str) -> Any:
    loader = cfg.get(f'{split}_dataloader')
    if not loader:
        raise RunError(f'the config has no {split}_dataloader')
    try:
        dataset = DATASETS.build(loader.dataset)
    except KeyError as error:
        raise explain_unknown_name(error) or error from error
    except (OSError, AssertionError) as error:  # the toolboxes assert that annotation files are there
        raise RunError(f'the data of {split} cannot be read: {error}') from error
    if not len(dataset):
        raise RunError(f'the data set of {split} is empty: {loader.dataset.get("data_root", "")}')
    return dataset
