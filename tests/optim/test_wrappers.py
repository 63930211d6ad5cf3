"""Options of DistributedDataParallel and of ``fully_shard``: steps are those of the joined batch with all of them."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before, fully_shard needs a GPU


@pytest.mark.parametrize("what", ["no_sync", "static_graph", "a_small_gradient"])
def test_wrapped_models(what, tmp_path):
    in_ranks(f"wrappers:{what}", 2, tmp_path)


@pytest.mark.skipif(not NEW_ENOUGH, reason="fully_shard trains on CPUs from torch 2.9 on")
@pytest.mark.parametrize("what", ["casts", pytest.param("twenty_steps", marks=pytest.mark.matrix)])
def test_sharded_models(what, tmp_path):
    in_ranks(f"wrappers:{what}", 2, tmp_path)
