# Mask R-CNN with InLine-Swin-T on COCO, 1x, multi-scale training with crops.
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    './_base_/datasets/coco_instance_ms-crop.py',
    './_base_/schedules/swin_1x.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mminline'])
default_hooks = dict(checkpoint=dict(type='mminline.SafeCheckpointHook'))

model = dict(
    data_preprocessor=dict(type='mminline.DetDataPreprocessor'),
    backbone=dict(
        _delete_=True,
        type='mminline.InLineSwin',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/inline_swin_tiny.pth')),
    neck=dict(in_channels=[96, 192, 384, 768]))

custom_hooks = [dict(type='NumClassCheckHook')]
