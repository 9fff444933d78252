"""The attention op against the paper's equation, in every way it can be called."""
import numpy as np
import pytest
import torch

from mminline.ops import inline_attention

# (batch, map, prefix tokens, channels, heads): odd lengths, non-square maps, one token.
PROBLEMS = {
    'one_token': (1, (1, 1), 0, 16, 1),
    'one_row': (2, (1, 63), 0, 32, 2),
    'wide': (2, (5, 25), 0, 64, 2),
    'tall_prefix': (3, (19, 8), 1, 48, 2),
    'chunks': (1, (61, 47), 2, 24, 1),
    'many_heads': (2, (7, 9), 0, 160, 10),
}


def make_inputs(problem, dtype=torch.float64, requires_grad=False):
    batch, hw_shape, prefix, channels, heads = PROBLEMS[problem]
    generator = torch.Generator().manual_seed(len(problem))
    shapes = [(batch, prefix + hw_shape[0] * hw_shape[1], channels)] * 3 + [(batch, channels, 3, 3)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    for x in inputs:
        x.requires_grad_(requires_grad)
    return inputs, dict(num_heads=heads, hw_shape=hw_shape, num_prefix_tokens=prefix)


def relative_error(out, reference):
    out, reference = out.detach().double(), reference.detach().double()
    return float((out - reference).norm() / reference.norm().clamp_min(1e-300))


@pytest.mark.parametrize('problem', PROBLEMS)
@pytest.mark.parametrize('local', [True, False], ids=['local', 'global_only'])
@pytest.mark.parametrize('center', [True, False], ids=['centred', 'uncentred'])
def test_matches_the_paper_in_float64(problem, local, center):
    (*qkv, weight), settings = make_inputs(problem, requires_grad=True)
    inputs = qkv + [weight] if local else qkv
    weight = weight if local else None
    out = inline_attention(*qkv, local_weight=weight, center=center, **settings)
    reference = inline_attention(*qkv, local_weight=weight, center=center, backend='reference', **settings)
    assert relative_error(out, reference) < 1e-12
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    grads = torch.autograd.grad(out, inputs, grad_out)
    references = torch.autograd.grad(reference, inputs, grad_out)
    for name, grad, expected in zip(('q', 'k', 'v', 'local_weight'), grads, references):
        if problem == 'one_token' and name in ('q', 'k') and center:
            assert grad.abs().max() < 1e-15, name  # a token centred on itself
        else:
            assert relative_error(grad, expected) < 1e-12, name


def test_equals_the_sum_over_tokens_written_in_numpy():
    (q, k, v, weight), settings = make_inputs('tall_prefix')
    height, width = settings['hw_shape']
    heads, prefix = settings['num_heads'], settings['num_prefix_tokens']
    out = inline_attention(q, k, v, local_weight=weight, scale=0.3, **settings)
    image, token, channel = 1, prefix + 3 * width + 7, 29  # the right border of the map
    head_dim = q.shape[2] // heads
    own = slice(channel // head_dim * head_dim, channel // head_dim * head_dim + head_dim)
    scores = 0.3 * (k[image, :, own] @ q[image, token, own]).numpy()
    weights = (scores - scores.mean() + 1) / len(scores)
    expected = float(weights @ v[image, :, channel].numpy())
    values = v[image, prefix:, channel].numpy().reshape(height, width)
    padded = np.pad(values, 1)
    expected += float((padded[3:6, 7:10] * weight[image, channel].numpy()).sum())
    assert float(out[image, token, channel]) == pytest.approx(expected, rel=1e-12)


def test_gradcheck():
    (q, k, v, weight), settings = make_inputs('wide', requires_grad=True)

    def attend(q, k, v, weight):
        return inline_attention(q, k, v, local_weight=weight, num_heads=2, hw_shape=(3, 4), num_prefix_tokens=1)

    inputs = [x[:, :13, :8].detach().requires_grad_() for x in (q, k, v)]
    inputs.append(weight[:, :8].detach().requires_grad_())
    assert torch.autograd.gradcheck(attend, inputs)


def test_opcheck():
    (q, k, v, weight), settings = make_inputs('tall_prefix', torch.float32, requires_grad=True)
    joined = torch.cat([q, k, v], -1).detach().requires_grad_()
    arguments = (*joined.chunk(3, -1), weight, 2, 0.5, settings['hw_shape'], 1, True, None, 'aten')
    torch.library.opcheck(torch.ops.mminline.inline_attention.default, arguments)


def test_slices_of_one_projection():
    (q, k, v, weight), settings = make_inputs('wide')
    joined = torch.cat([q, k, v], -1).requires_grad_()
    out = inline_attention(*joined.chunk(3, -1), local_weight=weight, **settings)
    expected = inline_attention(q, k, v, local_weight=weight, **settings)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert torch.isfinite(joined.grad).all()


def shifted_inputs(tokens=60_000, channels=64, sigmas=30.0):
    """Correlated k and v (v = k + noise / 2), both moved by ``sigmas`` standard deviations."""
    generator = torch.Generator().manual_seed(0)
    q, k, noise = (torch.randn(1, tokens, channels, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k + sigmas, k + noise / 2 + sigmas


def test_survives_a_mean_far_from_zero():
    qkv = [x.float() for x in shifted_inputs()]
    out = inline_attention(*qkv, num_heads=2).double()
    reference = inline_attention(*(x.double() for x in qkv), num_heads=2)
    deviation = reference - reference.mean(1, keepdim=True)
    assert float((out - reference).norm() / deviation.norm()) < 2e-4


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
def test_output_keeps_the_type(dtype):
    (q, k, v, weight), settings = make_inputs('wide', dtype, requires_grad=True)
    out = inline_attention(q, k, v, local_weight=weight, **settings)
    out.float().square().mean().backward()
    assert out.dtype == dtype
    assert {x.grad.dtype for x in (q, k, v, weight)} == {dtype}


def test_autocast_casts_inputs_and_keeps_float32_statistics():
    (q, k, v, weight), settings = make_inputs('wide', torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        out = inline_attention(q, k, v, local_weight=weight, **settings)
    rounded = [x.bfloat16() for x in (q, k, v, weight)]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, inline_attention(*rounded[:3], local_weight=rounded[3], **settings))


def call(**changes):
    (q, k, v, weight), settings = make_inputs('wide', torch.float32)
    arguments = dict(q=q, k=k, v=v, local_weight=weight, **settings)
    arguments.update(changes)
    return inline_attention(**arguments)


@pytest.mark.parametrize('changes, message', [
    (dict(q=torch.zeros(2, 3)), r'one shape \(B, N, C\), got \(2, 3\)'),
    (dict(k=torch.zeros(2, 124, 64)), r'\(2, 125, 64\), \(2, 124, 64\)'),
    (dict(v=torch.zeros(2, 125, 64).double()), 'one floating point type'),
    (dict(num_heads=0), 'num_heads must divide the 64 channels, got 0'),
    (dict(num_heads=7), 'num_heads must divide the 64 channels, got 7'),
    (dict(hw_shape=None), r'local_weight needs hw_shape=\(H, W\)'),
    (dict(hw_shape=(25, 6)), r'hw_shape \(25, 6\) and 0 prefix tokens do not make 125 tokens'),
    (dict(num_prefix_tokens=-1), 'must not be negative, got -1'),
    (dict(local_weight=torch.zeros(2, 64, 5, 5)), r'must be \(2, 64, 3, 3\), got \(2, 64, 5, 5\)'),
    (dict(backend='fast'), "got 'fast'"),
])
def test_malformed_input_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_empty_map_is_refused():
    empty = torch.zeros(1, 0, 8)
    with pytest.raises(ValueError, match='at least one token'):
        inline_attention(empty, empty, empty, num_heads=1)
