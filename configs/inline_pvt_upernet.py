# UperNet with InLine-PVT-T on ADE20K, 160k iterations on crops of 512x512. Ours, not trained: there is no
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
        type='mminline.SegDataPreprocessor', size=(512, 512), test_cfg=dict(size_divisor=32)),
    backbone=dict(
        _delete_=True,
        type='mminline.InLinePVT',
        arch='tiny',
        drop_path_rate=0.3,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/inline_pvt_tiny.pth')),
    decode_head=dict(in_channels=[64, 128, 320, 512], num_classes=150),
    auxiliary_head=dict(in_channels=320, num_classes=150))

train_dataloader = dict(batch_size=2)
