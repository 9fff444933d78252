# A narrow Mask R-CNN with InLine-PVT: learns the synthetic shapes (tools/make_shapes.py) on a CPU in minutes.
_base_ = '../inline_pvt_maskrcnn.py'

norm_cfg = dict(type='GN', num_groups=8)  # what starts from nothing learns faster with norms in neck and heads

# ---- model: narrow backbone and heads, anchors for objects of 16 to 64 pixels ----------------------------
model = dict(
    backbone=dict(
        arch=dict(
            _delete_=True,
            embed_dims=(32, 64, 128, 192),
            num_heads=(1, 2, 4, 6),
            depths=(2, 2, 2, 2),
            mlp_ratios=(4, 4, 4, 4)),
        drop_path_rate=0.0,
        # For so narrow layers the authors' deviation of 0.02 is a slow start.
        init_cfg=dict(_delete_=True, type='Xavier', layer='Linear')),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=64, norm_cfg=norm_cfg),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        # One sample a bin: mmcv's RoIAlign runs on one core, and small objects have small bins.
        bbox_roi_extractor=dict(out_channels=64, roi_layer=dict(sampling_ratio=1)),
        bbox_head=dict(
            type='ConvFCBBoxHead', num_shared_convs=2, num_shared_fcs=1, in_channels=64, conv_out_channels=64,
            fc_out_channels=256, num_classes=3, reg_class_agnostic=True, norm_cfg=norm_cfg),
        mask_roi_extractor=dict(out_channels=64, roi_layer=dict(sampling_ratio=1)),
        mask_head=dict(num_convs=2, in_channels=64, conv_out_channels=64, num_classes=3, norm_cfg=norm_cfg)),
    train_cfg=dict(rpn_proposal=dict(nms_pre=500, max_per_img=200), rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(nms_pre=500, max_per_img=200)))

# ---- data ------------------------------------------------------------------------------------------------
data_root = 'data/shapes/coco/'
metainfo = dict(
    classes=('circle', 'square', 'triangle'), palette=[(220, 80, 70), (70, 170, 90), (80, 120, 220)])
scale = (176, 144)  # the longest and the shortest side at most

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs',
         meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))
]
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    dataset=dict(
        metainfo=metainfo,
        data_root=data_root,
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline))
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        metainfo=metainfo,
        data_root=data_root,
        ann_file='annotations/val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator

# ---- schedule: 13 epochs, about 1240 iterations ----------------------------------------------------------
train_cfg = dict(max_epochs=13, val_interval=3)
optim_wrapper = dict(optimizer=dict(lr=1e-3, fused=True))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.03, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=13, T_max=13, convert_to_iter_based=True)
]
auto_scale_lr = dict(base_batch_size=4)

default_hooks = dict(logger=dict(interval=20), checkpoint=dict(max_keep_ckpts=2))
randomness = dict(seed=0)
