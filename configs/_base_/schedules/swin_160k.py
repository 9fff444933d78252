# Swin's recipe for ADE20K: 160k iterations with AdamW, no weight decay on norms and on tables of positions. 16
# images per step, as 8 GPUs x 2: with another number, train with --auto-scale-lr.
_base_ = 'mmseg::_base_/schedules/schedule_160k.py'

optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01),
    paramwise_cfg=dict(
        norm_decay_mult=0.,
        custom_keys={
            'relative_position_bias_table': dict(decay_mult=0.),
            'pos_embed': dict(decay_mult=0.),
            'cls_token': dict(decay_mult=0.),
        }))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, begin=1500, end=160000)
]
auto_scale_lr = dict(enable=False, base_batch_size=16)
