_base_ = './inline_pvt_semfpn.py'

model = dict(backbone=dict(arch='large', init_cfg=dict(checkpoint='checkpoints/inline_pvt_large.pth')))
