"""One thread a process, here and in those that tests start: sums come in one order, and cores are shared by tests."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it once, when it is loaded

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def modules_of_a_test_end_with_it(tmp_path_factory):
    """Two tests may each write a module of one name into a folder of their own."""
    before = set(sys.modules)
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
