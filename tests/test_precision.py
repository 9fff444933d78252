"""How exact the op is over 65,536 tokens: in every type, with inputs scaled up and with means far from zero.

Held against float64. A unit of input rounding is the error, in float64, that rounding the inputs to the type makes; the
correctly rounded result is the float64 result of the rounded inputs, rounded to the type.
"""
import functools

import pytest
import torch

from mminline.analysis.benchmark import authors_formula
from mminline.analysis.measure import relative_error
from mminline.ops import inline_attention

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
HW_SHAPE, CHANNELS, NUM_HEADS = (256, 256), 32, 2
GRADIENTS = ('dq', 'dk', 'dv', 'dlocal_weight')
CASES = {
    'as_is': lambda x: x,
    'times_10': lambda x: 10 * x,
    'times_50': lambda x: 50 * x,
    'shifted_30_sigma': lambda x: x + 30,
}
CHANGED = [case for case in CASES if case != 'as_is']
HALF_TYPES = [torch.bfloat16, torch.float16]


def make_inputs(case):
    """Return q, k, v and local_weight in float64; k and v go together a little, as in a trained model."""
    generator = torch.Generator().manual_seed(0)
    q, k, noise = torch.randn(3, 1, HW_SHAPE[0] * HW_SHAPE[1], CHANNELS, generator=generator, dtype=torch.float64)
    local_weight = torch.randn(1, CHANNELS, 3, 3, generator=generator, dtype=torch.float64) / 3
    change = CASES[case]
    return [x.to(DEVICE) for x in (change(q), change(k), change(noise + k / 20), local_weight)]


def attend(q, k, v, local_weight):
    return inline_attention(q, k, v, NUM_HEADS, local_weight=local_weight, hw_shape=HW_SHAPE)


@functools.cache
def exact(case, rounded_to=torch.float64):
    """Return the float64 result of inputs that were rounded to a type."""
    return attend(*(x.to(rounded_to).double() for x in make_inputs(case)))


def centred_error(out, expected):
    """Return the error relative to how far the expected tokens are from their mean."""
    return float((out.double() - expected).norm() / (expected - expected.mean(dim=1, keepdim=True)).norm())


def formula(q, k, v, local_weight):
    return authors_formula(q, k, v, NUM_HEADS, local_weight, HW_SHAPE)


def test_float64_is_what_the_formula_gives():
    assert relative_error(exact('as_is'), formula(*make_inputs('as_is'))) < 1e-12


@pytest.mark.parametrize('case', CASES)
def test_float32(case):
    inputs = [x.float() for x in make_inputs(case)]
    expected = exact(case, torch.float32)
    assert relative_error(attend(*inputs), expected) <= max(2e-6, relative_error(formula(*inputs), expected))


@pytest.mark.parametrize('local', [True, False], ids=['local', 'global_only'])
def test_float32_of_shifted_input_keeps_what_differs_between_tokens(local):
    q, k, v, local_weight = (x.float() for x in make_inputs('shifted_30_sigma'))
    inputs = [q, k, v, local_weight if local else None]
    expected = attend(*(None if x is None else x.double() for x in inputs))
    assert centred_error(attend(*inputs), expected) <= 2e-4
    if local:  # why the op is not computed by the formula
        assert centred_error(formula(*inputs), expected) > 2e-4


@pytest.mark.parametrize('dtype', HALF_TYPES, ids=str)
def test_half_types_are_within_two_units_of_input_rounding(dtype):
    inputs = [x.to(dtype) for x in make_inputs('as_is')]
    expected = exact('as_is')
    unit = relative_error(exact('as_is', dtype), expected)
    assert relative_error(attend(*inputs), expected) <= 2 * unit


@pytest.mark.parametrize('dtype', HALF_TYPES, ids=str)
@pytest.mark.parametrize('case', CHANGED)
def test_half_types_round_once(case, dtype):
    inputs = [x.to(dtype) for x in make_inputs(case)]
    expected = exact(case, dtype)
    correctly_rounded = expected.to(dtype)
    assert correctly_rounded.isfinite().all()
    assert relative_error(attend(*inputs), expected) <= 1.2 * relative_error(correctly_rounded, expected)


def gradients(method, inputs, grad, dtype):
    inputs = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    return dict(zip(GRADIENTS, torch.autograd.grad(method(*inputs), inputs, grad.to(dtype))))


@pytest.mark.parametrize('case', ['as_is', 'shifted_30_sigma'])
@pytest.mark.parametrize('dtype', [torch.float32, *HALF_TYPES], ids=str)
def test_gradients(dtype, case):
    inputs = [x.to(dtype) for x in make_inputs(case)]
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    expected = gradients(attend, inputs, grad, torch.float64)
    if dtype == torch.float32:
        # The gradient of the 3x3 kernels is a library's convolution in both: it differs by chance alone.
        of_formula = gradients(formula, inputs, grad, dtype)
        bounds = {name: max(2e-6, 1.5 * relative_error(of_formula[name], expected[name])) for name in GRADIENTS}
    else:
        bounds = {name: 1.2 * relative_error(expected[name].to(dtype), expected[name]) for name in GRADIENTS}
    for name, gradient in gradients(attend, inputs, grad, dtype).items():
        assert relative_error(gradient, expected[name]) <= bounds[name], name
