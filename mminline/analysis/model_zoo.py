"""The tables of all models: docs/model_zoo.md, the short one in README.md, and the metafile that MM projects have.

Costs are computed from the backbones and configs themselves; accuracies are those that the paper reports.
"""
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Sequence, Tuple, Union

import torch
import yaml
from mmengine.config import Config
from mmengine.registry import MODELS
from rich.console import Console
from rich.progress import track
from torch import nn

from .flops import Complexity, analyse_config, analyse_model

PAPER = dict(Title='Bridging the Divide: Reconsidering Softmax and Linear Attention',
             URL='https://arxiv.org/abs/2412.06590')
SCRIPT = 'tools/analysis/write_model_zoo.py'
README_MARKERS = ('<!-- model table -->\n', '<!-- end of model table -->')
SHORT_COLUMNS = ('backbone', 'image, px', 'parameters, M', 'multiply-adds, G', 'ImageNet top-1, % (reported)')
SEE_ALSO = 'All configs, with what they cost: [docs/model_zoo.md](docs/model_zoo.md).'


# ---- what the paper reports, and where recipes come from ----------------------------------------------
class Pretrained(NamedTuple):
    """A backbone with a classifier, as the paper reports it on ImageNet-1K."""
    backbone: str
    arch: str
    image_size: int  # pixels
    parameters: float  # M
    multiply_adds: float  # G
    top1: float  # %
    settings: Tuple[Tuple[str, int], ...] = ()  # further arguments


PRETRAINED = (
    Pretrained('InLinePVT', 'tiny', 224, 12.0, 2.0, 78.2),
    Pretrained('InLinePVT', 'small', 224, 21.6, 3.9, 82.0),
    Pretrained('InLinePVT', 'medium', 224, 37.6, 6.9, 83.2),
    Pretrained('InLinePVT', 'large', 224, 50.2, 10.2, 83.6),
    Pretrained('InLineSwin', 'tiny', 224, 30, 4.5, 82.4),
    Pretrained('InLineSwin', 'small', 224, 50, 8.7, 83.6),
    Pretrained('InLineSwin', 'base', 224, 88, 15.4, 84.1),
    Pretrained('InLineCSwin', 'tiny', 224, 21, 4.3, 83.2),
    Pretrained('InLineCSwin', 'small', 224, 33, 6.8, 83.8),
    Pretrained('InLineCSwin', 'base', 224, 73, 14.9, 84.5),
    Pretrained('InLineCSwin', 'base', 384, 73, 46.3, 85.7, (('split_size', 12),)),
    Pretrained('InLineDeiT', 'tiny', 224, 6.5, 1.1, 74.5),
    Pretrained('InLineDeiT', 'small', 288, 16.7, 5.0, 80.2),
    Pretrained('InLineDeiT', 'base', 448, 23.8, 17.2, 82.3),
)
# mIoU and mAcc on ADE20K, %.
REPORTED_SEGMENTATION = {
    ('InLine-PVT-T', 'Semantic FPN'): (39.16, 50.63),
    ('InLine-Swin-T', 'UperNet'): (45.57, 57.60),
}
# Families and methods whose recipe the authors published; other recipes are this project's.
PUBLISHED_RECIPES = {
    ('PVT', 'Mask R-CNN'), ('PVT', 'RetinaNet'), ('PVT', 'Semantic FPN'),
    ('Swin', 'Mask R-CNN'), ('Swin', 'Cascade Mask R-CNN'), ('Swin', 'UperNet'),
}

# ---- names that readers know, in the order of the tables ----------------------------------------------
FAMILIES = ('PVT', 'Swin', 'CSwin', 'DeiT')
METHODS = {
    'MaskRCNN': 'Mask R-CNN',
    'CascadeRCNN': 'Cascade Mask R-CNN',
    'RetinaNet': 'RetinaNet',
    'FPNHead': 'Semantic FPN',
    'UPerHead': 'UperNet',
}
TASKS = {'mmdet': 'Object Detection', 'mmseg': 'Semantic Segmentation'}
DATASETS = {'mmdet': 'COCO', 'mmseg': 'ADE20K'}
SCHEDULES = {12: '1x', 36: '3x'}  # by epochs


def model_name(backbone: str, arch: Union[str, dict]) -> str:
    """Return 'InLine-PVT-T' for 'InLinePVT' and 'tiny'; sizes of one's own have no letter."""
    name = backbone.replace('InLine', 'InLine-')
    return f'{name}-{arch[0].upper()}' if isinstance(arch, str) else f'narrow {name}'


# ---- the configs --------------------------------------------------------------------------------------
class Entry(NamedTuple):
    """One config and what it costs."""
    path: str  # from the root of the project
    scope: str  # 'mmdet' or 'mmseg'
    family: str
    model: str
    method: str
    schedule: str
    shape: Tuple[int, int]  # (height, width) of the image, pixels
    parameters: int
    multiply_adds: int

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def folder(self) -> str:
        """The folder below ``configs/``, or '' for a config that stands there itself."""
        return '/'.join(Path(self.path).parts[1:-1])

    @property
    def reported(self) -> Tuple[float, ...]:
        """mIoU and mAcc in %, if the paper reports them."""
        return REPORTED_SEGMENTATION.get((self.model, self.method), ())

    @property
    def recipe(self) -> str:
        return 'published' if (self.family, self.method) in PUBLISHED_RECIPES else 'ours, not trained'


def read_entries(root: Path) -> List[Entry]:
    """Return every config below ``configs/`` with its costs, in the order of the tables."""
    paths = sorted(path for path in (root / 'configs').rglob('*.py') if '_base_' not in path.parts)
    entries = [_read_entry(path, root) for path in _progress(paths, 'counting configs')]
    return sorted(entries, key=lambda entry: (
        FAMILIES.index(entry.family), [*METHODS.values()].index(entry.method), entry.schedule, entry.parameters))


def _progress(items: Sequence, description: str) -> Iterable:
    return track(items, description, transient=True, console=Console(stderr=True))


def _read_entry(path: Path, root: Path) -> Entry:
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'pkg_resources is deprecated')  # mmengine finds mmdet:: with it
        cfg = Config.fromfile(path)
    backbone = cfg.model.backbone.type.replace('mminline.', '')
    head = cfg.model.type if cfg.model.type in METHODS else cfg.model.decode_head.type
    complexity = analyse_config(cfg, with_growth=False)
    return Entry(
        path=path.relative_to(root).as_posix(), scope=cfg.default_scope, family=backbone.replace('InLine', ''),
        model=model_name(backbone, cfg.model.backbone.arch), method=METHODS[head],
        schedule=_schedule(cfg.train_cfg), shape=complexity.shape, parameters=complexity.parameters,
        multiply_adds=complexity.multiply_adds)


def _schedule(train_cfg: dict) -> str:
    if 'max_iters' in train_cfg:
        return f'{train_cfg["max_iters"] // 1000}k'
    epochs = train_cfg['max_epochs']
    return SCHEDULES.get(epochs, f'{epochs} epochs')


# ---- the files ----------------------------------------------------------------------------------------
def render(root: Path) -> Dict[Path, str]:
    """Return the files that hold tables with the text that they should have; takes about a minute.

    Args:
        root: The project's folder.
    """
    entries = read_entries(root)
    backbones = _backbone_rows()
    files = {
        root / 'docs/model_zoo.md': _document(entries, backbones),
        root / 'configs/metafile.yml': _metafile([entry for entry in entries if not entry.folder]),
        root / 'model-index.yml': f'# Written by {SCRIPT}.\nImport:\n- configs/metafile.yml\n',
    }
    readme = root / 'README.md'
    text = readme.read_text(encoding='utf-8') if readme.exists() else ''
    begin, end = README_MARKERS
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        table = markdown_table(backbones, SHORT_COLUMNS)
        files[readme] = f'{before}{begin}{table}\n{SEE_ALSO}\n{end}{rest.split(end, 1)[1]}'
    return files


def stale_files(files: Dict[Path, str]) -> List[Path]:
    """Return those of :func:`render` whose text on disk is another, or that are not there."""
    return [path for path, text in files.items()
            if not path.exists() or path.read_text(encoding='utf-8') != text]


def _backbone_rows() -> List[Dict[str, object]]:
    rows = []
    for entry in _progress(PRETRAINED, 'counting backbones'):
        with torch.device('meta'):
            backbone = MODELS.build(
                dict(type=f'mminline.{entry.backbone}', arch=entry.arch, **dict(entry.settings)))
        shape = (entry.image_size, entry.image_size)
        complexity = analyse_model(nn.Sequential(OrderedDict(backbone=backbone)), shape, with_growth=False)
        arguments = [repr(entry.arch), *(f'{name}={value}' for name, value in entry.settings)]
        rows.append({
            'backbone': model_name(entry.backbone, entry.arch),
            'class and arguments': f'`{entry.backbone}({", ".join(arguments)})`',
            'image, px': entry.image_size,
            **_costs(complexity),
            'parameters, M (reported)': entry.parameters,
            'multiply-adds, G (reported)': entry.multiply_adds,
            'ImageNet top-1, % (reported)': entry.top1,
        })
    return rows


def _costs(complexity: Union[Complexity, Entry]) -> Dict[str, str]:
    costs = {'parameters, M': complexity.parameters / 1e6, 'multiply-adds, G': complexity.multiply_adds / 1e9}
    return {column: f'{value:.2f}' if value < 10 else f'{value:.1f}' for column, value in costs.items()}


def _row(entry: Entry, **columns: object) -> Dict[str, object]:
    return {'config': f'[{entry.name}](../{entry.path})', 'backbone': entry.model, 'method': entry.method,
            **columns, **_costs(entry)}


def markdown_table(rows: Sequence[Dict[str, object]], columns: Sequence[str] = ()) -> str:
    """Return a table of dicts with equal keys; of some of their columns, if any are named."""
    columns = columns or tuple(rows[0]) if rows else columns
    lines = [columns, ['---'] * len(columns), *([row[column] for column in columns] for row in rows)]
    return '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines) + '\n'


def _document(entries: List[Entry], backbones: List[Dict[str, object]]) -> str:
    detectors, segmentors = ([entry for entry in entries if not entry.folder and entry.scope == scope]
                             for scope in TASKS)
    return DOCUMENT.format(
        script=SCRIPT, url=PAPER['URL'], backbones=markdown_table(backbones),
        detectors=markdown_table([
            _row(entry, schedule=entry.schedule, recipe=entry.recipe) for entry in detectors]),
        segmentors=markdown_table([
            _row(entry, schedule=entry.schedule, recipe=entry.recipe,
                 **{'mIoU / mAcc, % (reported)': ' / '.join(f'{value:.2f}' for value in entry.reported)})
            for entry in segmentors]),
        **{folder: markdown_table([
            _row(entry, **{'image, px': '{1}x{0}'.format(*entry.shape)})
            for entry in sorted(entries) if entry.folder == folder]) for folder in ('ablation', 'demo')})


DOCUMENT = """\
<!-- Written by {script}: run it instead of editing this file. -->
# Model zoo

**Parameters and multiply-adds are computed** from the backbones and configs themselves. A multiply-add counts as
one, as "FLOPs" do in this field; normalisation, activations and resizing are left out.
`python tools/analysis/get_flops.py CONFIG` gives the same figures part by part, `--shape H W` for other images.

**Accuracies are reported in [the paper]({url})**, and so is whatever else is marked so. This
project has trained none of these models and publishes no weights. `python tools/publish_checkpoint.py CONFIG
CHECKPOINT` makes a file for others from a run's checkpoint.

## Backbones

Computed figures are of the backbones as they are built here: without a classifier, and with a norm for each output
map (Swin, CSwin). Reported ones include a classifier of 1000 classes. The weights are
[the authors'](https://github.com/LeapLabTHU/InLine#pretrained-models); the configs look for them as
`checkpoints/inline_FAMILY_SIZE.pth`.

{backbones}
## Object detection and instance segmentation

On COCO; 1x is 12 epochs, 3x is 36. Multiply-adds are those of one image of 1280x800 pixels with 1000 proposals and
100 mask RoIs (in each stage of a cascade), MMDetection's convention. Recipes are published where
[Agent Attention](https://github.com/LeapLabTHU/Agent-Attention), a sibling project of the authors, has one for the
family; the others are this project's own, after Swin's.

```bash
bash tools/dist_train.sh configs/inline_pvt_maskrcnn.py 8
bash tools/dist_test.sh configs/inline_pvt_maskrcnn.py CHECKPOINT 8
```

{detectors}
## Semantic segmentation

On ADE20K; schedules in iterations of 16 images. Multiply-adds are those of one crop of 512x512 pixels; papers often
count UperNet at 2048x512 (`--shape 512 2048`). The auxiliary head, which only training runs, has its parameters
counted. With softmax attention the paper reports 36.57 / 46.72 for Semantic FPN with PVT-T and 44.51 / 55.61 for
UperNet with Swin-T.

```bash
bash tools/dist_train.sh configs/inline_swin_upernet.py 8
bash tools/dist_test.sh configs/inline_swin_upernet.py CHECKPOINT 8
```

{segmentors}
## Ablation

Narrow models for the synthetic shapes and a CPU; each differs from the demo's by one line.

```bash
python tools/make_shapes.py
python tools/train.py configs/ablation/pvt_maskrcnn_inline.py
```

{ablation}
## Demo

`make demo` and `make demo-seg` train and test these on the synthetic shapes and draw what they predict.

{demo}"""


def _metafile(entries: List[Entry]) -> str:
    models = []
    for entry in entries:
        model = {
            'Name': entry.name,
            'In Collection': 'InLine',
            'Config': entry.path,
            'Metadata': {'Training Data': DATASETS[entry.scope], 'Parameters': entry.parameters,
                         'FLOPs': entry.multiply_adds},
        }
        if entry.reported:
            model['Results'] = [{'Task': TASKS[entry.scope], 'Dataset': DATASETS[entry.scope],
                                 'Metrics': dict(zip(('mIoU', 'mAcc'), entry.reported))}]
        models.append(model)
    collection = {'Name': 'InLine', 'Metadata': {'Architecture': ['InLine attention']}, 'Paper': PAPER,
                  'README': 'docs/model_zoo.md'}
    comment = (f'# Written by {SCRIPT}. FLOPs are multiply-adds, computed (docs/model_zoo.md says how);\n'
               '# results are reported in the paper, no weights are published here.\n')
    return comment + yaml.safe_dump({'Collections': [collection], 'Models': models}, sort_keys=False)
