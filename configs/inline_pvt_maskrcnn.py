# Mask R-CNN with InLine-PVT-T on COCO, 1x. 16 images per step, as 8 GPUs x 2: with another number, train with
# --auto-scale-lr. Normalisation is that of the bases and of pre-training: ImageNet's mean and std, on RGB.
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mminline'])
default_hooks = dict(checkpoint=dict(type='mminline.SafeCheckpointHook'))

model = dict(
    data_preprocessor=dict(type='mminline.DetDataPreprocessor'),
    backbone=dict(
        _delete_=True,
        type='mminline.InLinePVT',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/inline_pvt_tiny.pth')),
    neck=dict(in_channels=[64, 128, 320, 512]))

optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=2e-4, weight_decay=1e-4))
auto_scale_lr = dict(base_batch_size=16)

# Says so when the heads' num_classes and the data set's classes differ.
custom_hooks = [dict(type='NumClassCheckHook')]
