"""Which backend computes the attention, and why not another."""
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mminline.ops import functional, inline_attention


@pytest.fixture(autouse=True)
def nothing_asked_yet(monkeypatch, caplog):
    monkeypatch.delenv('MMINLINE_BACKEND', raising=False)
    caplog.set_level(logging.DEBUG, logger=functional.__name__)
    for cached in (functional._find_gpu_problem, functional._log_choice_once):
        cached.cache_clear()
    yield
    for cached in (functional._find_gpu_problem, functional._log_choice_once):
        cached.cache_clear()


def attend(**settings):
    tokens = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    return inline_attention(tokens, tokens, tokens, num_heads=2, **settings)


def gpu_tokens(dtype=torch.bfloat16, channels=64):
    """Stand in for a tensor on a GPU: what a predicate reads of it."""
    return SimpleNamespace(is_cuda=True, device=torch.device('cuda', 0), dtype=dtype, shape=(1, 16, channels))


def messages(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_cuda_comes_first_and_the_reference_last():
    assert list(functional.BACKENDS) == ['cuda', 'aten', 'reference']


def test_cpu_tensors_take_the_pytorch_path_and_the_log_says_so_once(caplog):
    attend()
    attend()
    choice, = messages(caplog, logging.DEBUG)
    assert choice.startswith('InLine attention backend: aten (cuda declines: ')


def test_no_gpu_is_one_info_line(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    attend()
    attend()
    assert messages(caplog, logging.INFO) == ['InLine attention runs on plain PyTorch: no NVIDIA GPU is available']


def test_without_triton_a_gpu_takes_the_pytorch_path(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setitem(sys.modules, 'triton', None)
    assert functional._choose_backend(gpu_tokens(), 2, None) == 'aten'
    assert functional._choose_backend(gpu_tokens(), 2, None) == 'aten'
    info, = messages(caplog, logging.INFO)
    assert 'Triton does not start' in info and 'triton' in info


def test_without_a_compiler_a_gpu_takes_the_pytorch_path(caplog, monkeypatch):
    class Driver:
        @property
        def active(self):
            raise RuntimeError('Failed to find C compiler.\nPlease specify via CC')

    runtime = pytest.importorskip('triton', reason='needs Triton').runtime
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(runtime, 'driver', Driver())
    assert functional._choose_backend(gpu_tokens(), 2, None) == 'aten'
    assert messages(caplog, logging.INFO) == [
        'InLine attention runs on plain PyTorch: '
        'Triton does not start: Failed to find C compiler. Please specify via CC']


@pytest.mark.parametrize('version, problem', [
    ('3.5.1', 'the kernels need Triton 3.6, got 3.5.1'), ('3.6.0', None), ('3.10.0', None)])
def test_an_old_triton_is_declined(version, problem, monkeypatch):
    triton = pytest.importorskip('triton', reason='needs Triton')
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: None))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(triton, '__version__', version)
    monkeypatch.setattr(triton.runtime, 'driver', driver)
    assert functional.gpu_problem() == problem


def test_ops_import_and_work_without_triton():
    program = ('import sys; sys.modules["triton"] = None\n'
               'import torch; from mminline.ops import inline_attention\n'
               'tokens = torch.ones(1, 4, 8)\n'
               'assert torch.equal(inline_attention(tokens, tokens, tokens, 1), tokens)')
    subprocess.run([sys.executable, '-c', program], check=True)


@pytest.mark.parametrize('tokens, capability, reason', [
    (gpu_tokens(), (8, 0), None),
    (gpu_tokens(torch.float32, 128), (12, 0), None),
    (gpu_tokens(), (7, 5), 'the kernels need compute capability 8.0, got 7.5'),
    (gpu_tokens(torch.float64), (9, 0), 'the kernels take float16, bfloat16 and float32, got torch.float64'),
    (gpu_tokens(channels=160), (9, 0), 'the kernels take up to 64 channels per head, got 80'),
    (torch.zeros(1, 16, 64), (9, 0), 'the kernels need a GPU, got tensors on cpu'),
])
def test_what_the_kernels_decline(tokens, capability, reason, monkeypatch):
    monkeypatch.setattr(functional, 'gpu_problem', lambda: None)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    assert functional.BACKENDS['cuda'](tokens, 2) == reason
    assert functional._choose_backend(tokens, 2, None) == ('cuda' if reason is None else 'aten')


def test_cpu_tensors_do_not_start_triton_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(functional, 'gpu_problem', lambda: pytest.fail('asked'))
    attend()


def test_a_forced_backend_is_used_or_says_why_not(caplog):
    assert torch.equal(attend(backend='aten'), attend())
    torch.testing.assert_close(attend(backend='reference'), attend())
    assert 'InLine attention backend: reference (requested)' in messages(caplog, logging.DEBUG)
    with pytest.raises(NotImplementedError, match="backend 'cuda' declines: .*GPU"):
        attend(backend='cuda')


def test_the_environment_variable_forces_and_the_argument_wins(caplog, monkeypatch):
    monkeypatch.setenv('MMINLINE_BACKEND', 'reference')
    attend()
    assert messages(caplog, logging.DEBUG) == ['InLine attention backend: reference (requested)']
    attend(backend='aten')
    assert messages(caplog, logging.DEBUG)[1:] == ['InLine attention backend: aten (requested)']
    monkeypatch.setenv('MMINLINE_BACKEND', 'cuda')
    with pytest.raises(NotImplementedError, match="backend 'cuda' declines"):
        attend()


@pytest.mark.parametrize('name', ['triton', ''])
def test_an_unknown_name_in_the_environment_is_refused(name, monkeypatch):
    monkeypatch.setenv('MMINLINE_BACKEND', name)
    with pytest.raises(ValueError, match=rf"'cuda', 'aten', 'reference'\) or None, got '{name}'"):
        attend()


def test_the_choice_does_not_break_a_compiled_graph():
    tokens = torch.randn(2, 12, 32)

    def attend_twice(tokens):
        once = inline_attention(tokens, tokens, tokens, num_heads=2)
        return inline_attention(once, once, once, num_heads=2)

    compiled = torch.compile(attend_twice, fullgraph=True, backend='eager')
    assert torch.equal(compiled(tokens), attend_twice(tokens))
