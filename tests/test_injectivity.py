"""Colliding queries: the paper's point in numbers, the definition, and the command."""
import csv
import os
import runpy
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
import torch.nn.functional as F

from mminline.analysis import injectivity
from mminline.analysis.attention_maps import record_calls
from mminline.models.layers.attention import linear_attention

from . import test_draw_attention
from .test_draw_attention import DETECTION, build

ROOT = Path(__file__).parents[1]
given = test_draw_attention.given  # the fixture: an image, and checkpoints


def test_collinear_features_get_the_same_weights_under_linear_attention_only():
    queries, keys = (x.double() for x in injectivity.example())
    features = F.elu(queries) + 1
    assert torch.allclose(features / features[:1], torch.tensor(injectivity.FACTORS)[:, None].double(), rtol=1e-5)
    distances = {}
    for kind, weigh in injectivity.WEIGHTS.items():
        weights = weigh(queries, keys)
        assert torch.allclose(weights.sum(-1), torch.ones(4).double())
        distances[kind] = torch.pdist(weights)
    assert distances['linear'].max() < 1e-6
    assert distances['softmax'].min() > 0.1 and distances['inline'].min() > 0.1


def test_linear_weights_are_those_of_the_layer():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 4, generator=generator).double() for _ in range(3))
    assert torch.allclose(injectivity.WEIGHTS['linear'](q, k) @ v, linear_attention(q, k, v))


def test_what_a_collision_is():
    q = torch.tensor([[[1., 0.], [0., 1.], [1., 0.01], [5., 0.]]])
    weights = torch.tensor([[[1., 0., 0.], [1., 0.005, 0.], [0., 1., 0.], [0., 1., 0.02]]])
    # The first two agree to 1 % and their queries differ; the last two agree to 2 % only.
    assert injectivity.count_collisions(q, weights, 0.01) == 2
    assert injectivity.count_collisions(q, weights, 0.03) == 4
    # The same query twice has the same weights under any attention.
    assert injectivity.count_collisions(q[:, [0, 0, 2]], weights[:, [0, 0, 0]], 0.01) == 0


@pytest.mark.parametrize('case', ['pvt inline', 'pvt reduced softmax', 'swin shifted windows', 'cswin stripes'])
def test_counts_of_any_block(case):
    backbone, stage, block = build(case)
    calls = record_calls(backbone, torch.randn(1, 3, 90, 70), stage, block)
    height, width = calls[0].arguments['hw_shape']
    counts = injectivity.count_in_calls(calls, 0.5)
    assert [count.attention for count in counts] == ['linear', 'softmax', 'inline']
    for count in counts:
        assert count.queries == 2 * min(height * width, injectivity.MAX_QUERIES)  # two heads, or a head in each branch
        assert 0 <= count.colliding <= count.queries
    assert counts[0].share > 0.9  # linear: nothing but the direction is left


def test_command(given, tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / 'tools/analysis/injectivity.py', DETECTION, given / 'det.pth', given / 'image.jpg',
         '--stage', '1', '--device', 'cpu', '--out', tmp_path],
        env=dict(os.environ, OMP_NUM_THREADS='1'), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with (tmp_path / 'collisions.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['attention'] for row in rows] == ['linear', 'softmax', 'inline']
    assert {(row['queries'], row['tolerance']) for row in rows} == {('800', '0.01')}  # 2 heads x 20 x 20 tokens
    for row in rows:
        assert f"{row['attention']}: {row['colliding']} of 800 queries collide" in result.stdout
    picture = cv2.imread(str(tmp_path / 'injectivity.png'))
    assert picture.shape[0] > 700 and picture.shape[1] > 1300
    assert len(set(map(tuple, picture.reshape(-1, 3)[::7]))) > 20


@pytest.mark.parametrize('args, message', [
    (['--tolerance', '0'], 'between 0 and 1, got 0.0'), (['--stage', '4'], 'stage must be in 0 ... 3, got 4')])
def test_refused(given, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, 'argv', ['injectivity.py', str(DETECTION), str(given / 'det.pth'),
                                      str(given / 'image.jpg'), '--out', str(tmp_path / 'out'), *args])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / 'tools/analysis/injectivity.py'), run_name='__main__')
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
