# Swin's recipe for COCO: 12 epochs with AdamW, no weight decay on norms and on tables of positions. 16 images per
# step, as 8 GPUs x 2: with another number, train with --auto-scale-lr.
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.,
        custom_keys={
            'relative_position_bias_table': dict(decay_mult=0.),
            'pos_embed': dict(decay_mult=0.),
            'cls_token': dict(decay_mult=0.),
        }))
