# Mask R-CNN with InLine-CSwin-T on COCO, 1x. Ours, not trained: there is no published recipe, this is Swin's.
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
        type='mminline.InLineCSwin',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/inline_cswin_tiny.pth')),
    neck=dict(in_channels=[64, 128, 256, 512]))

custom_hooks = [dict(type='NumClassCheckHook')]
