# Ours, not trained.
_base_ = './inline_pvt_upernet.py'

model = dict(backbone=dict(arch='medium', init_cfg=dict(checkpoint='checkpoints/inline_pvt_medium.pth')))
