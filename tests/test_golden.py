"""Features and input gradients against tensors from the authors' public code (tests/data)."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mminline.models import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin

from .data.fill import image, value_of

DATA = Path(__file__).parent / 'data'
OFFICIAL_KEYS = json.loads((DATA / 'official_keys.json').read_text())
FAMILIES = dict(pvt=InLinePVT, swin=InLineSwin, cswin=InLineCSwin, deit=InLineDeiT)
GOLDEN = ['pvt_tiny_1x224x224', 'pvt_tiny_2x64x96', 'pvt_small_1x96x64', 'swin_tiny_1x224x224',
          'cswin_tiny_1x224x224', 'deit_tiny_1x224x224']


def build(model: str) -> nn.Module:
    """Return a backbone by its name in official_keys.json, such as 'pvt_tiny' or 'swin_base_384'."""
    family, arch, *pretrain_size = model.split('_')
    return FAMILIES[family](arch, **(dict(window_size=12) if pretrain_size else {}))


def official_parameters(backbone: nn.Module) -> dict:
    """Return the parameters by the official names, without the norms that only dense prediction has."""
    ours = {own: official for official, own in backbone.official_names().items()}
    return {ours.get(name, name): value for name, value in backbone.named_parameters()
            if name.split('.')[0] not in ('norm0', 'norm1', 'norm2')}


def fill(backbone: nn.Module) -> nn.Module:
    """Give every parameter the value that the golden run used for its name and shape."""
    with torch.no_grad():
        for name, parameter in official_parameters(backbone).items():
            parameter.copy_(value_of(name, parameter.shape))
    return backbone.eval()


@pytest.mark.parametrize('name', GOLDEN)
def test_features_and_gradients(name):
    golden = np.load(DATA / f'{name}.npz')
    model, size = name.rsplit('_', 1)
    x = image(*map(int, size.split('x'))).requires_grad_()
    maps = fill(build(model))(x)
    loss = 0
    for index, feature in enumerate(maps):
        assert tuple(golden[f'shape{index}']) == feature.shape
        sample = feature.detach().flatten()[torch.from_numpy(golden[f'index{index}'])].numpy()
        expected = golden[f'value{index}']
        assert np.linalg.norm(sample - expected) <= 1e-5 * np.linalg.norm(expected), f'map {index}'
        weight = np.random.default_rng(100 + index).standard_normal(tuple(feature.shape)).astype(np.float32)
        loss = loss + (feature * torch.from_numpy(weight)).sum() / feature.numel() ** 0.5
    loss.backward()
    sample = x.grad.flatten()[torch.from_numpy(golden['grad_index'])].numpy()
    expected = golden['grad_value']
    assert np.linalg.norm(sample - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize('model', OFFICIAL_KEYS)
def test_parameters_are_the_official_ones(model):
    own = {name: list(value.shape) for name, value in official_parameters(build(model)).items()}
    buffers = ('relative_position_index', 'attn_mask')
    official = {name: shape for name, shape in OFFICIAL_KEYS[model].items()
                if not name.startswith('head.') and not name.endswith(buffers)}
    assert own == official
