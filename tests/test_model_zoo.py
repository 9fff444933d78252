"""The tables of all models are up to date, complete, and say where their figures come from."""
import functools
import runpy
import sys
from pathlib import Path

import mmengine.config.utils
import pytest
import yaml
from mmengine.config import Config

from mminline.analysis import model_zoo

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / 'configs').rglob('*.py')
                 if '_base_' not in path.parts)
TABLES = (ROOT / 'docs/model_zoo.md').read_text(encoding='utf-8')
RUN_SCRIPT = 'run tools/analysis/write_model_zoo.py'


@pytest.mark.slow
def test_tables_are_up_to_date(monkeypatch):
    # mmengine reads every metafile of a toolbox anew for each of its configs that is a base: most of the time.
    monkeypatch.setattr(mmengine.config.utils, 'load', functools.lru_cache(maxsize=None)(mmengine.config.utils.load))
    files = model_zoo.render(ROOT)
    assert {path.name for path in files} == {'model_zoo.md', 'metafile.yml', 'model-index.yml', 'README.md'}
    assert model_zoo.stale_files(files) == [], RUN_SCRIPT


@pytest.mark.parametrize('path', CONFIGS)
def test_every_config_has_a_row(path):
    [row] = [line for line in TABLES.splitlines() if f'(../{path})' in line]
    assert f'[{Path(path).stem}]' in row, RUN_SCRIPT


def test_metafile():
    """The files are as MM tools read them, and list all configs but demos and ablations."""
    [imported] = yaml.safe_load((ROOT / 'model-index.yml').read_text())['Import']
    metafile = yaml.safe_load((ROOT / imported).read_text())
    models = metafile['Models']
    assert sorted(model['Config'] for model in models) == [path for path in CONFIGS if path.count('/') == 1]
    assert len({model['Name'] for model in models}) == len(models)
    [collection] = metafile['Collections']
    assert {model['In Collection'] for model in models} == {collection['Name']}
    assert (ROOT / collection['README']).exists()
    assert {model['Name']: model['Results'][0]['Metrics'] for model in models if 'Results' in model} == {
        'inline_pvt_semfpn': {'mIoU': 39.16, 'mAcc': 50.63},
        'inline_swin_upernet': {'mIoU': 45.57, 'mAcc': 57.60},
    }
    assert not any('Weights' in model for model in models)


@pytest.mark.parametrize('path', [path for path in CONFIGS if path.count('/') == 1])
def test_recipe_is_ours_where_the_config_says_so(path):
    text = (ROOT / path).read_text()
    [row] = [line for line in TABLES.splitlines() if f'(../{path})' in line]
    if '_base_ = [' in text:  # larger sizes inherit the recipe, and the comment, of the tiny one
        assert ('ours, not trained' in row) == ('ours, not trained' in text.lower())


def test_names():
    assert model_zoo.model_name('InLineCSwin', 'base') == 'InLine-CSwin-B'
    assert model_zoo.model_name('InLinePVT', dict(embed_dims=(8, ))) == 'narrow InLine-PVT'


def test_files_that_are_stale_or_missing_are_named(tmp_path):
    files = {tmp_path / name: 'new' for name in ('same', 'stale', 'missing')}
    (tmp_path / 'same').write_text('new')
    (tmp_path / 'stale').write_text('old')
    assert [path.name for path in model_zoo.stale_files(files)] == ['stale', 'missing']


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one config and one backbone."""
    (tmp_path / 'configs').mkdir()
    Config(dict(
        default_scope='mmdet', train_cfg=dict(max_epochs=12), model=dict(
            type='RetinaNet',
            backbone=dict(type='mminline.InLinePVT', arch='tiny'),
            neck=dict(type='FPN', in_channels=[64, 128, 320, 512], out_channels=8, num_outs=5),
            bbox_head=dict(
                type='RetinaHead', num_classes=3, in_channels=8, feat_channels=8,
                anchor_generator=dict(type='AnchorGenerator', strides=[4, 8, 16, 32, 64], ratios=[1.0], scales=[8]),
                bbox_coder=dict(type='DeltaXYWHBBoxCoder'))))).dump(tmp_path / 'configs/one.py')
    monkeypatch.setattr(model_zoo, 'PRETRAINED', model_zoo.PRETRAINED[:1])
    return tmp_path


def test_readme_keeps_everything_outside_the_markers(project):
    begin, end = model_zoo.README_MARKERS
    readme = project / 'README.md'
    readme.write_text(f'# Title\n\n{begin}old\n{end}\n\nThe rest.\n')
    text = model_zoo.render(project)[readme]
    assert text.startswith(f'# Title\n\n{begin}| backbone |') and text.endswith(f'{end}\n\nThe rest.\n')
    assert '| InLine-PVT-T | 224 | 11.5 | 1.97 | 78.2 |' in text and 'old' not in text
    readme.write_text('no markers')
    assert readme not in model_zoo.render(project)


def test_script_writes_then_finds_nothing_to_do(project, monkeypatch, capsys):
    script = project / 'tools/analysis/write_model_zoo.py'
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / 'tools/analysis/write_model_zoo.py').read_text())

    def run(*args) -> str:
        monkeypatch.setattr(sys, 'argv', [str(script), *args])
        runpy.run_path(str(script), run_name='__main__')
        return capsys.readouterr().out

    with pytest.raises(SystemExit) as end:
        run('--check')
    assert end.value.code == 1 and 'docs/model_zoo.md: stale' in capsys.readouterr().out
    assert not (project / 'docs').exists()
    assert 'docs/model_zoo.md: written' in run()
    assert 'InLine-PVT-T | RetinaNet | 1x | published' in (project / 'docs/model_zoo.md').read_text()
    assert 'Every table is up to date.' in run('--check')
