"""Shared by all tests: two threads at most, since several test processes run side by side."""
import torch

torch.set_num_threads(1)
