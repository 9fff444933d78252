# GroupNorm mixes an image with the padding of its batch; a norm by position does not (docs/padding.md).
_base_ = '../demo/inline_pvt_maskrcnn_shapes.py'

model = dict(neck=dict(norm_cfg=dict(_delete_=True, type='mminline.LayerNorm2d')))
