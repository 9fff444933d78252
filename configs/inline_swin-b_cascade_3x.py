_base_ = './inline_swin_cascade_3x.py'

model = dict(
    backbone=dict(
        arch='base',
        drop_path_rate=0.4,
        init_cfg=dict(checkpoint='checkpoints/inline_swin_base.pth')),
    neck=dict(in_channels=[128, 256, 512, 1024]))
