# COCO with the augmentation of DETR, which Swin trains with: the shortest side at random, half of the images
# cropped before.
_base_ = 'mmdet::_base_/datasets/coco_instance.py'

resize = dict(
    type='RandomChoiceResize', scales=[(short, 1333) for short in range(480, 801, 32)], keep_ratio=True)
resize_and_crop = [
    dict(type='RandomChoiceResize', scales=[(400, 1333), (500, 1333), (600, 1333)], keep_ratio=True),
    dict(type='RandomCrop', crop_type='absolute_range', crop_size=(384, 600), allow_negative_crop=True),
]
train_pipeline = [
    dict(type='LoadImageFromFile', backend_args={{_base_.backend_args}}),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomChoice', transforms=[[resize], [*resize_and_crop, resize]]),
    dict(type='PackDetInputs')
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
