_base_ = './inline_swin_maskrcnn.py'

model = dict(backbone=dict(arch='small', init_cfg=dict(checkpoint='checkpoints/inline_swin_small.pth')))
