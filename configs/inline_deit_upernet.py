# UperNet with InLine-DeiT-T on ADE20K, 160k iterations on crops of 512x512. Ours, not trained: there is no
# published recipe, this is Swin's.
_base_ = [
    'mmseg::_base_/models/upernet_swin.py',
    'mmseg::_base_/datasets/ade20k.py',
    './_base_/schedules/swin_160k.py',
    'mmseg::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mminline'])
default_hooks = dict(checkpoint=dict(type='mminline.SafeCheckpointHook'))

model = dict(
    data_preprocessor=dict(
        type='mminline.SegDataPreprocessor', size=(512, 512), test_cfg=dict(size_divisor=32), stride=16),
    backbone=dict(
        _delete_=True,
        type='mminline.InLineDeiT',
        arch='tiny',
        drop_path_rate=0.3,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/inline_deit_tiny.pth')),
    neck=dict(type='mminline.SimplePyramid', in_channels=192, out_channels=256),
    decode_head=dict(in_channels=[256, 256, 256, 256], num_classes=150),
    auxiliary_head=dict(in_channels=256, num_classes=150))

train_dataloader = dict(batch_size=2)
