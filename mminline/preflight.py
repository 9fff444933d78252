"""What a run needs, checked before anything is built: names that a registry knows, and files that are there.

Each check raises :class:`RunError` with a message written for the person who started the run.
"""
import inspect
import os.path as osp
import re
from difflib import get_close_matches
from typing import Iterable, Iterator, NamedTuple, Optional

import mmengine.registry as mmengine_registry
from mmengine.config import Config
from mmengine.registry import Registry
from mmengine.runner import find_latest_checkpoint
from mmengine.utils import is_abs

from . import registry as mminline_registry

# Keys that the MM libraries take out of a config before the rest reaches the class.
KEYS_TAKEN_OUT = ('type', '_scope_', 'priority', 'constructor', 'paramwise_cfg')


class RunError(Exception):
    """A run cannot start; the message is for the person who started it, without a traceback."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``'; did you mean NAME?'`` with the nearest known name, or an empty string.

    Only the last parts of dotted names are compared: a forgotten prefix is found, too.
    """
    by_last_part = {}
    for candidate in known:
        by_last_part.setdefault(candidate.rpartition('.')[2], candidate)
    close = get_close_matches(name.rpartition('.')[2], by_last_part, n=1)
    return f'; did you mean {by_last_part[close[0]]}?' if close else ''


# ---- names --------------------------------------------------------------------------------------------
def check_names(cfg: Config) -> None:
    """Checks every ``type='mminline.X'`` of a config, and the arguments given to it.

    Raises:
        RunError: If this project has no such class, or the class has no such argument.
    """
    registries = _registries('mminline', vars(mminline_registry).values())
    for key, node in _walk(cfg):
        name = node.get('type')
        if not isinstance(name, str) or not name.startswith('mminline.'):
            continue
        found = [registry.get(name) for registry in registries if registry.get(name)]
        if not found:
            raise RunError(f'{key}.type: {name} is not registered{did_you_mean(name, _names(registries))}')
        parameters = inspect.signature(found[0]).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue  # such a class hands on what it does not know
        for argument in node:
            if argument not in parameters and argument not in KEYS_TAKEN_OUT:
                raise RunError(f'{key}: {name} has no argument {argument!r}'
                               f'{did_you_mean(argument, parameters) or "; it has " + ", ".join(parameters)}')


def explain_unknown_name(error: KeyError) -> Optional[RunError]:
    """Turns a registry's "X is not in the SCOPE::NAME registry" into a message with the nearest name.

    Returns:
        None for any other KeyError.
    """
    match = re.match(r'(\S+) is not in the (?:(\w+)::)?([\w ]+) registry', str(error.args[0]))
    if match is None:
        return None
    name, scope, kind = match.groups()
    roots = _registries('mmengine', vars(mmengine_registry).values())
    families = [[root, *root.children.values()] for root in roots]
    # The registry that was asked, its parent, and this project's own of the same kind.
    known = [
        registry for family in families
        if any(member.name == kind and scope in (None, member.scope) for member in family)
        for registry in family if registry.scope in (scope, 'mmengine', 'mminline')
    ]
    return RunError(f'{name} is not registered as a {kind}{did_you_mean(name, _names(known))}')


def _registries(scope: str, values: Iterable) -> list[Registry]:
    return [value for value in values if isinstance(value, Registry) and value.scope == scope]


def _names(registries: list[Registry]) -> list[str]:
    """All registered names, as a config spells them: this project's with the prefix."""
    names = []
    for registry in registries:
        registry.import_from_location()
        prefix = 'mminline.' if registry.scope == 'mminline' else ''
        names += [prefix + name for name in registry.module_dict]
    return names


def _walk(node, key: str = '') -> Iterator[tuple[str, dict]]:
    """Yields every dict below a config with its dotted key."""
    if isinstance(node, (dict, Config)):
        if key:
            yield key, node
        items = node.items()
    elif isinstance(node, (list, tuple)):
        items = enumerate(node)
    else:
        return
    for name, value in items:
        yield from _walk(value, f'{key}.{name}' if key else str(name))


# ---- files --------------------------------------------------------------------------------------------
class Needed(NamedTuple):
    """A file or folder that a run reads."""

    key: str  # where the config names it
    path: str
    root: str = ''  # the data root it belongs to; empty for other files

    @property
    def is_there(self) -> bool:
        return osp.exists(self.path)


def check_files(cfg: Config, mode: str) -> None:
    """Checks that the data sets and weights of a run exist.

    Addresses of other storage (``s3://``, ``https://``, ``torchvision://``, a data set's ``backend_args``) are
    left to the library that reads them.

    Args:
        cfg: The run's config, with its options applied.
        mode: 'train' (training and validation data, pretrained weights) or 'test' (test data, checkpoint).

    Raises:
        RunError: If something is missing. The message shows the expected tree, says what of it is missing
            and how to name another place.
    """
    splits = ('train', 'val') if mode == 'train' else ('test', )
    data = [needed for split in splits for needed in _data_needed(cfg, split)]
    pretrained = list(_pretrained_needed(cfg)) if mode == 'train' else []
    weights = pretrained + _checkpoint_needed(cfg, mode)
    needed = {}
    for item in data + weights:
        if '://' not in item.path:
            needed.setdefault(item.path, item)  # one file may be named by several keys
    missing = [item for item in needed.values() if not item.is_there]
    if not missing:
        return

    lines = [f'Cannot {mode}: {len(missing)} of the {len(needed)} files and folders that the run reads are missing.',
             f'Seen from {osp.abspath(".")} it expects', '', *_tree(needed.values()), '']
    if any(item.root for item in missing):
        keys = [f'{split}_dataloader.dataset.data_root' for split in splits]
        keys = ['data_root'] if 'data_root' in cfg else keys
        lines += ['Data in another folder:   --cfg-options ' + ' '.join(f'{key}=FOLDER' for key in keys),
                  'Under other names:        --cfg-options KEY=PATH, with the keys above']
    for item in missing:
        if item in pretrained:
            lines += [f'Weights in another file:  --cfg-options {item.key}=FILE',
                      'Training without them:    --from-scratch']
    if any(item.root or item in pretrained for item in missing):
        lines += ['A run without downloads:  make demo']
    raise RunError('\n'.join(lines))


def _tree(needed: Iterable[Needed]) -> list[str]:
    """One line per path, indented below its data root."""
    rows, root = [], ''
    for item in needed:
        if item.root != root:
            root = item.root
            rows += [(root, '', '')] if root and root != item.path else []
        name = '  ' + osp.relpath(item.path, root) if root and root != item.path else item.path
        rows.append((name, 'found' if item.is_there else 'missing', item.key))
    width = max(len(name) for name, _, _ in rows)
    return [f'  {name:{width}}  {state:7}  {key}'.rstrip() for name, state, key in rows]


def _data_needed(cfg: Config, split: str) -> Iterator[Needed]:
    loader = cfg.get(f'{split}_dataloader')
    if loader:
        yield from _dataset_needed(loader.get('dataset') or {}, f'{split}_dataloader.dataset')
    for key, evaluator in _walk(cfg.get(f'{split}_evaluator'), f'{split}_evaluator'):
        if isinstance(evaluator.get('ann_file'), str) and not evaluator.get('backend_args'):
            yield Needed(f'{key}.ann_file', evaluator['ann_file'])


def _dataset_needed(dataset: dict, key: str) -> Iterator[Needed]:
    """A data set's annotation file and folders, joined to its root as mmengine's BaseDataset joins them."""
    if dataset.get('dataset'):  # RepeatDataset, ClassBalancedDataset, MultiImageMixDataset
        yield from _dataset_needed(dataset['dataset'], f'{key}.dataset')
    for index, part in enumerate(dataset.get('datasets') or ()):  # ConcatDataset
        yield from _dataset_needed(part, f'{key}.datasets.{index}')
    if dataset.get('backend_args'):
        return
    root = dataset.get('data_root') or ''
    prefixes = dataset.get('data_prefix') or {}
    paths = {'ann_file': dataset.get('ann_file'), **{f'data_prefix.{name}': prefixes[name] for name in prefixes}}
    for name, path in paths.items():
        if path and isinstance(path, str):
            if is_abs(path):
                yield Needed(f'{key}.{name}', path)
            else:
                yield Needed(f'{key}.{name}', osp.join(root, path), root)


def _pretrained_needed(cfg: Config) -> Iterator[Needed]:
    for key, node in _walk(cfg.model, 'model'):
        if node.get('type') == 'Pretrained' and isinstance(node.get('checkpoint'), str):
            yield Needed(f'{key}.checkpoint', node['checkpoint'])


def _checkpoint_needed(cfg: Config, mode: str) -> list[Needed]:
    if cfg.get('load_from'):
        key = 'CHECKPOINT' if mode == 'test' else '--resume' if cfg.get('resume') else 'load_from'
        return [Needed(key, cfg.load_from)]
    if cfg.get('resume') and osp.exists(osp.join(cfg.work_dir, 'last_checkpoint')):
        return [Needed(f'named in {cfg.work_dir}/last_checkpoint; --resume CHECKPOINT takes another',
                       find_latest_checkpoint(cfg.work_dir))]
    return []
