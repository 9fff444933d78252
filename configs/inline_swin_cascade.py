# Cascade Mask R-CNN with InLine-Swin-T on COCO, 1x, multi-scale training with crops. As in Swin's recipe, the box
# heads are four convolutions and a linear layer, trained with the GIoU of decoded boxes.
_base_ = [
    'mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py',
    './_base_/datasets/coco_instance_ms-crop.py',
    './_base_/schedules/swin_1x.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mminline'])
default_hooks = dict(checkpoint=dict(type='mminline.SafeCheckpointHook'))

bbox_heads = [
    dict(
        type='Shared4Conv1FCBBoxHead',
        in_channels=256,
        fc_out_channels=1024,
        roi_feat_size=7,
        num_classes=80,
        bbox_coder=dict(
            type='DeltaXYWHBBoxCoder', target_means=[0., 0., 0., 0.], target_stds=target_stds),
        reg_class_agnostic=False,
        reg_decoded_bbox=True,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
        loss_bbox=dict(type='GIoULoss', loss_weight=10.0))
    for target_stds in ([0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067])
]
model = dict(
    data_preprocessor=dict(type='mminline.DetDataPreprocessor'),
    backbone=dict(
        _delete_=True,
        type='mminline.InLineSwin',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/inline_swin_tiny.pth')),
    neck=dict(in_channels=[96, 192, 384, 768]),
    roi_head=dict(bbox_head=bbox_heads))

custom_hooks = [dict(type='NumClassCheckHook')]
