"""Every config loads, builds its model and predicts one image."""
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.apis import inference_detector
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mminline.preflight import check_names

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / 'configs').rglob('*.py') if '_base_' not in path.parts)

# arch, drop path rate; the published 1x recipe is the same otherwise.
MASK_RCNN = {
    'inline_pvt_maskrcnn': ('tiny', 0.1),
    'inline_pvt-s_maskrcnn': ('small', 0.2),
    'inline_pvt-m_maskrcnn': ('medium', 0.1),
    'inline_pvt-l_maskrcnn': ('large', 0.2),
}


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_predicts_an_image(path):
    cfg = Config.fromfile(path)
    check_names(cfg)
    init_default_scope(cfg.default_scope)
    cfg.model.backbone.init_cfg = None  # the weights are the user's to download
    # Small images and few objects; an untrained head is sure of nothing.
    cfg.model.test_cfg.rcnn.update(score_thr=0.0, max_per_img=5)
    for transform in cfg.test_dataloader.dataset.pipeline:
        if transform.type == 'Resize':
            transform.scale = (96, 64)
    model = MODELS.build(cfg.model).eval()
    model.cfg = cfg

    image = np.random.default_rng(0).integers(256, size=(48, 80, 3), dtype=np.uint8)
    objects = inference_detector(model, image).pred_instances

    assert 1 <= len(objects) <= 5
    assert objects.masks.shape[1:] == image.shape[:2]
    assert torch.isfinite(objects.scores).all() and torch.isfinite(objects.bboxes).all()
    assert objects.labels.max() < cfg.model.roi_head.bbox_head.num_classes


@pytest.mark.parametrize('name', MASK_RCNN)
def test_mask_rcnn_recipe(name):
    cfg = Config.fromfile(ROOT / 'configs' / f'{name}.py')
    arch, drop_path_rate = MASK_RCNN[name]
    assert cfg.model.backbone == dict(
        type='mminline.InLinePVT', arch=arch, drop_path_rate=drop_path_rate,
        init_cfg=dict(type='Pretrained', checkpoint=f'checkpoints/inline_pvt_{arch}.pth'))
    assert cfg.optim_wrapper.type == 'OptimWrapper' and 'paramwise_cfg' not in cfg.optim_wrapper
    assert cfg.optim_wrapper.optimizer == dict(type='AdamW', lr=2e-4, weight_decay=1e-4)
    assert (cfg.train_cfg.max_epochs, cfg.param_scheduler[-1].milestones) == (12, [8, 11])
    assert cfg.auto_scale_lr.base_batch_size == 8 * cfg.train_dataloader.batch_size == 16
    preprocessor = cfg.model.data_preprocessor
    assert preprocessor.bgr_to_rgb and preprocessor.pad_size_divisor == 32
    np.testing.assert_allclose(np.divide(preprocessor.mean, 255), (0.485, 0.456, 0.406), atol=1e-6)
    np.testing.assert_allclose(np.divide(preprocessor.std, 255), (0.229, 0.224, 0.225), atol=1e-6)
