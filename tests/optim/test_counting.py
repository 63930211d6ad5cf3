"""Bytes of collectives are counted where they arrive, by the definitions of the collectives."""

from __future__ import annotations

import pytest
import torch
from ranks import in_ranks

from mukron.optim.counting import KIND_OF, WITHOUT_NUMBERS, CollectiveCount


def test_every_collective_in_three_ranks(tmp_path):
    in_ranks("counted_ranks:collectives", 3, tmp_path)


def test_all_collectives_of_this_torch_are_known():
    operations = {schema.name for schema in torch._C._jit_get_all_schemas()}
    collectives = {name for name in operations if name.startswith(("c10d::", "_c10d_functional::"))}
    assert collectives
    unknown = {name for name in collectives - KIND_OF.keys() if name.partition("::")[2] not in WITHOUT_NUMBERS}
    assert unknown <= {"_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops"}  # refused where they are called


def test_nothing_is_counted_in_one_process():
    with CollectiveCount() as count:
        torch.ones(3) @ torch.ones(3)
    assert (count.numbers, count.headers, count.by_kind()) == (0, 0, {})


def test_operations_that_are_no_collectives_are_unchanged():
    with CollectiveCount(), pytest.raises(RuntimeError, match="size"):
        torch.ones(3) @ torch.ones(4)
