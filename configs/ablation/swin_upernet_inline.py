_base_ = '../demo/inline_swin_upernet_shapes.py'

model = dict(backbone=dict(attn_types=('inline', 'inline', 'inline', 'softmax')))
