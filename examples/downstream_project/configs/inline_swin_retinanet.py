# RetinaNet with a narrow InLine-Swin and this project's neck, on the synthetic shapes of mminline.
_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    'mmdet::_base_/schedules/schedule_1x.py',
    'mmdet::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mminline', 'my_project'])

model = dict(
    data_preprocessor=dict(type='mminline.DetDataPreprocessor'),
    backbone=dict(
        _delete_=True,
        type='mminline.InLineSwin',
        arch=dict(
            embed_dims=(32, 64, 128, 192),
            num_heads=(2, 4, 8, 12),
            depths=(2, 2, 2, 2),
            attn_types=('inline', 'inline', 'inline', 'softmax')),
        out_indices=(1, 2, 3)),
    neck=dict(type='my_project.ContextFPN', in_channels=[64, 128, 192], out_channels=64, start_level=0),
    bbox_head=dict(in_channels=64, feat_channels=64, stacked_convs=2, num_classes=3))

data_root = 'data/shapes/coco/'
metainfo = dict(classes=('circle', 'square', 'triangle'))
scale = (176, 144)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))
]
train_dataloader = dict(batch_size=4, dataset=dict(
    data_root=data_root, metainfo=metainfo, ann_file='annotations/train.json', data_prefix=dict(img='train/'),
    pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(
    data_root=data_root, metainfo=metainfo, ann_file='annotations/val.json', data_prefix=dict(img='val/'),
    pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator

optim_wrapper = dict(
    _delete_=True,
    constructor='mminline.LayerDecayOptimWrapperConstructor',
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(decay_rate=0.9, norm_decay_mult=0.))
