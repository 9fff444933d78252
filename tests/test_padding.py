"""An image in a padded batch gives what it gives alone: backbones, data preprocessors, whole models."""
import math
import re
import subprocess
import sys
from pathlib import Path

import mmengine
import pytest
import torch
from mmdet.structures import DetDataSample
from mmdet.testing import demo_mm_inputs
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from mminline.analysis.batch_invariance import compare
from mminline.datasets import make_shapes
from mminline.models import InLinePVT

from .test_configs import read_config
from .test_family import FAMILIES as OTHER_FAMILIES
from .test_family import KINDS

FAMILIES = {
    **OTHER_FAMILIES,
    'pvt': lambda **options: InLinePVT(
        dict(embed_dims=(16, 32, 64, 64), num_heads=(1, 2, 4, 4), depths=(1, 1, 2, 1), mlp_ratios=(2,) * 4), **options),
    'pvt_mixed': lambda **options: FAMILIES['pvt'](
        attn_types=('softmax', 'linear', ('inline', 'softmax'), 'linear'), **options),
    'swin_softmax': lambda **options: OTHER_FAMILIES['swin'](attn_types=KINDS['softmax'], **options),
    'cswin_softmax': lambda **options: OTHER_FAMILIES['cswin'](attn_types=KINDS['softmax'], **options),
}
BATCHES = {
    'larger': [(96, 160), (64, 96)],
    'across': [(160, 64), (64, 224)],
    'four': [(96, 128), (256, 96), (32, 32), (96, 128)],
    'not_of_the_stride': [(61, 90), (90, 33)],
}


def make_batch(sizes):
    """Return images of some sizes, and the batch they are padded to; padding is no zero, to be seen."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(3, *size, generator=generator) for size in sizes]
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    batch = torch.full((len(sizes), 3, height, width), 7.0)
    for padded, image in zip(batch, images):
        padded[:, :image.shape[1], :image.shape[2]] = image
    return images, batch


def loss(maps):
    """A sum over positions: that of a batch is the sum of those of its images."""
    return sum((m * torch.linspace(-1, 1, m.shape[1])[:, None, None]).sin().sum() for m in maps)


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('batch', BATCHES)
@pytest.mark.parametrize('family', FAMILIES)
def test_features_and_gradients_are_those_of_the_images_alone(family, batch, training):
    torch.manual_seed(0)
    backbone = FAMILIES[family]().train(training)
    images, padded = make_batch(BATCHES[batch])
    maps = backbone(padded, valid_size=BATCHES[batch])
    loss(maps).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in backbone.named_parameters()}
    backbone.zero_grad()
    for index, image in enumerate(images):
        alone = backbone(image[None])
        loss(alone).backward()
        for whole, expected, stride in zip(maps, alone, backbone.out_strides):
            assert whole.shape[2:] == tuple(math.ceil(edge / stride) for edge in padded.shape[2:])
            assert whole.is_contiguous()
            height, width = expected.shape[2:]
            assert (whole[index, :, :height, :width] - expected[0]).norm() <= 1e-5 * expected.norm()
            assert not whole[index, :, height:].any() and not whole[index, :, :, width:].any()
    for name, parameter in backbone.named_parameters():
        error = (parameter.grad - gradients[name]).norm()
        assert error <= 1e-4 * parameter.grad.norm() + 1e-4, name


def test_unaware_backbone_sees_the_padding():
    images, batch = make_batch(BATCHES['larger'])
    backbone = FAMILIES['pvt'](pad_aware=False).eval()
    maps = backbone(batch, valid_size=BATCHES['larger'])
    assert torch.equal(maps[0], backbone(batch)[0])
    (alone, *_) = backbone(images[1][None])
    assert (maps[0][1, :, :16, :24] - alone[0]).norm() > 1e-3 * alone.norm()  # 100 times what a pad-aware one allows


def test_a_batch_without_padding_goes_through_as_it_is(monkeypatch):
    backbone = FAMILIES['pvt']().eval()
    seen = []
    monkeypatch.setattr(backbone, 'forward_whole', lambda x: seen.append(x) or ())
    batch = torch.zeros(2, 3, 64, 96)
    backbone(batch)
    backbone(batch, valid_size=[(64, 96), (64, 96)])
    batch.mminline_valid_size = [(64, 96), (64, 96)]
    backbone(batch)
    assert len(seen) == 3 and all(x is batch for x in seen)


def test_images_of_one_size_go_together(monkeypatch):
    backbone = FAMILIES['pvt']().eval()
    seen = []
    forward = backbone.forward_whole
    monkeypatch.setattr(backbone, 'forward_whole', lambda x: seen.append(tuple(x.shape)) or forward(x))
    backbone(torch.zeros(4, 3, 64, 96), valid_size=[(64, 96), (64, 64), (64, 96), (64, 64)])
    assert seen == [(2, 3, 64, 96), (2, 3, 64, 64)]


@pytest.mark.parametrize('with_cp', [False, True])
def test_attribute_checkpointing_and_autocast(with_cp):
    torch.manual_seed(0)
    backbone = FAMILIES['swin'](with_cp=with_cp).train()
    images, batch = make_batch(BATCHES['across'])
    batch.mminline_valid_size = BATCHES['across']
    with torch.autocast('cpu', torch.bfloat16):
        maps = backbone(batch)
        alone = backbone(images[0][None])
    assert (maps[2][0, :, :10, :4] - alone[2][0]).norm() <= 2 ** -7 * alone[2].norm()
    loss([m.float() for m in maps]).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())


def test_compiled_backbone_follows_the_sizes():
    backbone = FAMILIES['pvt']().eval()
    compiled = torch.compile(backbone, backend='eager', fullgraph=True)
    _, batch = make_batch([(64, 96), (64, 64)])
    with torch.no_grad():
        for sizes in (None, [(64, 96), (64, 64)], [(64, 96), (32, 96)], [(64, 96), (64, 96)]):
            x = batch.clone()
            if sizes is not None:
                x.mminline_valid_size = sizes
            for out, expected in zip(compiled(x), backbone(x)):
                torch.testing.assert_close(out, expected)


def test_a_slice_of_a_batch_is_wholly_valid():
    _, batch = make_batch(BATCHES['larger'])
    batch.mminline_valid_size = BATCHES['larger']
    assert not hasattr(batch[1:], 'mminline_valid_size') and not hasattr(batch[:, :, :64], 'mminline_valid_size')


@pytest.mark.parametrize('valid_size, message', [
    ([(64, 96)], 'for each of 2 images'),
    ([(64, 96), (65, 96)], r'got \(65, 96\)'),
    ([(64, 96), (0, 96)], r'got \(0, 96\)'),
    ([(64, 96), (64, 96, 3)], r'got \(64, 96, 3\)'),
])
def test_malformed_valid_size(valid_size, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES['pvt']()(torch.zeros(2, 3, 64, 96), valid_size=valid_size)


# ---- data preprocessors -------------------------------------------------------------------------------
def detection_data(sizes):
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8) for size in sizes]
    samples = [DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0))) for size in sizes]
    return dict(inputs=images, data_samples=samples)


def segmentation_data(sizes):
    data = detection_data(sizes)
    data['data_samples'] = [
        SegDataSample(metainfo=dict(img_shape=size, ori_shape=size),
                      gt_sem_seg=PixelData(data=torch.zeros(1, *size, dtype=torch.long))) for size in sizes]
    return data


@pytest.mark.parametrize('stride, expected', [(32, [(96, 160), (64, 96)]), (16, [(96, 160), (48, 80)])])
def test_detection_preprocessor_attaches_valid_sizes(stride, expected):
    preprocessor = MODELS.build(dict(type='mminline.DetDataPreprocessor', pad_size_divisor=32, stride=stride))
    for samples in (True, False):
        data = detection_data([(90, 150), (48, 71)])
        if not samples:
            data['data_samples'] = None
        batch = preprocessor(data)['inputs']
        assert batch.shape == (2, 3, 96, 160) and batch.mminline_valid_size == expected


def test_valid_size_follows_a_resized_batch():
    def double(inputs, samples):
        for sample in samples:
            sample.set_metainfo(dict(img_shape=tuple(2 * edge for edge in sample.img_shape)))
        return torch.nn.functional.interpolate(inputs, scale_factor=2), samples

    preprocessor = MODELS.build(dict(type='mminline.DetDataPreprocessor', pad_size_divisor=32))
    preprocessor.batch_augments = [double]
    data = preprocessor(detection_data([(90, 150), (48, 70)]), training=True)
    assert data['inputs'].shape == (2, 3, 192, 320)
    assert data['inputs'].mminline_valid_size == [(192, 320), (96, 160)]


@pytest.mark.parametrize('training', [False, True], ids=['test', 'train'])
def test_segmentation_preprocessor(training):
    preprocessor = MODELS.build(dict(
        type='mminline.SegDataPreprocessor', size=(96, 160), test_cfg=dict(size_divisor=32), mean=[1.0] * 3,
        std=[2.0] * 3))
    data = preprocessor(segmentation_data([(90, 150), (48, 70)]), training=training)
    assert data['inputs'].shape == (2, 3, 96, 160)
    assert data['inputs'].mminline_valid_size == [(96, 160), (64, 96)]
    if not training:
        expected = (segmentation_data([(90, 150), (48, 70)])['inputs'][1] - 1.0) / 2.0
        assert torch.equal(data['inputs'][1, :, :48, :70], expected)
        assert not data['inputs'][1, :, 48:].any()
        assert [tuple(sample.img_padding_size) for sample in data['data_samples']] == [(0, 10, 0, 6), (0, 90, 0, 48)]


def test_preprocessor_arguments():
    for name in ('DetDataPreprocessor', 'SegDataPreprocessor'):
        with pytest.raises(TypeError, match='pad_size_divider'):
            MODELS.build(dict(type=f'mminline.{name}', pad_size_divider=32))
        with pytest.raises(ValueError, match='stride must be positive, got 0'):
            MODELS.build(dict(type=f'mminline.{name}', stride=0))


# ---- whole models -------------------------------------------------------------------------------------
def build(name, **backbone):
    cfg = read_config(name)
    init_default_scope(cfg.default_scope)
    cfg.model.backbone.update(init_cfg=None, drop_path_rate=0.0, **backbone)
    torch.manual_seed(0)
    return MODELS.build(cfg.model).eval()


@pytest.mark.parametrize('name', ['demo/inline_pvt_maskrcnn_shapes', 'demo/inline_swin_upernet_shapes'])
def test_the_backbone_of_a_whole_model_sees_no_padding(name, monkeypatch):
    model = build(name)
    make_data = detection_data if 'maskrcnn' in name else segmentation_data
    sizes = [(60, 90), (100, 33)]
    seen = []
    forward = model.backbone.forward
    monkeypatch.setattr(model.backbone, 'forward', lambda x: seen.append(forward(x)) or seen[-1])
    with torch.no_grad():
        results = model.test_step(make_data(sizes))
        data = make_data(sizes)
        for index in range(2):
            model.test_step({key: values[index:index + 1] for key, values in data.items()})
            for batch, alone in zip(seen[0], seen[-1]):
                height, width = alone.shape[2:]
                assert (batch[index, :, :height, :width] - alone[0]).norm() <= 1e-5 * alone.norm()
    if make_data is segmentation_data:
        assert [tuple(result.pred_sem_seg.shape) for result in results] == sizes


def test_valid_sizes_reach_the_backbone_through_ddp(tmp_path, monkeypatch):
    model = build('demo/inline_pvt_maskrcnn_shapes').train()
    seen = []
    forward = model.backbone.forward
    monkeypatch.setattr(model.backbone, 'forward', lambda x: seen.append(x) or forward(x))
    data = demo_mm_inputs(2, [(3, 60, 90), (3, 100, 33)], num_items=[2, 1], num_classes=3, with_mask=True)
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        wrapped = MMDistributedDataParallel(model, device_ids=None)
        losses = wrapped._run_forward(wrapped.module.data_preprocessor(data, training=True), mode='loss')
        model.parse_losses(losses)[0].backward()
    finally:
        torch.distributed.destroy_process_group()
    (batch,) = seen
    assert batch.mminline_valid_size == [(64, 96), (128, 64)] and batch.shape[2:] == (128, 96)
    assert all(parameter.grad is not None for parameter in model.backbone.parameters())


def test_every_config_attaches_valid_sizes():
    for file in sorted(mmengine.scandir('configs', '.py', recursive=True)):
        if '_base_' in file:
            continue
        cfg = read_config(file.removesuffix('.py'))
        preprocessor = cfg.model.data_preprocessor
        kind = 'Det' if cfg.default_scope == 'mmdet' else 'Seg'
        assert preprocessor.type == f'mminline.{kind}DataPreprocessor', file
        assert preprocessor.get('stride', 32) == (16 if 'DeiT' in cfg.model.backbone.type else 32), file
        if kind == 'Seg':
            assert preprocessor.test_cfg == dict(size_divisor=32), file


# ---- what is left behind the backbone -----------------------------------------------------------------
def detections(boxes, scores, labels):
    return dict(bboxes=torch.tensor(boxes, dtype=torch.float32).view(-1, 4), scores=torch.tensor(scores),
                labels=torch.tensor(labels, dtype=torch.long))


def test_detections_are_compared_with_their_like():
    alone = {1: detections([[0, 0, 10, 10], [20, 20, 30, 30], [50, 50, 60, 60]], [0.9, 0.8, 0.7], [0, 1, 2]),
             2: detections([], [], [])}
    batched = {1: detections([[20, 21, 30, 30], [0, 0, 10, 13], [50, 50, 60, 60]], [0.75, 0.9, 0.7], [1, 0, 0]),
               2: detections([[0, 0, 5, 5], [7, 7, 9, 9]], [0.6, 0.2], [0, 0])}
    # Another class is another object; what is below the threshold does not count.
    assert compare(alone, batched, score_thr=0.3) == pytest.approx((2, 3, 3.0, 0.05))
    assert compare(alone, alone, score_thr=0.3) == (3, 0, 0.0, 0.0)


@pytest.mark.slow
def test_batch_invariance_tool(tmp_path):
    from .test_infer import make_model
    make_shapes(tmp_path / 'data/shapes', num_images=30)
    detector = make_model(tmp_path, 'detection')
    tool = Path(__file__).parents[1] / 'tools/analysis/batch_invariance.py'
    command = [sys.executable, tool, detector.config, detector.checkpoint, '--work-dir', 'run', '--batch-sizes', '3',
               '--score-thr', '0']
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r'\s+(yes|no)\s+\d', line)]
    assert [row[:2] for row in rows] == [['yes', '1'], ['yes', '3'], ['no', '1'], ['no', '3']]
    assert [row[3:6] for row in rows[::2]] == [['0', '0', '0']] * 2
    assert int(rows[0][2]) == 6 * 6  # six validation images, six detections each
    result = subprocess.run([*command[:3], 'missing.pth'], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and 'missing.pth' in result.stderr and 'Traceback' not in result.stderr
