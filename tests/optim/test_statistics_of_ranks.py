"""What ranks measure adds up to what one process measures on the joined batch, however it is held and counted."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU


@pytest.mark.parametrize("what", ["bucket_views", "reduced_experts", "windows"])
def test_statistics_add_up(what, tmp_path):
    in_ranks(f"statistics_of_ranks:{what}", 2, tmp_path)


@pytest.mark.matrix
@pytest.mark.skipif(not NEW_ENOUGH, reason="fully_shard trains on CPUs from torch 2.9 on")
def test_statistics_of_a_spread_model_add_up(tmp_path):
    in_ranks("statistics_of_ranks:spread_reduced_experts", 2, tmp_path)
