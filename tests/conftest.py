"""One thread a process, here and in those that tests start: sums come in one order, and cores are shared by tests."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it once, when it is loaded

import torch

torch.set_num_threads(1)
