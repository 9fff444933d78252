"""The CUDA kernels against float64: run by Triton's interpreter where there is no GPU, and compiled anyway."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mminline.ops import inline_attention
from mminline.ops.library import inline_attention_op

triton = pytest.importorskip('triton', reason='the kernels need Triton')
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and not triton.knobs.runtime.interpret:
    pytest.skip('the kernels need a GPU or TRITON_INTERPRET=1', allow_module_level=True)

from mminline.ops import cuda  # noqa: E402 (imports Triton)

DEVICE = 'cuda' if HAS_GPU else 'cpu'
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ('out', 'dq', 'dk', 'dv', 'dlocal_weight')
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason='needs a CUDA GPU')

# (batch, map, prefix tokens): lengths that no tile divides, maps that are not square.
SIZES = {
    '1': (1, (1, 1), 0),
    '7': (2, (7, 1), 0),
    '3x63': (3, (7, 9), 0),
    '777': (1, (21, 37), 0),
    '3136+1': (1, (56, 56), 1),
}


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory():
    """What a kernel forgets to write, or reads before it is written, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def interpretable_dots(monkeypatch):
    """The interpreter computes every dot in float32, and knows no name for three bfloat16 products."""
    if not HAS_GPU:
        monkeypatch.setattr(cuda, 'PRECISION_16_BIT', 'ieee')


def make_inputs(batch, hw_shape, prefix, channels, seed=0):
    """Return q, k, v, local_weight and the gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (batch, prefix + hw_shape[0] * hw_shape[1], channels)
    return [torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in (tokens, tokens, tokens, (batch, channels, 3, 3), tokens)]


def run(inputs, num_heads, hw_shape, prefix, backend='cuda', center=True, valid_hw=None):
    """Return the output and all gradients by name."""
    *inputs, grad = inputs
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    q, k, v, weight = inputs
    if backend == 'cuda':
        scale = (q.shape[-1] // num_heads) ** -0.5
        out = inline_attention_op(q, k, v, weight, num_heads, scale, hw_shape, prefix, center, valid_hw, 'cuda')[0]
    else:
        out = inline_attention(q, k, v, num_heads, local_weight=weight, hw_shape=hw_shape, num_prefix_tokens=prefix,
                               center=center, valid_hw=valid_hw and list(zip(valid_hw[::2], valid_hw[1::2])),
                               backend=backend)
    grads = torch.autograd.grad(out, [x for x in inputs if x is not None], grad)
    return dict(zip(NAMES, [out.detach(), *grads]))


def relative_error(value, reference):
    reference = reference.double()
    return float((value.cpu().double() - reference).norm() / reference.norm().clamp_min(1e-9))


def check(inputs, dtype, num_heads, hw_shape, prefix, center=True, valid_hw=None):
    """Compare with float64, name by name: fp32 to 2e-6, 16-bit types to two units of input rounding."""
    rounded = [None if x is None else x.to(dtype) for x in inputs]
    results = run([None if x is None else x.to(DEVICE) for x in rounded], num_heads, hw_shape, prefix, 'cuda', center,
                  valid_hw)
    settings = (num_heads, hw_shape, prefix, 'reference', center, valid_hw)
    of_rounded = run([None if x is None else x.double() for x in rounded], *settings)
    exact = of_rounded if dtype == torch.float32 else run(inputs, *settings)
    for name, result in results.items():
        assert result.dtype == dtype and result.is_contiguous(), name
        tolerance = 2e-6
        if dtype != torch.float32:
            tolerance = max(tolerance, 2 * relative_error(of_rounded[name], exact[name]))
        if dtype == torch.bfloat16 and not HAS_GPU:
            tolerance += 2 ** -8  # Triton's interpreter truncates to bfloat16
        assert relative_error(result, exact[name]) <= tolerance, name


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('size', SIZES)
def test_sizes(size, dtype):
    batch, hw_shape, prefix = SIZES[size]
    check(make_inputs(batch, hw_shape, prefix, channels=16), dtype, 1, hw_shape, prefix)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('head_dim', [16, 24, 32, 48, 64])
def test_head_sizes(head_dim, dtype):
    check(make_inputs(1, (5, 11), 2, 2 * head_dim), dtype, 2, (5, 11), 2)


@pytest.mark.parametrize('center', [True, False], ids=['centred', 'uncentred'])
@pytest.mark.parametrize('local', [True, False], ids=['local', 'global_only'])
def test_terms(local, center):
    inputs = make_inputs(2, (9, 13), 1, 32)
    if not local:
        inputs[3] = None
    check(inputs, torch.float32, 2, (9, 13), 1, center)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('local', [True, False], ids=['local', 'global_only'])
def test_padded_images(local, dtype):
    inputs = make_inputs(3, (9, 21), 1, 32)
    if not local:
        inputs[3] = None
    check(inputs, dtype, 2, (9, 21), 1, valid_hw=[9, 21, 4, 13, 1, 2])


def test_a_split_of_padding_only(monkeypatch):
    monkeypatch.setattr(cuda, 'MIN_SPLIT_TOKENS', 96)
    check(make_inputs(2, (40, 17), 0, 16), torch.float32, 1, (40, 17), 0, valid_hw=[3, 5, 40, 1])


def test_padding_may_hold_anything():
    *inputs, grad = (x.to(DEVICE, torch.float32) for x in make_inputs(2, (9, 21), 1, 32))
    valid_hw = [6, 21, 9, 10]
    expected = run([*inputs, grad], 2, (9, 21), 1, valid_hw=valid_hw)
    for x in (*inputs[:3], grad):
        for image, (rows, columns) in enumerate([(6, 21), (9, 10)]):
            area = x[image, 1:].view(9, 21, 32)
            area[rows:] = float('nan')
            area[:, columns:] = float('inf')
    results = run([*inputs, grad], 2, (9, 21), 1, valid_hw=valid_hw)
    assert all(torch.equal(results[name], expected[name]) for name in NAMES)


def test_many_splits(monkeypatch):
    """Several tiles in each split, several splits to merge, and more than one block of them."""
    monkeypatch.setattr(cuda, 'MIN_SPLIT_TOKENS', 96)
    monkeypatch.setattr(cuda, 'MERGED_SPLITS', 2)
    inputs = make_inputs(1, (1, 700), 0, 32)
    inputs[3] = None
    check(inputs, torch.float32, 1, (1, 700), 0)


def test_mean_far_from_zero():
    q, k, noise, _, grad = make_inputs(1, (1, 3000), 0, 16)
    inputs = [x.float() for x in (q, k + 30, k + noise / 2 + 30)] + [None, grad.float()]
    out = run([None if x is None else x.to(DEVICE) for x in inputs], 1, None, 0)['out'].cpu().double()
    reference = run([None if x is None else x.double() for x in inputs], 1, None, 0, 'reference')['out']
    deviation = reference - reference.mean(1, keepdim=True)
    assert float((out - reference).norm() / deviation.norm()) < 2e-4


def test_two_runs_give_equal_bits():
    inputs = [x.to(DEVICE, torch.float32) for x in make_inputs(1, (17, 9), 1, 16)]
    first, second = (run(inputs, 1, (17, 9), 1) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


def test_slices_of_one_projection_are_not_copied(monkeypatch):
    q, k, v, weight, grad = (x.to(DEVICE, torch.float32) for x in make_inputs(2, (5, 9), 1, 32))
    expected = run([q, k, v, weight, grad], 2, (5, 9), 1)
    slices = torch.cat([q, k, v], dim=-1).chunk(3, dim=-1)
    contiguous = torch.Tensor.contiguous
    copied = []
    monkeypatch.setattr(torch.Tensor, 'contiguous', lambda x: copied.append(x.shape) or contiguous(x))
    results = run([*slices, weight, grad], 2, (5, 9), 1)
    assert copied and all(q.shape[1] not in shape for shape in copied), copied  # the nine taps, not the 46 tokens
    assert all(torch.equal(results[name], expected[name]) for name in NAMES)


def test_any_strides():
    q, k, v, weight, grad = (x.to(DEVICE, torch.float32) for x in make_inputs(2, (5, 9), 0, 32))
    expected = run([q, k, v, weight, grad[:1, :1].expand_as(grad).contiguous()], 2, (5, 9), 0)
    q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    weight = weight.transpose(2, 3).contiguous().transpose(2, 3)
    results = run([q, k, v, weight, grad[:1, :1].expand_as(grad)], 2, (5, 9), 0)
    assert all(torch.equal(results[name], expected[name]) for name in NAMES)


def test_offsets_pass_32_bits():
    """Two tokens, 2^31 elements apart: memory that is reserved, not touched."""
    torch.use_deterministic_algorithms(False)
    far = 2 ** 31
    try:
        memory = torch.empty(far + 64, dtype=torch.float16, device=DEVICE)
    except RuntimeError as error:
        pytest.skip(f'needs 4 GiB of address space: {error}')
    q, k, v, grad = (memory[start:].as_strided((1, 2, 16), (16, far, 1)) for start in (0, 16, 32, 48))
    values = make_inputs(1, (1, 2), 0, 16)
    for x, value in zip((q, k, v, grad), (*values[:3], values[4])):
        x.copy_(value)
    weight = values[3].to(DEVICE, torch.float16)
    results = run([q, k, v, weight, grad], 1, (1, 2), 0)
    expected = run([q.clone(), k.clone(), v.clone(), weight, grad.clone()], 1, (1, 2), 0)
    assert all(torch.equal(results[name], expected[name]) for name in NAMES)


def test_empty_batch():
    q = torch.zeros(0, 6, 32, device=DEVICE)
    assert run([q, q, q, q.new_zeros(0, 32, 3, 3), q], 2, (2, 3), 0)['dlocal_weight'].shape == (0, 32, 3, 3)


@pytest.mark.parametrize('setting, precision', [('ieee', 'ieee'), ('none', 'ieee'), ('tf32', 'tf32')])
def test_tf32_is_used_only_where_torch_allows_it(setting, precision):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        options, _ = cuda._options(torch.zeros(1, 4, 32), num_heads=1)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert options['PRECISION'] == precision


def test_flops_are_those_of_the_mathematics():
    batch, hw_shape, prefix, channels, heads = 2, (3, 5), 1, 64, 2
    flops = 2 * (2 * batch * 16 * channels * 32) + 2 * 9 * batch * 15 * channels
    inputs = [x.to(DEVICE, torch.float32) for x in make_inputs(batch, hw_shape, prefix, channels)]
    for backend in ('cuda', 'aten'):
        with FlopCounterMode(display=False) as counter:
            run(inputs, heads, hw_shape, prefix, backend)
        counts = counter.get_flop_counts()['Global']
        assert counts == {torch.ops.mminline.inline_attention: flops,
                          torch.ops.mminline.inline_attention_backward: 2 * flops}, backend


@pytest.mark.slow
@pytest.mark.parametrize('capability', [80, 90, 100])
def test_kernels_compile_and_spill_no_registers(capability):
    """Without a GPU, in a process of its own: here Triton may be set to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    script = Path(__file__).with_name('compile_kernels.py')
    run = subprocess.run([sys.executable, script, str(capability)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    kernels = {'statistics_kernel', 'merge_kernel', 'apply_kernel', 'gradient_kernel'}
    for head_dim in (16, 32, 64):
        for dtype in ('torch.bfloat16', 'torch.float32'):
            for is_padded in (False, True):
                reports = [x for x in result['reports']
                           if (x['head_dim'], x['dtype'], x['is_padded']) == (head_dim, dtype, is_padded)]
                assert {x['kernel'] for x in reports} == kernels
    assert not [x for x in result['reports'] if x['spilled']]
    # Six image sizes and four stages: one kernel of each kind, and the merge with and without centring.
    assert sorted(result['multi_scale']) == sorted([*kernels, 'merge_kernel'])


@needs_gpu
def test_opcheck_on_a_gpu():
    q, k, v, weight, _ = (x.to(DEVICE, torch.float32).requires_grad_() for x in make_inputs(2, (5, 9), 1, 32))
    torch.library.opcheck(torch.ops.mminline.inline_attention.default,
                          (q, k, v, weight, 2, 0.5, (5, 9), 1, True, [5, 9, 2, 3], 'cuda'))


@needs_gpu
def test_compiles_as_one_graph_on_a_gpu():
    def attend(q, k, v, weight):
        return inline_attention(q, k, v, 2, local_weight=weight, hw_shape=(19, 33))

    inputs = [x.to(DEVICE, torch.bfloat16) for x in make_inputs(2, (19, 33), 0, 64)[:4]]
    assert torch.equal(torch.compile(attend, fullgraph=True)(*inputs), attend(*inputs))


@needs_gpu
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_a_million_tokens_on_a_gpu(dtype):
    hw_shape = (1000, 1024)
    inputs = [x.to(DEVICE, dtype) for x in make_inputs(1, hw_shape, 0, 64)]
    results = run(inputs, 2, hw_shape, 0)
    expected = run([x.double() for x in inputs], 2, hw_shape, 0, 'aten')
    tolerance = {torch.float32: 2e-6, torch.float16: 2 ** -11, torch.bfloat16: 2 ** -8}[dtype]
    for name in NAMES:
        assert relative_error(results[name], expected[name].cpu()) < tolerance, name
