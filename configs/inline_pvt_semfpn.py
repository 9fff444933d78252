# Semantic FPN with InLine-PVT-T on ADE20K, 40k iterations on crops of 512x512. 16 images per step, as 8 GPUs x 2:
# with another number, train with --auto-scale-lr.
_base_ = [
    'mmseg::_base_/models/fpn_r50.py',
    'mmseg::_base_/datasets/ade20k.py',
    'mmseg::_base_/schedules/schedule_40k.py',
    'mmseg::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mminline'])
default_hooks = dict(checkpoint=dict(type='mminline.SafeCheckpointHook'))

model = dict(
    data_preprocessor=dict(
        type='mminline.SegDataPreprocessor', size=(512, 512), test_cfg=dict(size_divisor=32)),
    pretrained=None,
    backbone=dict(
        _delete_=True,
        type='mminline.InLinePVT',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/inline_pvt_tiny.pth')),
    neck=dict(in_channels=[64, 128, 320, 512]),
    decode_head=dict(num_classes=150))

train_dataloader = dict(batch_size=2)

optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=2e-4, weight_decay=1e-4))
# The base ends at 1e-4, which is for SGD.
param_scheduler = [dict(type='PolyLR', power=0.9, eta_min=0.0, by_epoch=False, begin=0, end=40000)]
auto_scale_lr = dict(enable=False, base_batch_size=16)
