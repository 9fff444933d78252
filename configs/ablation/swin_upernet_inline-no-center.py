_base_ = '../demo/inline_swin_upernet_shapes.py'

model = dict(backbone=dict(center=False))
