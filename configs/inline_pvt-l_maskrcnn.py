_base_ = './inline_pvt_maskrcnn.py'

model = dict(
    backbone=dict(
        arch='large',
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='checkpoints/inline_pvt_large.pth')))
