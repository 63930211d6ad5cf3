"""What a memory keeps over several batches, against factors kept by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import EMA, FOOF, Batch, Sum, Window
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_memories():
    """Against factors kept by hand over three batches."""
    torch.manual_seed(0)
    batches = [torch.randn(6, INPUTS) for _ in range(3)]
    moments = [x.T @ x / 6 for x in batches]
    ema = 0.0
    for M in moments:
        ema = 0.9 * ema + 0.1 * M
    expected = {
        Batch(): moments[-1],
        Sum(): sum(moments),
        EMA(0.9): ema / (1 - 0.9**3),
        Window(2): (moments[1] + moments[2]) / 2,
        Window(5): sum(moments) / 3,
    }
    for memory, M in expected.items():
        model = Net(8)
        optimizer = FOOF(model, lr=0.0, memory=memory, damping=mukron.Constant(0.1), trust=None)
        for x in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), Y[:6]).backward()
            optimizer.step()
        operator = optimizer.state[optimizer.layers["first"].anchor]["operators"]["weight"]["A"]
        P = operator.right(torch.eye(INPUTS)[None])[0]
        assert torch.allclose(P, torch.linalg.inv(M + 0.1 * torch.eye(INPUTS)), rtol=1e-3, atol=1e-4), memory


@pytest.mark.parametrize("sizes", [(200, 10), (10, 200)])
def test_a_window_of_unequal_batches(sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 5))
    optimizer = FOOF(model, lr=0.0, memory=Window(2), damping=mukron.Constant(0.1), trust=None)
    batches = [torch.randn(size, 64) for size in sizes]
    for x in batches:
        step(model, optimizer, x, torch.randint(5, (len(x),)))
    P = optimizer.state[model[0].weight]["operators"]["weight"]["A"].right(torch.eye(64)[None])[0]
    A = sum(x.T @ x / len(x) for x in batches) / 2
    assert torch.allclose(P, torch.linalg.inv(A + 0.1 * torch.eye(64)), rtol=1e-3, atol=1e-4)
