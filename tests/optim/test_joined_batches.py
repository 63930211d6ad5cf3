"""Curvature measured by several ranks is that of the joined batch: k ranks take the steps of one."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def in_full(what, size):
    """A part of the matrix that the usual run of the tests leaves out."""
    return pytest.param(what, size, marks=pytest.mark.matrix)


MATRIX = [  # what, and with how many ranks
    ("every_method", 2),
    in_full("every_method", 3),
    ("own_gradients", 2),
    in_full("own_gradients", 3),
    ("every_layer", 2),
    ("options_of_batches", 2),
    in_full("options_of_batches", 3),
    ("single_precision", 2),
    in_full("enlarged_rounding", 2),
]
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU


@pytest.mark.parametrize(("what", "size"), MATRIX)
def test_ranks_take_the_steps_of_one_process(what, size, tmp_path):
    in_ranks(f"joined_batches:{what}", size, tmp_path)


@pytest.mark.skipif(not NEW_ENOUGH, reason="fully_shard trains on CPUs from torch 2.9 on")
@pytest.mark.parametrize(
    ("what", "size"),
    [
        *(("spread_weights", 2), in_full("spread_weights", 3), in_full("two_dimensional_mesh", 4)),
        *(in_full("crossed", 2), in_full("crossed", 3)),
    ],
)
def test_ranks_with_parts_of_the_weights_take_the_steps_of_one_process(what, size, tmp_path):
    in_ranks(f"joined_batches:{what}", size, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ranks_on_one_gpu_take_the_steps_of_one_process(tmp_path):
    in_ranks("joined_batches:on_one_gpu", 2, tmp_path)
