_base_ = './inline_pvt_retinanet.py'

model = dict(
    backbone=dict(
        arch='large',
        drop_path_rate=0.3,
        init_cfg=dict(checkpoint='checkpoints/inline_pvt_large.pth')))
