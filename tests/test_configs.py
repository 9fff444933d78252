"""Every config loads, builds its model and predicts one image; recipes are those of the publications."""
import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.apis import inference_detector
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmseg.apis import inference_model

from mminline.datasets import make_shapes
from mminline.preflight import check_names

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path.relative_to(ROOT / 'configs').with_suffix('').as_posix()
                 for path in (ROOT / 'configs').rglob('*.py') if '_base_' not in path.parts)

# Backbone, size, drop path rate, learning rate, weight decay, and epochs or iterations of training.
RECIPES = {
    'inline_pvt_maskrcnn': ('InLinePVT', 'tiny', 0.1, 2e-4, 1e-4, 12),
    'inline_pvt-s_maskrcnn': ('InLinePVT', 'small', 0.2, 2e-4, 1e-4, 12),
    'inline_pvt-m_maskrcnn': ('InLinePVT', 'medium', 0.1, 2e-4, 1e-4, 12),
    'inline_pvt-l_maskrcnn': ('InLinePVT', 'large', 0.2, 2e-4, 1e-4, 12),
    'inline_pvt_retinanet': ('InLinePVT', 'tiny', 0.1, 1e-4, 1e-4, 12),
    'inline_pvt-s_retinanet': ('InLinePVT', 'small', 0.1, 1e-4, 1e-4, 12),
    'inline_pvt-m_retinanet': ('InLinePVT', 'medium', 0.2, 1e-4, 1e-4, 12),
    'inline_pvt-l_retinanet': ('InLinePVT', 'large', 0.3, 1e-4, 1e-4, 12),
    'inline_swin_maskrcnn': ('InLineSwin', 'tiny', 0.1, 1e-4, 0.05, 12),
    'inline_swin-s_maskrcnn': ('InLineSwin', 'small', 0.1, 1e-4, 0.05, 12),
    'inline_swin_maskrcnn_3x': ('InLineSwin', 'tiny', 0.1, 1e-4, 0.05, 36),
    'inline_swin-s_maskrcnn_3x': ('InLineSwin', 'small', 0.1, 1e-4, 0.05, 36),
    'inline_swin_cascade': ('InLineSwin', 'tiny', 0.1, 1e-4, 0.05, 12),
    'inline_swin_cascade_3x': ('InLineSwin', 'tiny', 0.1, 1e-4, 0.05, 36),
    'inline_swin-s_cascade_3x': ('InLineSwin', 'small', 0.1, 1e-4, 0.05, 36),
    'inline_swin-b_cascade_3x': ('InLineSwin', 'base', 0.4, 1e-4, 0.05, 36),
    'inline_cswin_maskrcnn': ('InLineCSwin', 'tiny', 0.1, 1e-4, 0.05, 12),
    'inline_deit_maskrcnn': ('InLineDeiT', 'tiny', 0.1, 1e-4, 0.05, 12),
    'inline_pvt_semfpn': ('InLinePVT', 'tiny', 0.1, 2e-4, 1e-4, 40_000),
    'inline_pvt-s_semfpn': ('InLinePVT', 'small', 0.1, 2e-4, 1e-4, 40_000),
    'inline_pvt-m_semfpn': ('InLinePVT', 'medium', 0.2, 2e-4, 1e-4, 40_000),
    'inline_pvt-l_semfpn': ('InLinePVT', 'large', 0.1, 2e-4, 1e-4, 40_000),
    'inline_pvt_upernet': ('InLinePVT', 'tiny', 0.3, 6e-5, 0.01, 160_000),
    'inline_pvt-s_upernet': ('InLinePVT', 'small', 0.3, 6e-5, 0.01, 160_000),
    'inline_pvt-m_upernet': ('InLinePVT', 'medium', 0.3, 6e-5, 0.01, 160_000),
    'inline_pvt-l_upernet': ('InLinePVT', 'large', 0.3, 6e-5, 0.01, 160_000),
    'inline_swin_upernet': ('InLineSwin', 'tiny', 0.3, 6e-5, 0.01, 160_000),
    'inline_swin-s_upernet': ('InLineSwin', 'small', 0.3, 6e-5, 0.01, 160_000),
    'inline_swin-b_upernet': ('InLineSwin', 'base', 0.5, 6e-5, 0.01, 160_000),
    'inline_cswin_upernet': ('InLineCSwin', 'tiny', 0.3, 6e-5, 0.01, 160_000),
    'inline_deit_upernet': ('InLineDeiT', 'tiny', 0.3, 6e-5, 0.01, 160_000),
}


# mmengine reads a toolbox's whole index to find one of its bases: most of a second for each config.
@cache
def _read_config(path):
    return Config.fromfile(path)


def read_config(name):
    """The config of that name in configs/, safe to change."""
    return copy.deepcopy(_read_config(ROOT / 'configs' / f'{name}.py'))


@pytest.mark.parametrize('name', CONFIGS)
def test_checkpoints_survive(name):
    assert read_config(name).default_hooks.checkpoint.type == 'mminline.SafeCheckpointHook'


@pytest.mark.parametrize('name', CONFIGS)
def test_predicts_an_image(name):
    cfg = read_config(name)
    check_names(cfg)
    assert 'mminline' in cfg.custom_imports.imports
    init_default_scope(cfg.default_scope)
    cfg.model.backbone.init_cfg = None  # the weights are the user's to download
    for pipeline in (cfg.test_pipeline, cfg.test_dataloader.dataset.pipeline):
        for transform in pipeline:
            if transform.type == 'Resize':
                transform.scale = (96, 64)
    image = np.random.default_rng(0).integers(256, size=(48, 80, 3), dtype=np.uint8)
    is_on_shapes = name.startswith(('demo/', 'ablation/'))
    if cfg.default_scope == 'mmdet':
        predict_objects(cfg, image, num_classes=3 if is_on_shapes else 80)
    else:
        predict_label_map(cfg, image, num_classes=4 if is_on_shapes else 150)


def predict_objects(cfg, image, num_classes):
    # Few objects and proposals, for speed; an untrained head is sure of nothing.
    test_cfg = cfg.model.test_cfg
    test_cfg.get('rcnn', test_cfg).update(score_thr=0.0, max_per_img=5)
    if 'rpn' in test_cfg:
        test_cfg.rpn.max_per_img = 50
    model = MODELS.build(cfg.model).eval()
    model.cfg = cfg

    objects = inference_detector(model, image).pred_instances

    assert 1 <= len(objects) <= 5
    assert torch.isfinite(objects.scores).all() and torch.isfinite(objects.bboxes).all()
    assert objects.labels.max() < num_classes
    if model.with_mask:
        assert objects.masks.shape[1:] == image.shape[:2]


def predict_label_map(cfg, image, num_classes):
    model = MODELS.build(cfg.model).eval()
    model.cfg = cfg

    sample = inference_model(model, image)

    assert sample.seg_logits.data.shape == (num_classes, *image.shape[:2])
    assert torch.isfinite(sample.seg_logits.data).all()
    assert sample.pred_sem_seg.data.shape == (1, *image.shape[:2])


@pytest.mark.parametrize('name', RECIPES)
def test_recipe(name):
    cfg = read_config(name)
    backbone, arch, drop_path_rate, lr, weight_decay, length = RECIPES[name]
    family = backbone.replace('InLine', 'inline_').lower()
    assert cfg.model.backbone == dict(
        type=f'mminline.{backbone}', arch=arch, drop_path_rate=drop_path_rate,
        init_cfg=dict(type='Pretrained', checkpoint=f'checkpoints/{family}_{arch}.pth'))
    assert cfg.optim_wrapper.type == 'OptimWrapper'
    assert cfg.optim_wrapper.optimizer == dict(type='AdamW', lr=lr, weight_decay=weight_decay)
    assert cfg.auto_scale_lr.base_batch_size == 8 * cfg.train_dataloader.batch_size == 16
    preprocessor = cfg.model.data_preprocessor
    assert preprocessor.bgr_to_rgb
    np.testing.assert_allclose(np.divide(preprocessor.mean, 255), (0.485, 0.456, 0.406), atol=1e-6)
    np.testing.assert_allclose(np.divide(preprocessor.std, 255), (0.229, 0.224, 0.225), atol=1e-6)

    warm_up, decay = cfg.param_scheduler[0], cfg.param_scheduler[-1]
    if cfg.default_scope == 'mmdet':
        assert preprocessor.pad_size_divisor == 32
        assert cfg.train_cfg.max_epochs == decay.end == length
        assert decay.milestones == {12: [8, 11], 36: [27, 33]}[length]
        assert (warm_up.start_factor, warm_up.begin, warm_up.end, warm_up.by_epoch) == (0.001, 0, 500, False)
    else:
        assert preprocessor.size == (512, 512)
        assert cfg.train_cfg.max_iters == decay.end == length
        assert (decay.type, decay.eta_min, decay.by_epoch) == ('PolyLR', 0, False)
        if 'upernet' in name:
            assert (warm_up.start_factor, warm_up.end, decay.begin, decay.power) == (1e-6, 1500, 1500, 1)
        else:
            assert (len(cfg.param_scheduler), decay.begin, decay.power) == (1, 0, 0.9)


@pytest.mark.parametrize('name', ['inline_swin_upernet', 'inline_deit_maskrcnn'])
def test_no_decay_on_norms_and_positions(name):
    cfg = read_config(name)
    init_default_scope(cfg.default_scope)
    backbone = MODELS.build({**cfg.model.backbone, 'init_cfg': None})
    groups = build_optim_wrapper(backbone, cfg.optim_wrapper).param_groups
    decay = {id(group['params'][0]): group['weight_decay'] for group in groups}
    without = {parameter_name for parameter_name, parameter in backbone.named_parameters() if not decay[id(parameter)]}
    assert without == {
        parameter_name for parameter_name, _ in backbone.named_parameters()
        if 'norm' in parameter_name or parameter_name.endswith(('bias_table', 'pos_embed', 'cls_token'))}


def test_multi_scale_crops(tmp_path):
    """The training images of Swin's recipe, made from the shapes."""
    make_shapes(tmp_path / 'shapes', num_images=4)
    cfg = read_config('inline_swin_maskrcnn')
    init_default_scope('mmdet')
    dataset = DATASETS.build({
        **cfg.train_dataloader.dataset, 'data_root': str(tmp_path / 'shapes/coco'), 'filter_cfg': None,
        'ann_file': 'annotations/train.json', 'data_prefix': dict(img='train'),
        'metainfo': dict(classes=('circle', 'square', 'triangle'))})
    np.random.seed(0)
    samples = [dataset[index] for index in (0, 1, 2, 3) * 3]
    shortest = [min(sample['inputs'].shape[1:]) for sample in samples]
    assert len(set(shortest)) > 3 and all(length in range(480, 801, 32) for length in shortest)
    for sample in samples:
        instances = sample['data_samples'].gt_instances
        assert instances.masks.masks.shape == (len(instances), *sample['inputs'].shape[1:])


# One line of difference from the demo of the same model.
ABLATION = {
    'pvt_maskrcnn_inline': dict(attn_types=('inline',) * 4),
    'pvt_maskrcnn_softmax': dict(attn_types=('softmax',) * 4),
    'pvt_maskrcnn_linear': dict(attn_types=('linear',) * 4),
    'pvt_maskrcnn_inline-no-local': dict(local_term=False),
    'pvt_maskrcnn_inline-no-center': dict(center=False),
    'swin_upernet_inline': dict(attn_types=('inline', 'inline', 'inline', 'softmax')),
    'swin_upernet_softmax': dict(attn_types=('softmax',) * 4),
    'swin_upernet_linear': dict(attn_types=('linear', 'linear', 'linear', 'softmax')),
    'swin_upernet_inline-no-local': dict(local_term=False),
    'swin_upernet_inline-no-center': dict(center=False),
}


@pytest.mark.parametrize('name', ABLATION)
def test_ablation_differs_in_one_line(name):
    model = name.rpartition('_')[0]
    demo = read_config(f'demo/inline_{model}_shapes').to_dict()
    assert set(demo['model']['backbone']).isdisjoint(ABLATION[name])
    demo['model']['backbone'].update(ABLATION[name])
    assert read_config(f'ablation/{name}').to_dict() == demo


def test_neck_ablation_differs_in_its_norm():
    demo = read_config('demo/inline_pvt_maskrcnn_shapes').to_dict()
    demo['model']['neck']['norm_cfg'] = dict(type='mminline.LayerNorm2d')
    assert read_config('ablation/pvt_maskrcnn_neck-layer-norm').to_dict() == demo


def test_tables_are_complete():
    names = [*RECIPES, *(f'ablation/{name}' for name in (*ABLATION, 'pvt_maskrcnn_neck-layer-norm'))]
    assert set(names) == {name for name in CONFIGS if not name.startswith('demo/')}
