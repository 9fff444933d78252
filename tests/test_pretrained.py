"""Reading weights: every kind of file, position tables of any size, the report, and its refusals."""
import logging

import pytest
import torch
from mmengine.logging import MMLogger

from mminline.models import InLinePVT
from mminline.models.layers import resize_position_table
from mminline.models.pretrained import load_pretrained

from .test_pvt import NARROW, build


@pytest.fixture
def weights():
    """Weights of a trained backbone, all different from a new one's."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(value.shape, generator=generator) for name, value in build().state_dict().items()}


@pytest.fixture
def log():
    """Return what is logged, as one string."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    yield lambda: '\n'.join(lines)
    logger.removeHandler(handler)


def init_from(path, **options) -> InLinePVT:
    min_matched = {'min_matched': options.pop('min_matched')} if 'min_matched' in options else {}
    backbone = build(init_cfg=dict(type='Pretrained', checkpoint=str(path), **min_matched), **options)
    backbone.init_weights()
    return backbone


@pytest.mark.parametrize('wrap', [
    lambda w: w,
    lambda w: dict(model={**w, 'head.weight': torch.zeros(1000, 64)}, optimizer={}, max_accuracy=78.2, epoch=299),
    lambda w: dict(model={k: v * 0 for k, v in w.items()}, state_dict_ema=w),
    lambda w: dict(state_dict={f'backbone.{k}': v for k, v in w.items()} | {'neck.weight': torch.zeros(1)}),
    lambda w: dict(state_dict=w, meta={}),
    lambda w: dict(state_dict={f'module.backbone.{k}': v for k, v in w.items()}),
], ids=['bare', 'official', 'official_ema', 'mm_detector', 'mm_backbone', 'data_parallel'])
def test_every_kind_of_file(tmp_path, weights, wrap):
    torch.save(wrap(weights), tmp_path / 'weights.pth')
    loaded = init_from(tmp_path / 'weights.pth').state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_log_says_what_was_read(tmp_path, weights, log):
    torch.save(dict(model=weights, state_dict_ema=weights), tmp_path / 'weights.pth')
    init_from(tmp_path / 'weights.pth')
    assert 'weights.pth [state_dict_ema]' in log()
    assert f'{len(weights)} parameters matched, 0 resized, 0 missing, 0 unexpected; 100.0% loaded' in log()


def test_tables_of_another_size_are_resized(tmp_path, weights, log):
    torch.save(dict(model=weights), tmp_path / 'weights.pth')
    backbone = init_from(tmp_path / 'weights.pth', pretrain_img_size=(96, 160))
    expected = resize_position_table(weights['pos_embed2'], (8, 8), (12, 20))
    assert torch.equal(backbone.pos_embed2.data, expected)
    assert '4 resized (pos_embed1, pos_embed2, pos_embed3, ...)' in log()


def test_loading_a_run_resizes_too(weights, log):
    """tools/test.py and init_detector load a whole model by load_state_dict."""
    detector = torch.nn.ModuleDict(dict(backbone=build(pretrain_img_size=96)))
    detector.load_state_dict({f'backbone.{name}': value for name, value in weights.items()})
    expected = resize_position_table(weights['pos_embed4'], (2, 2), (3, 3))
    assert torch.equal(detector.backbone.pos_embed4.data, expected)
    assert 'backbone.pos_embed4' in log()


def test_another_attention_kind_does_not_count(tmp_path, weights, log):
    torch.save(dict(model=weights), tmp_path / 'weights.pth')
    softmax = init_from(tmp_path / 'weights.pth', attn_types=('softmax',) * 4, min_matched=1.0)
    assert torch.equal(softmax.block2[1].attn.kv.weight.data, weights['block2.1.attn.kv.weight'])
    assert '100.0% loaded' in log()
    assert 'block1.0.attn.sr.weight' in log()


def test_stages_that_do_not_exist_are_not_missed(tmp_path, weights):
    torch.save(dict(model=weights), tmp_path / 'weights.pth')
    report = load_pretrained(build(out_indices=(0, 1)), str(tmp_path / 'weights.pth'), min_matched=1.0)
    assert report.missing == ()
    assert 'pos_embed4' in report.unexpected


def test_too_little_fits(tmp_path, weights):
    torch.save(dict(model=weights), tmp_path / 'weights.pth')
    wider = {**NARROW, 'embed_dims': (32, 32, 64, 128), 'num_heads': (1, 1, 2, 4)}
    with pytest.raises(ValueError, match=r'do not fit InLinePVT, at least 90% .*missing \(pos_embed4') as error:
        init_from(tmp_path / 'weights.pth', arch=wider)
    assert 'weights.pth [model]' in str(error.value)
    backbone = init_from(tmp_path / 'weights.pth', arch=wider, min_matched=0.5)
    assert torch.equal(backbone.pos_embed1.data, weights['pos_embed1'])


@pytest.mark.parametrize('content, message', [
    (dict(epoch=3), r"holds no weights: its entries are \['epoch'\]"),
    (torch.zeros(3), 'it is a Tensor, not a dict'),
    (dict(model={'pos_embed1': torch.zeros(1, 255, 32)}), 'pos_embed1 has 255 positions, which is no square map'),
], ids=['no_weights', 'tensor', 'odd_table'])
def test_files_without_weights(tmp_path, content, message):
    torch.save(content, tmp_path / 'weights.pth')
    with pytest.raises(ValueError, match=message):
        init_from(tmp_path / 'weights.pth')


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere.pth'):
        init_from(tmp_path / 'nowhere.pth')


def test_min_matched_is_a_share(tmp_path):
    with pytest.raises(ValueError, match=r'min_matched must be in \[0, 1\], got 90'):
        init_from(tmp_path / 'weights.pth', min_matched=90)


def test_misspelt_key_raises(tmp_path):
    backbone = build(init_cfg=dict(type='Pretrained', checkpoint='weights.pth', min_match=0.5))
    with pytest.raises(TypeError, match='min_match'):
        backbone.init_weights()
