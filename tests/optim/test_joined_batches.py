"""Curvature measured by several ranks is that of the joined batch: k ranks take the steps of one."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", ["every_method", "every_layer", "options_of_batches", "single_precision"])
def test_ranks_take_the_steps_of_one_process(what, size, tmp_path):
    in_ranks(f"joined_batches:{what}", size, tmp_path)
