_base_ = './inline_pvt_maskrcnn.py'

model = dict(
    backbone=dict(
        arch='medium',
        drop_path_rate=0.1,
        init_cfg=dict(checkpoint='checkpoints/inline_pvt_medium.pth')))
