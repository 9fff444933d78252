"""One training step of every family with every head it has a config for."""
import pytest
import torch
from mmdet.testing import demo_mm_inputs
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from .test_configs import read_config


def detection_batch():
    torch.manual_seed(0)
    return demo_mm_inputs(2, [(3, 64, 96), (3, 96, 64)], num_items=[3, 2], num_classes=80, with_mask=True)


def segmentation_batch():
    torch.manual_seed(0)
    inputs, samples = [], []
    for height, width in ((64, 96), (96, 64)):  # padded to the crop's size
        inputs.append(torch.randint(256, (3, height, width), dtype=torch.uint8))
        sample = SegDataSample(gt_sem_seg=PixelData(data=torch.randint(150, (1, height, width))))
        sample.set_metainfo(dict(img_shape=(height, width), ori_shape=(height, width)))
        samples.append(sample)
    return dict(inputs=inputs, data_samples=samples)


@pytest.mark.parametrize('name', [
    'inline_pvt_maskrcnn', 'inline_pvt_retinanet', 'inline_pvt_semfpn', 'inline_pvt_upernet',
    'inline_swin_maskrcnn', 'inline_swin_cascade', 'inline_swin_upernet',
    'inline_cswin_maskrcnn', 'inline_cswin_upernet',
    'inline_deit_maskrcnn', 'inline_deit_upernet',
])
def test_training_step(name):
    cfg = read_config(name)
    init_default_scope(cfg.default_scope)
    # A dropped block would have no gradient to speak of.
    cfg.model.backbone.update(init_cfg=None, drop_path_rate=0.0)
    if cfg.default_scope == 'mmdet':
        batch = detection_batch()
        if 'rpn_proposal' in cfg.model.train_cfg:
            cfg.model.train_cfg.rpn_proposal.update(nms_pre=100, max_per_img=50)
    else:
        batch = segmentation_batch()
        cfg.model.data_preprocessor.size = (96, 96)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model).train()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    before = {parameter_name: parameter.detach().clone() for parameter_name, parameter in model.named_parameters()}

    loss, log_vars = model.parse_losses(model(**model.data_preprocessor(batch, training=True), mode='loss'))
    optim_wrapper.backward(loss)
    assert torch.isfinite(loss), log_vars
    assert [parameter_name for parameter_name, parameter in model.named_parameters() if parameter.grad is None] == []

    optim_wrapper.step()
    for parameter_name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), parameter_name
        # Biases of keys have no gradient but rounding.
        assert parameter.dim() == 1 or not torch.equal(parameter, before[parameter_name]), parameter_name
