# A narrow UperNet with InLine-Swin: learns the synthetic shapes (tools/make_shapes.py) on a CPU in minutes.
_base_ = '../inline_swin_upernet.py'

# ---- model: narrow backbone and heads, four classes ------------------------------------------------------
crop_size = (128, 128)

model = dict(
    data_preprocessor=dict(size=crop_size),
    backbone=dict(
        arch=dict(
            _delete_=True,
            embed_dims=(32, 64, 128, 192),
            num_heads=(1, 2, 4, 6),
            depths=(2, 2, 2, 2),
            attn_types=('inline', 'inline', 'inline', 'softmax')),
        drop_path_rate=0.0,
        # For so narrow layers the authors' deviation of 0.02 is a slow start.
        init_cfg=dict(_delete_=True, type='Xavier', layer='Linear')),
    decode_head=dict(in_channels=[32, 64, 128, 192], channels=64, num_classes=4, dropout_ratio=0.0),
    auxiliary_head=dict(in_channels=128, channels=64, num_classes=4, dropout_ratio=0.0))

# ---- data ------------------------------------------------------------------------------------------------
# MMSegmentation's class for ADE20K takes no other classes than its own.
dataset_type = 'BaseSegDataset'
data_root = 'data/shapes/ade'
dataset = dict(
    type=dataset_type,
    data_root=data_root,
    metainfo=dict(
        classes=('background', 'circle', 'square', 'triangle'),
        palette=[[60, 60, 60], [220, 80, 70], [70, 170, 90], [80, 120, 220]]),
    img_suffix='.jpg',
    seg_map_suffix='.png',
    reduce_zero_label=True)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomCrop', crop_size=crop_size),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs')
]
train_dataloader = dict(batch_size=4, num_workers=1, dataset=dict(pipeline=train_pipeline, **dataset))
val_dataloader = dict(num_workers=1, dataset=dict(pipeline=test_pipeline, **dataset))
test_dataloader = val_dataloader

# ---- schedule: 1500 iterations ---------------------------------------------------------------------------
train_cfg = dict(max_iters=1500, val_interval=500)
# A high rate, and what it needs: clipped gradients, and second moments that forget an outlier soon.
optim_wrapper = dict(
    optimizer=dict(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05), clip_grad=dict(max_norm=0.3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, begin=100, end=1500)
]
auto_scale_lr = dict(base_batch_size=4)

default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=500, max_keep_ckpts=2))
randomness = dict(seed=0)
