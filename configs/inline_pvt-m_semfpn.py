_base_ = './inline_pvt_semfpn.py'

model = dict(
    backbone=dict(
        arch='medium',
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='checkpoints/inline_pvt_medium.pth')))
