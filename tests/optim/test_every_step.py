"""Each step of several processes is that of the joined batch, or is refused: not only the ones that are compared."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.mark.parametrize(
    ("what", "size"),
    [("mistakes", 2), ("padding", 2), ("padding", 3), ("sparse_gradients", 2), ("uneven_passes", 2)],
)
def test_a_step_is_that_of_the_joined_batch_or_is_refused(what, size, tmp_path):
    in_ranks(f"every_step:{what}", size, tmp_path)
