"""The benchmarks as commands on tiny sizes: what they write, what they refuse, and that they catch wrong results."""
import csv
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch

from mminline.analysis import backbone_benchmark, benchmark, measure
from mminline.models import InLinePVT
from mminline.ops import inline_attention

from .test_pvt import NARROW

ROOT = Path(__file__).parents[1]
CPU = torch.device('cpu')


def run_tool(tool, *args):
    environment = dict(os.environ, OMP_NUM_THREADS='1')
    return subprocess.run([sys.executable, ROOT / 'tools/analysis' / f'{tool}.py', *map(str, args)], env=environment,
                          capture_output=True, text=True)


def read_rows(path):
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


def check_picture(path, min_width, min_height):
    picture = cv2.imread(str(path))
    assert picture.shape[0] >= min_height and picture.shape[1] >= min_width
    assert len(set(map(tuple, picture.reshape(-1, 3)[::7]))) > 20  # lines of several colours


# ---- the op -------------------------------------------------------------------------------------------
def test_op_benchmark(tmp_path):
    result = run_tool('benchmark_op', '--sizes', '6', '4x9', '--channels', 64, 512, '--batch', 2, '--device', 'cpu',
                      '--seconds', 0.05, '--out', tmp_path)
    assert result.returncode == 0, result.stderr
    assert 'Softmax is still faster up to about so many tokens' in result.stdout
    rows = read_rows(tmp_path / 'op.csv')
    found = {(row['height'], row['width'], row['channels'], row['method']) for row in rows}
    assert found == {(*size, channels, method) for size in (('6', '6'), ('4', '9')) for channels, method in [
        *(('64', method) for method in ('inline', 'formula', 'softmax', 'reduced')),
        *(('512', method) for method in ('inline', 'formula', 'softmax'))]}
    for row in rows:
        values = 2 * 36 * int(row['channels'])
        assert float(row['error']) < 1e-5
        assert float(row['forward_ms']) > 0 and float(row['training_ms']) > 0
        assert int(row['peak_bytes']) > 0
        assert (row['batch'], row['dtype']) == ('2', 'float32') and '1 threads' in row['device']
        bandwidth = 5 * 4 * values / float(row['forward_floor_ms']) * 1e3
        assert 1e8 < bandwidth < 1e13  # bytes per second
        assert float(row['training_floor_ms']) == pytest.approx(13 / 5 * float(row['forward_floor_ms']))
        if row['method'] == 'inline':
            assert float(row['forward_ratio']) == float(row['training_ratio']) == 1
            # q, k, v, the 3x3 kernels, and per head a covariance and two means.
            channels = int(row['channels'])
            assert int(row['saved_bytes']) == 4 * (3 * values + 2 * channels * (9 + 32 + 2))
        if row['method'] == 'formula':
            assert 4 * 4 * values <= int(row['saved_bytes']) < 7 * 4 * values
    check_picture(tmp_path / 'op.png', 700, 700)


@pytest.mark.parametrize('args, message', [
    (['--sizes', '12x'], "expected EDGE or HEIGHTxWIDTH, got '12x'"),
    (['--sizes', '0'], "got '0'"),
    (['--channels', '96'], 'channels must be of (64, 128, 320, 512), got 96'),
    (['--sizes', '1024'], 'maps of 16,777,216 values at most'),
])
def test_op_benchmark_refuses(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, 'argv', ['benchmark_op.py', *args, '--out', str(tmp_path / 'out')])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / 'tools/analysis/benchmark_op.py'), run_name='__main__')
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_formula_is_the_papers_equation():
    case = benchmark.Case(2, 5, 7, 64)
    x = benchmark.make_inputs(case, torch.float64, CPU)
    expected = inline_attention(x.q, x.k, x.v, 2, local_weight=x.local_weight, hw_shape=(5, 7), backend='reference')
    out = benchmark.authors_formula(x.q, x.k, x.v, 2, x.local_weight, (5, 7))
    assert measure.relative_error(out, expected) < 1e-12


def test_a_wrong_output_is_not_timed(monkeypatch, tmp_path):
    formula = benchmark.authors_formula
    monkeypatch.setattr(benchmark, 'authors_formula', lambda *args: formula(*args) * 1.01)
    with pytest.raises(ArithmeticError, match='formula at 1 x 4x4 x 64: the output is off by 0.01'):
        benchmark.run_benchmark([benchmark.Case(1, 4, 4, 64)], torch.float32, CPU, 0.01, 1, tmp_path / 'op.csv')


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    def without_gradient_of_v(q, k, v, *args, **settings):
        return inline_attention(q, k, v.detach() + 0 * v, *args, **settings)

    monkeypatch.setattr(benchmark, 'inline_attention', without_gradient_of_v)
    case = benchmark.Case(1, 4, 4, 64)
    with pytest.raises(ArithmeticError, match='the gradient of v is off'):
        benchmark.check_results(case, ('inline', 'formula'), benchmark.make_inputs(case, torch.float32, CPU))


def test_softmax_is_left_out_where_it_would_take_too_long(tmp_path):
    cases = benchmark.make_cases([(4, 4), (8, 8)], [512], batch=1)
    rows, left_out = benchmark.run_benchmark(cases, torch.float32, CPU, 0.01, 0, tmp_path / 'op.csv')
    assert [(row.height, row.method) for row in rows] == [
        (4, 'inline'), (4, 'formula'), (4, 'softmax'), (8, 'inline'), (8, 'formula')]
    assert len(left_out) == 1 and left_out[0].startswith('softmax at 1 x 8x8 x 512: about 0.0 s')


@pytest.mark.parametrize('ratios, text', [
    ({100: 0.5, 400: 2.0, 900: 4.0}, '200'),  # a straight line in logarithms
    ({100: 1.5, 400: 3.0}, 'nowhere, from 100 on'),
    ({100: 0.5, 1600: 0.9}, '1,600, the most measured'),
])
def test_crossover(ratios, text):
    assert benchmark._crossover(ratios) == text


# ---- measuring ----------------------------------------------------------------------------------------
def test_peak_bytes_are_those_at_one_time():
    def work():
        for _ in range(3):
            torch.zeros(1000, 100).add(1)  # two at a time

    assert measure.peak_bytes(work, CPU) == pytest.approx(2 * 400_000, abs=1000)


def test_saved_bytes_count_shared_memory_once():
    x = torch.ones(1000, requires_grad=True)
    assert measure.saved_bytes(lambda: x * x) == 4000
    assert measure.saved_bytes(lambda: (x * x).exp() * x) == 4000 + 4000


class Clock:
    """Takes the place of ``time`` in measure: functions made by it take so many seconds and note their name."""

    def __init__(self):
        self.now, self.calls = 0., ''

    def perf_counter(self):
        return self.now

    def function(self, name, seconds):
        def call():
            self.now += seconds
            self.calls += name
        return call


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, 'time', clock)
    return clock


def test_functions_are_timed_in_turns(clock):
    functions = dict(A=clock.function('A', 0.5), B=clock.function('B', 0.25))
    times = measure.time_interleaved(functions, CPU, seconds=0)
    assert clock.calls == 'AABB' + 'AB' * measure.MIN_ROUNDS  # each warms up and tells how long it takes
    assert times == dict(A=[0.5] * measure.MIN_ROUNDS, B=[0.25] * measure.MIN_ROUNDS)
    assert measure.median_ratio([2, 9, 4], [1, 3, 2]) == 2


def test_functions_are_timed_as_long_as_asked(clock):
    functions = dict(A=clock.function('A', 0.5), B=clock.function('B', 0.25))
    times = measure.time_interleaved(functions, CPU, seconds=7.)
    assert [len(values) for values in times.values()] == [10, 10]  # 0.75 s a round


def test_short_calls_are_timed_together(clock):
    times = measure.time_interleaved(dict(A=clock.function('A', 2 ** -11)), CPU, seconds=0)  # about 0.5 ms
    assert clock.calls == 'A' * (2 + 5 * measure.MIN_ROUNDS)
    assert times == dict(A=[2 ** -11] * measure.MIN_ROUNDS)


def test_rivals_are_timed_in_pairs_with_the_base(clock):
    functions = dict(A=clock.function('A', 0.25), B=clock.function('B', 0.5), C=clock.function('C', 1.))
    seconds, ratios = measure.time_in_pairs(functions, 'A', CPU, seconds=0)
    assert clock.calls == 'AABB' + 'AB' * measure.MIN_ROUNDS + 'AACC' + 'AC' * measure.MIN_ROUNDS
    assert seconds == dict(A=0.25, B=0.5, C=1.) and ratios == dict(A=1., B=2., C=4.)


# ---- backbones ----------------------------------------------------------------------------------------
def test_backbone_benchmark(tmp_path):
    result = run_tool('benchmark_backbone', '--sizes', '64', '32x96', '--methods', 'formula', 'softmax', '--device',
                      'cpu', '--seconds', 0.05, '--out', tmp_path)
    assert result.returncode == 0, result.stderr
    rows = read_rows(tmp_path / 'backbone.csv')
    assert [(row['height'], row['dtype'], row['method']) for row in rows] == [
        (height, dtype, method) for height in ('32', '64') for dtype in ('float32', 'bfloat16')
        for method in ('inline', 'formula', 'softmax')]
    for row in rows:
        assert float(row['forward_ms']) > 0 and int(row['peak_bytes']) > 0
        has_units = (row['height'], row['dtype'], row['method']) == ('32', 'bfloat16', 'inline')
        assert math.isnan(float(row['units_of_rounding'])) != has_units
        if has_units:
            assert 0.1 < float(row['units_of_rounding']) < 3
    check_picture(tmp_path / 'backbone.png', 1000, 500)


def test_blocks_by_the_formula_give_the_same_features():
    torch.manual_seed(0)
    backbone = InLinePVT(NARROW, pretrain_img_size=64).eval()
    rival = backbone_benchmark.with_authors_formula(backbone)
    image = torch.randn(2, 3, 64, 96)
    assert not any(isinstance(block, backbone_benchmark.FormulaBlock) for block in backbone.block1)
    with torch.no_grad():
        for a, b in zip(backbone(image), rival(image)):
            assert measure.relative_error(a, b) < 1e-5


def test_wrong_features_are_not_timed():
    a, b = torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3) * 1.1
    runs = {('inline', torch.float32): lambda: (a, a), ('formula', torch.float32): lambda: (a, b)}
    with pytest.raises(ArithmeticError, match='at 64x96, features of stage 2 differ .* by 0.09'):
        backbone_benchmark._check_features(runs, (64, 96))


def test_mmdet_has_the_same_size():
    pytest.importorskip('mmdet', reason='MMDetection is one of the rivals')
    backbones = backbone_benchmark.build(['softmax', 'mmdet'], 'tiny', CPU)
    softmax, mmdet = (sum(p.numel() for p in model.parameters()) for model in backbones.values())
    assert mmdet == pytest.approx(softmax, rel=0.01)
    image = torch.zeros(1, 3, 64, 64)
    with torch.no_grad():
        assert [x.shape for x in backbones['mmdet'](image)] == [x.shape for x in backbones['softmax'](image)]


def test_growth_is_fitted_to_large_square_images():
    def row(height, width, milliseconds):
        return backbone_benchmark.Row('', 'tiny', 'inline', 'float32', height, width, milliseconds, 1, 1, 1, math.nan)

    rows = [row(64, 64, 500), row(512, 512, 10), row(800, 1216, 1), row(1024, 1024, 80), row(2048, 2048, 640)]
    assert backbone_benchmark.growth_exponents(rows) == {('inline', 'float32'): pytest.approx(1.5)}


# ---- the GPU check ------------------------------------------------------------------------------------
def test_gpu_check_refuses():
    script = ROOT / 'benchmarks/gpu_check.sh'
    environment = dict(os.environ, PYTHON=sys.executable)
    for args, message in ((['--divice'], 'unknown option --divice'), (['--out'], '--out needs a value'),
                          (['--device', 'tpu'], 'must be cuda or cpu, got tpu')):
        result = subprocess.run(['bash', script, *args], env=environment, capture_output=True, text=True)
        assert result.returncode == 2 and message in result.stderr
    usage = subprocess.run(['bash', script, '--help'], capture_output=True, text=True).stdout
    assert 'pip download' in usage and 'set -uo' not in usage


@pytest.mark.slow
def test_gpu_check_rehearsal(tmp_path):
    pytest.importorskip('triton', reason='the kernels need Triton')
    environment = dict(os.environ, PYTHON=sys.executable, OMP_NUM_THREADS='1')
    result = subprocess.run(['bash', ROOT / 'benchmarks/gpu_check.sh', '--device', 'cpu', '--quick', '--out', tmp_path],
                            env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    report = json.loads((tmp_path / 'gpu_check.json').read_text())
    assert {step['name']: step['state'] for step in report['steps']} == dict(
        kernel_tests='passed', op_float32='passed', op_bfloat16='passed', backbone='passed', memory_check='skipped')
    assert {row['dtype'] for row in report['op']} == {row['dtype'] for row in report['backbone']} == {
        'float32', 'bfloat16'}
    assert all(row['forward_ms'] > 0 for row in report['op'] + report['backbone'])
    assert report['torch'] == torch.__version__ and report['quick'] is True
