"""tools/export_onnx.py: every family and kind of model, at any size, and what is refused."""
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from mminline import export
from mminline.build import build_model, load_model
from mminline.export import AdaptiveAveragePool, export_onnx
from mminline.models.layers import WindowAttention
from mminline.ops.export import inline_attention_export
from mminline.ops.reference import inline_attention_reference
from mminline.preflight import RunError
from mminline.runs import read_config

from .test_op import PROBLEMS, make_inputs, relative_error

ROOT = Path(__file__).parents[1]
CONFIGS = dict(
    maskrcnn='configs/demo/inline_pvt_maskrcnn_shapes.py', retinanet='configs/inline_pvt_retinanet.py',
    upernet='configs/demo/inline_swin_upernet_shapes.py', semfpn='configs/inline_pvt_semfpn.py')
DIMS = 32
PYRAMID = dict(embed_dims=(DIMS,) * 4, num_heads=(2,) * 4, depths=(1, 1, 1, 2))
KINDS = ('inline', 'inline', 'softmax', 'softmax')
BACKBONES = dict(
    pvt=dict(type='mminline.InLinePVT', arch=dict(**PYRAMID, mlp_ratios=(2,) * 4), pretrain_img_size=64,
             attn_types=('inline', 'softmax', 'linear', 'inline')),
    swin=dict(type='mminline.InLineSwin', arch=dict(**PYRAMID, attn_types=KINDS), window_size=2),
    cswin=dict(type='mminline.InLineCSwin', arch=dict(**PYRAMID, attn_types=KINDS), split_size=2),
    deit=dict(type='mminline.InLineDeiT', arch=dict(embed_dims=DIMS, num_heads=2, depth=1, pretrain_img_size=64),
              out_indices=(0,)))

SMALL_SHAPES = ((1, 96, 64), (3, 65, 43))  # narrow windows need no larger ones
needs_onnx = pytest.mark.usefixtures('onnxruntime')


@pytest.fixture(autouse=True)
def small_images(monkeypatch):
    monkeypatch.setattr(export, 'CHECKED_SHAPES', SMALL_SHAPES)


@pytest.fixture(scope='session')
def onnxruntime():
    pytest.importorskip('onnx', reason="needs pip install 'mminline[export]'")
    return pytest.importorskip('onnxruntime', reason="needs pip install 'mminline[export]'")


def small_config(name: str, backbone: str) -> Config:
    """A config with a narrow model around one of the small backbones."""
    cfg = read_config(ROOT / CONFIGS[name])
    cfg.model.backbone = BACKBONES[backbone]
    dims = [DIMS] * 4
    if name == 'upernet':
        cfg.model.decode_head.update(in_channels=dims, channels=16)
        cfg.model.auxiliary_head.update(in_channels=DIMS, channels=16)
    elif backbone == 'deit':
        cfg.model.neck = dict(type='mminline.SimplePyramid', in_channels=DIMS, out_channels=DIMS, num_outs=5)
    else:
        cfg.model.neck.update(in_channels=dims, out_channels=DIMS)
    if name == 'semfpn':
        cfg.model.decode_head.update(in_channels=dims, channels=DIMS, num_classes=4)
    elif name == 'retinanet':
        cfg.model.bbox_head.update(in_channels=DIMS, feat_channels=DIMS, stacked_convs=1, num_classes=4)
    elif name == 'maskrcnn':
        cfg.model.rpn_head.update(in_channels=DIMS, feat_channels=DIMS)
    return cfg


def save_run(cfg: Config, path: Path) -> Path:
    """Save a checkpoint as a run would, of a model in which no weight is as it was initialised."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = build_model(cfg)
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    torch.save(dict(meta={}, state_dict=model.state_dict()), path)
    return path


def run(onnxruntime, path: Path, image: torch.Tensor) -> dict:
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(names, {'image': image.numpy()}))))


# ---- what replaces parts of a model -------------------------------------------------------------------
@pytest.mark.parametrize('problem', PROBLEMS)
@pytest.mark.parametrize('local', [True, False], ids=['local', 'global_only'])
@pytest.mark.parametrize('center', [True, False], ids=['centred', 'uncentred'])
def test_the_exported_operator_is_the_paper_s(problem, local, center):
    (*qkv, weight), settings = make_inputs(problem)
    arguments = (*qkv, settings['num_heads'], 0.3, weight if local else None, settings['hw_shape'],
                 settings['num_prefix_tokens'], center)
    assert relative_error(inline_attention_export(*arguments), inline_attention_reference(*arguments)) < 1e-12


@pytest.mark.parametrize('size', [(1, 1), (2, 5), (7, 3), (13, 24)], ids=str)
@pytest.mark.parametrize('output_size', [1, 2, 3, 6, (2, 4)], ids=str)
def test_pooling_by_matrices(size, output_size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(AdaptiveAveragePool(output_size)(x), F.adaptive_avg_pool2d(x, output_size))


def test_windows_are_shifted_on_maps_larger_than_one():
    layer = WindowAttention(16, 2, window_size=7, shifted=True)
    for hw_shape in ((1, 1), (7, 7), (7, 30), (8, 7), (8, 8), (14, 15), (40, 200)):
        assert layer.shift(hw_shape) == (3 if min(hw_shape) > 7 else 0), hw_shape
    assert WindowAttention(16, 2, window_size=7, shifted=False).shift((40, 200)) == 0


@pytest.mark.parametrize('family', BACKBONES)
def test_a_trace_serves_other_sizes(family):
    """Also without ONNX: torch.jit.trace, which TensorBoard's graphs are made with."""
    backbone = MODELS.build(BACKBONES[family]).eval()
    with torch.no_grad():
        traced = torch.jit.trace(backbone, torch.randn(2, 3, 68, 90), check_trace=False)
        for shape in ((1, 3, 97, 160), (3, 3, 20, 30)):
            image = torch.randn(shape)
            for found, expected in zip(traced(image), backbone(image)):
                assert relative_error(found, expected) < 1e-5, shape


# ---- whole files --------------------------------------------------------------------------------------
@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize('family', BACKBONES)
def test_backbones_at_any_size(family, tmp_path, onnxruntime):
    cfg = small_config('upernet' if family != 'deit' else 'retinanet', family)
    checkpoint = save_run(cfg, tmp_path / 'run.pth')
    report = export_onnx(cfg, checkpoint, tmp_path / 'new.onnx', part='backbone')
    assert report.axes == ('batch', 3, 'height', 'width')
    assert report.error < 1e-4
    backbone = load_model(cfg, checkpoint, 'cpu').backbone
    for shape in ((2, 3, 97, 160), (1, 3, 20, 30)):
        image = torch.randn(shape)
        with torch.no_grad():
            maps = backbone(image)
        found = run(onnxruntime, tmp_path / 'new.onnx', image)
        assert list(found) == list(report.outputs) == [f'map_{index}' for index in range(len(maps))]
        for name, expected in zip(found, maps):
            assert relative_error(found[name], expected) < 1e-4, (shape, name)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize('name, family', [('upernet', 'swin'), ('semfpn', 'pvt')])
def test_segmentors_give_logits_of_the_image_s_size(name, family, tmp_path, onnxruntime):
    cfg = small_config(name, family)
    checkpoint = save_run(cfg, tmp_path / 'run.pth')
    report = export_onnx(cfg, checkpoint, tmp_path / 'new.onnx')
    assert report.axes == ('batch', 3, 'height', 'width')
    segmentor = load_model(cfg, checkpoint, 'cpu')
    for shape in ((2, 3, 64, 97), (1, 3, 33, 20)):
        image = torch.randn(shape)
        with torch.no_grad():
            expected = segmentor.encode_decode(image, [dict(img_shape=shape[2:])] * shape[0])
        found = run(onnxruntime, tmp_path / 'new.onnx', image)
        assert list(found) == ['logits'] and found['logits'].shape == (shape[0], 4, *shape[2:])
        assert relative_error(found['logits'], expected) < 1e-4, shape


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize('name, family', [('maskrcnn', 'pvt'), ('retinanet', 'deit')])
def test_detectors_give_raw_dense_predictions(name, family, tmp_path, onnxruntime):
    cfg = small_config(name, family)
    checkpoint = save_run(cfg, tmp_path / 'run.pth')
    report = export_onnx(cfg, checkpoint, tmp_path / 'new.onnx')
    assert report.axes == ('batch', 3, 'height', 'width')
    detector = load_model(cfg, checkpoint, 'cpu')
    image = torch.randn(2, 3, 65, 96)
    with torch.no_grad():
        maps = detector.extract_feat(image)
        scores, boxes = (detector.rpn_head if name == 'maskrcnn' else detector.bbox_head)(maps)
    expected = dict(map=maps if name == 'maskrcnn' else (), cls_score=scores, bbox_pred=boxes)
    expected = {f'{key}_{index}': value for key, values in expected.items() for index, value in enumerate(values)}
    found = run(onnxruntime, tmp_path / 'new.onnx', image)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert relative_error(found[key], value) < 1e-4, key


@pytest.fixture(scope='module')
def smallest(tmp_path_factory):
    """The config and checkpoint of the model that is exported soonest."""
    cfg = small_config('retinanet', 'deit')
    return cfg, save_run(cfg, tmp_path_factory.mktemp('run') / 'run.pth')


@needs_onnx
def test_one_size_only(smallest, tmp_path, onnxruntime):
    out = tmp_path / 'new.onnx'
    out.write_text('an earlier export')
    report = export_onnx(*smallest, out, part='backbone', shape=(48, 80))
    assert list(tmp_path.iterdir()) == [out]
    assert report.axes == ('batch', 3, 48, 80)
    assert report.checked_shapes == ((1, 48, 80), (3, 48, 80))
    assert str(report).startswith(f'{out}: InLineDeiT, image (batch, 3, 48, 80) to map_0; ')
    assert run(onnxruntime, out, torch.randn(2, 3, 48, 80))['map_0'].shape == (2, DIMS, 3, 5)


# ---- refused ------------------------------------------------------------------------------------------
@needs_onnx
def test_a_file_that_computes_something_else_is_not_written(smallest, tmp_path, monkeypatch):
    monkeypatch.setattr(export, 'TOLERANCE', 0.)
    with pytest.raises(RunError, match=r'differs from PyTorch by .+ in map_0, for images of 1x48x80'):
        export_onnx(*smallest, tmp_path / 'new.onnx', part='backbone', shape=(48, 80))
    assert list(tmp_path.iterdir()) == []


@needs_onnx
def test_what_the_exporter_cannot_trace(smallest, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError('outer') from ValueError('no such operator\nand a page of details')

    monkeypatch.setattr(torch.onnx, 'export', fail)
    with pytest.raises(RunError, match=r'^RetinaNet cannot be exported for images of any size '
                                       r'\(--shape H W exports it for one\): ValueError: no such operator$'):
        export_onnx(*smallest, tmp_path / 'new.onnx')
    assert list(tmp_path.iterdir()) == []


@needs_onnx
@pytest.mark.parametrize('out, message', [
    ('new.pt', r'must end in \.onnx'), ('nowhere/new.onnx', 'there is no folder'), ('folder.onnx', 'is a folder')])
def test_places_for_no_file(smallest, out, message, tmp_path):
    (tmp_path / 'folder.onnx').mkdir()
    with pytest.raises(RunError, match=message):
        export_onnx(*smallest, tmp_path / out)


@needs_onnx
def test_weights_of_another_model(smallest, tmp_path):
    with pytest.raises(RunError, match='are not those of the model of'):
        export_onnx(small_config('semfpn', 'pvt'), smallest[1], tmp_path / 'new.onnx')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('package', ['onnx', 'onnxruntime'])
def test_missing_packages(smallest, package, tmp_path, monkeypatch):
    for name in ('onnx', 'onnxruntime'):
        monkeypatch.setitem(sys.modules, name, None if name == package else torch)
    with pytest.raises(RunError, match=rf"{package}(?s:.)*pip install 'mminline\[export\]'"):
        export_onnx(*smallest, tmp_path / 'new.onnx')


def test_arguments_that_mean_nothing(smallest, tmp_path):
    with pytest.raises(ValueError, match="part must be one of .*, got 'neck'"):
        export_onnx(*smallest, tmp_path / 'new.onnx', part='neck')
    with pytest.raises(ValueError, match=r'shape must be positive, got \(0, 64\)'):
        export_onnx(*smallest, tmp_path / 'new.onnx', shape=(0, 64))


def test_heads_that_have_no_export(smallest):
    cfg, _ = smallest
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = build_model(Config({**cfg, 'model': {**cfg.model, 'bbox_head': dict(
            type='FCOSHead', num_classes=4, in_channels=DIMS, feat_channels=DIMS, stacked_convs=1)}}))
    with pytest.raises(RunError, match='RetinaNet can only be exported without its heads'):
        export._exported_part(model, 'whole')


@needs_onnx
def test_command_line(smallest, tmp_path, monkeypatch, capsys):
    cfg, checkpoint = smallest
    config = tmp_path / 'config.py'
    cfg.dump(config)

    def main(*args) -> None:
        monkeypatch.setattr(sys, 'argv', ['export_onnx.py', *map(str, args)])
        runpy.run_path(str(ROOT / 'tools/export_onnx.py'), run_name='__main__')

    out = tmp_path / 'new.onnx'
    main(config, checkpoint, out, '--part', 'backbone', '--shape', 48, 80)
    assert capsys.readouterr().out.startswith(f'{out}: InLineDeiT, image (batch, 3, 48, 80) to map_0; ')
    for args, message in (((config, checkpoint, tmp_path / 'new.pt'), 'must end in .onnx'),
                          ((config, tmp_path / 'nothing.pth', out), 'there is no checkpoint file'),
                          ((config, checkpoint, out, '--part', 'neck'), "invalid choice: 'neck'"),
                          ((config, checkpoint, out, '--shape', -1, 5), 'shape must be positive, got (-1, 5)')):
        with pytest.raises(SystemExit) as end:
            main(*args)
        assert end.value.code == 2 and message in capsys.readouterr().err
