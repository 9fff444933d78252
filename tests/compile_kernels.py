"""Compile the CUDA kernels for a GPU that is not there: ``python compile_kernels.py CAPABILITY``.

Run by test_triton.py in a process of its own, for Triton cannot interpret and compile in one. The launch code
runs as it is on CPU tensors; a launch compiles and stops there. Prints JSON: what Triton's assembler says about
each kernel in each launch configuration, and how many kernels a multi-scale training run compiles.
"""
import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from mminline.ops import cuda

ASSEMBLER = Path(triton.__file__).parent / 'backends' / 'nvidia' / 'bin' / 'ptxas-blackwell'
KERNELS = (cuda.kernels.statistics_kernel, cuda.kernels.merge_kernel, cuda.kernels.apply_kernel,
           cuda.kernels.gradient_kernel)


class AbsentGPU:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget('cuda', self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def attend(hw_shape, channels, num_heads, dtype, batch=1, local=True, valid_hw=None):
    """Forward and backward as a PVT layer calls them: q by itself, k and v from one projection."""
    num_tokens = hw_shape[0] * hw_shape[1]
    q, grad = torch.zeros(2, batch, num_tokens, channels, dtype=dtype)
    k, v = torch.zeros(batch, num_tokens, 2 * channels, dtype=dtype).chunk(2, dim=-1)
    weight = torch.zeros(batch, channels, 3, 3, dtype=dtype) if local else None
    settings = (num_heads, 0.5, hw_shape, 0, True, valid_hw)
    _, *statistics = cuda.forward(q, k, v, weight, *settings)
    cuda.backward(grad, q, k, v, weight, *statistics, *settings)


def compiled_kernels():
    """Return name and result of everything in Triton's kernel caches."""
    return [(kernel.__name__, compiled) for kernel in KERNELS for compiled in kernel.device_caches[0][0].values()]


def forget_kernels():
    for kernel in KERNELS:
        kernel.device_caches.clear()


def assembler_report(ptx):
    """Return registers and bytes spilled per thread."""
    target = re.search(r'^\.target (\w+)', ptx, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / 'kernel.ptx'
        source.write_text(ptx)
        report = subprocess.run([ASSEMBLER, '-v', f'--gpu-name={target}', source, '-o', Path(folder) / 'kernel.cubin'],
                                check=True, capture_output=True, text=True).stderr
    return {'registers': int(re.search(r'Used (\d+) registers', report)[1]),
            'spilled': sum(int(size) for size in re.findall(r'(\d+) bytes spill', report))}


def main():
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(AbsentGPU(capability))
    JITFunction.run = functools.partialmethod(compile_only, JITFunction.run)
    reports = []
    for block_d, size in cuda.LAUNCH_CONFIGS:
        dtype = torch.float32 if size == 4 else torch.bfloat16
        for valid_hw in (None, [4, 7]):
            forget_kernels()
            attend((9, 7), 2 * block_d, 2, dtype, valid_hw=valid_hw)
            for name, compiled in compiled_kernels():
                reports.append({'kernel': name, 'head_dim': block_d, 'dtype': str(dtype), 'is_padded': bool(valid_hw),
                                **assembler_report(compiled.asm['ptx'])})
    forget_kernels()
    for height, width in ((7, 7), (25, 38), (25, 42), (50, 75), (100, 167), (128, 128)):
        for channels, num_heads, batch in ((64, 2, 2), (128, 4, 1), (320, 10, 1), (512, 16, 2)):
            attend((height, width), channels, num_heads, torch.bfloat16, batch)
    json.dump({'reports': reports, 'multi_scale': [name for name, _ in compiled_kernels()]}, sys.stdout)


def compile_only(kernel, run, *args, warmup, **options):
    return run(kernel, *args, warmup=True, **options)


if __name__ == '__main__':
    main()
