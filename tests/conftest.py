"""Shared by all tests: one thread each, since several test processes run side by side."""
import os

import torch

torch.set_num_threads(1)

# Triton reads this when it is first imported, by whichever test: no GPU, so its interpreter runs the kernels.
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')
