"""Started by test_distributed.py in two gloo processes: a backbone's gradients are those of one process.

Each process computes them for the whole batch by itself, and for its half of the batch under
DistributedDataParallel. The first one writes a JSON object to the file it is given: relative error by case.
"""
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mminline.models import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin

PYRAMID = dict(embed_dims=(16, 32, 32, 32), num_heads=(1, 2, 2, 2), depths=(1, 1, 1, 1))
BACKBONES = {
    'pvt': lambda **options: InLinePVT(dict(PYRAMID, mlp_ratios=(2, 2, 2, 2)), **options),
    'swin': lambda **options: InLineSwin(
        dict(PYRAMID, attn_types=('inline', 'inline', 'inline', 'softmax')), **options),
    'cswin': lambda **options: InLineCSwin(
        dict(PYRAMID, attn_types=('inline', 'inline', 'softmax', 'softmax')), **options),
    'deit': lambda **options: InLineDeiT(
        dict(embed_dims=32, num_heads=2, depth=4, pretrain_img_size=64), out_indices=(0, 1, 2, 3), **options),
}
CASES = [(family, dict(frozen_stages=frozen_stages, with_cp=with_cp)) for family in BACKBONES
         for frozen_stages in (-1, 0, 1, 2, 3, 4) for with_cp in (False, True)]


def gradients(model, images, targets):
    """Gradients of all trained parameters, as one vector, for a loss that is a mean over the batch."""
    model.zero_grad(set_to_none=True)
    maps = model(images)
    sum((x * target).mean() for x, target in zip(maps, targets) if x.requires_grad).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    without = [name for name, grad in grads.items() if grad is None]
    assert not without, f'no gradient for {without}'
    return torch.cat([grad.flatten() for grad in grads.values()])


def main():
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    errors = {}
    for family, options in CASES:
        torch.manual_seed(0)
        backbone = BACKBONES[family](drop_path_rate=0.0, **options).double().train()
        if not any(parameter.requires_grad for parameter in backbone.parameters()):
            continue  # there is nothing to be trained, which DistributedDataParallel refuses
        images = torch.randn(4, 3, 64, 96, dtype=torch.float64)
        with torch.no_grad():
            targets = [torch.randn_like(x) for x in backbone(images)]
        expected = gradients(backbone, images, targets)
        half = slice(2 * rank, 2 * rank + 2)
        found = gradients(DistributedDataParallel(backbone), images[half], [target[half] for target in targets])
        case = ', '.join([family, *(f'{name}={value}' for name, value in options.items())])
        errors[case] = float((found - expected).norm() / expected.norm())
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
