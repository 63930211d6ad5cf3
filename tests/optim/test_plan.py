"""The table of what is preconditioned: forms, memory, work, and every block."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

from mukron import KFAC, GaussNewton, Shampoo
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def backward(model, x=X, scale=1.0):
    (F.cross_entropy(model(x).float(), Y) * scale).backward()


def test_plan_tells_form_memory_and_work():
    model = Net(64)
    optimizer = KFAC(model, lr=0.05, trust=None)
    assert "after the first step" in str(optimizer.plan())
    backward(model)
    optimizer.step()
    rows = {row[0]: row for row in optimizer.plan().rows}
    assert rows["hidden"][1] == "64 x 64"
    assert rows["hidden"][2] == "A: sample space, 10 rows of 64, B: sample space, 10 rows of 64"
    assert "matrix 12" in rows["first"][2]
    assert "norm.weight, norm.bias" in str(optimizer.plan())


@pytest.mark.parametrize("method", [Shampoo, GaussNewton])
def test_the_plan_shows_every_block(method):
    """Weights and biases have factors of their own: neither hides the other's."""
    model = Net(8)
    optimizer = method(model, lr=0.05, trust=None)
    backward(model)
    optimizer.step()
    rows = [" ".join(row) for row in optimizer.plan().rows]
    for layer in ("first", "hidden", "head"):
        own = " ".join(row for row in rows if row.startswith(layer))
        assert "weight" in own
        assert "bias" in own
        if method is Shampoo:  # L and R of the weight, L of the bias
            assert len(re.findall(r"\bL\b", own)) >= 2
            assert len(re.findall(r"\bR\b", own)) >= 1


@pytest.mark.parametrize(("columns", "rank"), [(1, "1.0"), (4, "4.0")])
def test_the_plan_shows_effective_ranks(columns, rank):
    layer = torch.nn.Linear(8, 3, bias=False)
    optimizer = KFAC(layer, lr=0.05)
    x = torch.eye(8)[torch.arange(16) % columns]  # equally many rows along so many axes
    F.cross_entropy(layer(x), torch.arange(16) % 3).backward()
    assert "rank" not in optimizer.plan().columns
    optimizer.step()
    assert optimizer.plan().rows[0][3].startswith(f"A: {rank} of 8, B: ")
    assert "MeanEigenvalue" in str(optimizer.plan())
