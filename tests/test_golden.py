"""Features and input gradients against tensors from the authors' public code (tests/data)."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mminline.models import InLinePVT

from .data.fill import image, value_of

DATA = Path(__file__).parent / 'data'
OFFICIAL_KEYS = json.loads((DATA / 'official_keys.json').read_text())
GOLDEN = {
    'pvt_tiny_1x224x224': lambda: InLinePVT('tiny'),
    'pvt_tiny_2x64x96': lambda: InLinePVT('tiny'),
    'pvt_small_1x96x64': lambda: InLinePVT('small'),
}


def fill(backbone: nn.Module) -> nn.Module:
    """Give every parameter the value that the golden run used for its name and shape."""
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            parameter.copy_(value_of(name, parameter.shape))
    return backbone.eval()


@pytest.mark.parametrize('name', GOLDEN)
def test_features_and_gradients(name):
    golden = np.load(DATA / f'{name}.npz')
    batch, height, width = map(int, name.split('_')[-1].split('x'))
    x = image(batch, height, width).requires_grad_()
    maps = fill(GOLDEN[name]())(x)
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


@pytest.mark.parametrize('family, arch', [(InLinePVT, arch) for arch in ('tiny', 'small', 'medium', 'large')])
def test_parameters_are_the_official_ones(family, arch):
    name = f'{family.__name__.removeprefix("InLine").lower()}_{arch}'
    own = {key: list(value.shape) for key, value in family(arch).named_parameters()}
    official = {key: shape for key, shape in OFFICIAL_KEYS[name].items() if not key.startswith('head.')}
    assert own == official
