"""The attention op on padded batches: what lies outside an image's valid area does not exist."""
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mminline.ops import aten, inline_attention

HW_SHAPE = (9, 13)
VALID_HW = [(9, 13), (9, 6), (4, 13), (5, 7), (1, 1)]  # whole, narrower, lower, both, one token
CHANNELS, HEADS = 24, 3


def make_inputs(prefix, dtype=torch.float64):
    """Return q, k, v, local_weight and the gradient of the output."""
    generator = torch.Generator().manual_seed(prefix)
    tokens = (len(VALID_HW), prefix + HW_SHAPE[0] * HW_SHAPE[1], CHANNELS)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in (tokens, tokens, tokens, (len(VALID_HW), CHANNELS, 3, 3), tokens)]


def crop(x, valid, prefix):
    """Return the valid tokens of (1, N, C) alone."""
    area = x[:, prefix:].unflatten(1, HW_SHAPE)[:, :valid[0], :valid[1]]
    return torch.cat([x[:, :prefix], area.flatten(1, 2)], dim=1)


def padding(x, image, prefix):
    """Return a mask of the tokens of ``x`` that are not valid."""
    mask = torch.ones(HW_SHAPE, dtype=torch.bool)
    mask[:VALID_HW[image][0], :VALID_HW[image][1]] = False
    return torch.cat([torch.zeros(prefix, dtype=torch.bool), mask.flatten()])


@pytest.mark.parametrize('backend', ['aten', 'reference'])
@pytest.mark.parametrize('center', [True, False], ids=['centred', 'uncentred'])
@pytest.mark.parametrize('local', [True, False], ids=['local', 'global_only'])
@pytest.mark.parametrize('prefix', [0, 2])
def test_each_image_is_as_alone(prefix, local, center, backend, monkeypatch):
    monkeypatch.setattr(aten, 'STATISTICS_CHUNK', 3 * 13 * CHANNELS)
    monkeypatch.setattr(aten, 'OUTPUT_CHUNK', 2 * 13 * CHANNELS)
    *inputs, grad = make_inputs(prefix)
    inputs = [x.requires_grad_() for x in (inputs if local else inputs[:3])]
    out = inline_attention(*inputs[:3], HEADS, local_weight=inputs[3] if local else None, hw_shape=HW_SHAPE,
                           valid_hw=VALID_HW, num_prefix_tokens=prefix, center=center, backend=backend)
    grads = torch.autograd.grad(out, inputs, grad)
    for image, valid in enumerate(VALID_HW):
        alone = [crop(x[image:image + 1].detach(), valid, prefix).requires_grad_() for x in inputs[:3]]
        weight = [x[image:image + 1].detach().requires_grad_() for x in inputs[3:]]
        expected = inline_attention(*alone, HEADS, local_weight=weight[0] if local else None, hw_shape=valid,
                                    num_prefix_tokens=prefix, center=center, backend='reference')
        torch.testing.assert_close(crop(out[image:image + 1], valid, prefix), expected, rtol=1e-12, atol=1e-13)
        expected_grads = torch.autograd.grad(expected, [*alone, *weight], crop(grad[image:image + 1], valid, prefix))
        for value, expected_value in zip(grads[:3], expected_grads):
            torch.testing.assert_close(crop(value[image:image + 1], valid, prefix), expected_value, rtol=1e-11,
                                       atol=1e-12)
        if local:
            torch.testing.assert_close(grads[3][image:image + 1], expected_grads[3], rtol=1e-11, atol=1e-12)
        for value in (out, *grads[:3]):
            assert not value[image, padding(value, image, prefix)].any()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_padding_may_hold_anything(dtype):
    *inputs, grad = make_inputs(1, dtype)

    def run():
        q, k, v, weight = (x.clone().requires_grad_() for x in inputs)
        out = inline_attention(q, k, v, HEADS, local_weight=weight, hw_shape=HW_SHAPE, valid_hw=VALID_HW,
                               num_prefix_tokens=1)
        return [out, *torch.autograd.grad(out, (q, k, v, weight), grad)]

    expected = run()
    for x, value in zip((*inputs[:3], grad), (float('nan'), float('inf'), 1e30, float('nan'))):
        for image in range(len(x)):
            x[image, padding(x, image, 1)] = value
    assert all(torch.equal(*pair) for pair in zip(run(), expected))


def test_gradcheck_and_opcheck():
    *inputs, _ = (x[1:4].requires_grad_() for x in make_inputs(1))
    inputs = [x.detach().requires_grad_() for x in inputs]

    def attend(q, k, v, weight):
        return inline_attention(q, k, v, HEADS, local_weight=weight, hw_shape=HW_SHAPE, valid_hw=VALID_HW[1:4],
                                num_prefix_tokens=1)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    flat = [size for valid in VALID_HW[1:4] for size in valid]
    torch.library.opcheck(torch.ops.mminline.inline_attention.default,
                          (*inputs, HEADS, 0.5, HW_SHAPE, 1, True, flat, 'aten'))


def test_nothing_padded_is_the_plain_call():
    q, k, v, weight, _ = make_inputs(0, torch.float32)
    settings = dict(num_heads=HEADS, local_weight=weight, hw_shape=HW_SHAPE)
    out = inline_attention(q, k, v, **settings, valid_hw=[HW_SHAPE] * len(q))
    assert torch.equal(out, inline_attention(q, k, v, **settings))


def test_flops_are_those_of_the_valid_area():
    q, k, v, weight, _ = make_inputs(1, torch.float32)
    with FlopCounterMode(display=False) as counter:
        inline_attention(q, k, v, HEADS, local_weight=weight, hw_shape=HW_SHAPE, valid_hw=VALID_HW,
                         num_prefix_tokens=1)
    tokens = sum(rows * columns for rows, columns in VALID_HW)
    head_dim = CHANNELS // HEADS
    expected = 4 * (tokens + len(VALID_HW)) * CHANNELS * head_dim + 18 * tokens * CHANNELS
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize('valid_hw, hw_shape, message', [
    ([(9, 13)], HW_SHAPE, 'one .rows, columns. for each of 5 images'),
    ([(9, 13)] * 4 + [(10, 13)], HW_SHAPE, r'got \(10, 13\)'),
    ([(9, 13)] * 4 + [(0, 13)], HW_SHAPE, r'got \(0, 13\)'),
    ([(9, 13)] * 4 + [(9, 13, 1)], HW_SHAPE, r'got \(9, 13, 1\)'),
    (VALID_HW, None, 'valid_hw needs hw_shape'),
])
def test_malformed_valid_hw(valid_hw, hw_shape, message):
    q, k, v, _, _ = make_inputs(0, torch.float32)
    with pytest.raises(ValueError, match=message):
        inline_attention(q, k, v, HEADS, hw_shape=hw_shape, valid_hw=valid_hw)
