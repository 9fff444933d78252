_base_ = './inline_swin_cascade_3x.py'

model = dict(backbone=dict(arch='small', init_cfg=dict(checkpoint='checkpoints/inline_swin_small.pth')))
