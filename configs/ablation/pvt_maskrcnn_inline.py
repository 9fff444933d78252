_base_ = '../demo/inline_pvt_maskrcnn_shapes.py'

model = dict(backbone=dict(attn_types=('inline',) * 4))
