"""Shared by all tests: one thread each, since several test processes run side by side."""
import os

import pytest
import torch
from mmengine.registry import DefaultScope

torch.set_num_threads(1)

# Triton reads this when it is first imported, by whichever test: no GPU, so its interpreter runs the kernels.
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')


@pytest.fixture(autouse=True)
def no_default_scope():
    """No test inherits the scope (mmdet, mmseg) that another one set for the whole process."""
    DefaultScope._instance_dict.clear()
