"""Each step of several processes is that of the joined batch, or is refused: not only the ones that are compared."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU


@pytest.mark.parametrize(
    ("what", "size"),
    [
        ("mistakes", 2),
        ("slips", 2),
        ("nothing_first", 2),
        ("padding", 2),
        pytest.param("padding", 3, marks=pytest.mark.matrix),
        ("sparse_gradients", 2),
        ("uneven_passes", 2),
        ("saved_on_one_rank", 2),
    ],
)
def test_a_step_is_that_of_the_joined_batch_or_is_refused(what, size, tmp_path):
    in_ranks(f"every_step:{what}", size, tmp_path)


@pytest.mark.skipif(not NEW_ENOUGH, reason="fully_shard trains on CPUs from torch 2.9 on")
@pytest.mark.parametrize("what", ["no_samples", "sequences_of_other_lengths", "experts_with_some_of_the_samples"])
def test_parts_of_a_batch_that_do_not_fit_are_refused_on_all_ranks(what, tmp_path):
    in_ranks(f"every_step:{what}", 2, tmp_path)


@pytest.mark.skipif(not NEW_ENOUGH, reason="fully_shard trains on CPUs from torch 2.9 on")
def test_a_spread_model_in_one_process(tmp_path):
    in_ranks("every_step:alone", 1, tmp_path)
