"""Statistics that are sent in the backward pass: the same steps, whatever comes between that pass and the step."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU


@pytest.mark.parametrize(
    ("what", "size"),
    [
        pytest.param("every_way", 2, marks=pytest.mark.matrix),
        ("checkpointing", 2),
        ("nothing_twice", 3),
        ("upsets", 2),
        ("experts", 2),
        ("accumulated", 2),
        ("two_optimizers", 2),
        ("orders_that_differ", 2),
        ("groups_and_lanes", 2),
        ("the_end_of_python", 2),
    ],
)
def test_ranks_send_statistics_in_the_backward_pass(what, size, tmp_path):
    in_ranks(f"sent_ahead:{what}", size, tmp_path)


@pytest.mark.skipif(not NEW_ENOUGH, reason="fully_shard trains on CPUs from torch 2.9 on")
def test_ranks_with_parts_of_the_weights_send_statistics_in_the_backward_pass(tmp_path):
    in_ranks("sent_ahead:spread", 2, tmp_path)
