"""On a GPU: the same steps as on the CPU, states that move between the two, half precision with a GradScaler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from mukron import EMA, FOOF, KFAC, GaussNewton, Shampoo, Window
from networks import INPUTS, Net

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # of the first backward pass in a process
]
METHODS = {
    "kfac": lambda model: KFAC(model, lr=0.05, momentum=0.9, fisher="exact"),
    "kfac, mc": lambda model: KFAC(model, lr=0.05, momentum=0.9),
    "kfac, ema": lambda model: KFAC(model, lr=0.05, memory=EMA(0.9), fisher="exact"),
    "kfac, window": lambda model: KFAC(model, lr=0.05, memory=Window(2), fisher="exact"),
    "foof": lambda model: FOOF(model, lr=0.05),
    "shampoo": lambda model: Shampoo(model, lr=0.05, damping=1e-3),
    "shampoo, tracked": lambda model: Shampoo(model, lr=0.05, damping=1e-3, solver="tracked"),
    "shampoo, newton": lambda model: Shampoo(model, lr=0.05, damping=1e-3, solver="newton"),
    "gauss-newton": lambda model: GaussNewton(model, lr=0.05),
}
DATA = torch.Generator().manual_seed(0)
X = torch.randn(10, INPUTS, generator=DATA, dtype=torch.float64)
Y = torch.randint(5, (10,), generator=DATA)


def train(model, optimizer, steps=3):
    device = next(model.parameters()).device
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X.to(device)), Y.to(device)).backward()
        optimizer.step()


def close(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a.detach().cpu(), b.detach().cpu(), rtol=1e-8, atol=1e-10) for a, b in pairs)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "kfac, mc"])
def test_the_same_step_as_on_the_cpu(name):
    torch.manual_seed(0)
    here = Net(64).double()
    there = copy.deepcopy(here).cuda()
    train(here, METHODS[name](here))
    train(there, METHODS[name](there))
    assert close(here, there)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("way", [("cpu", "cuda"), ("cuda", "cpu")])
def test_states_move_between_devices(name, way):
    torch.manual_seed(0)
    model = Net(64).double().to(way[0])
    optimizer = METHODS[name](model)
    train(model, optimizer)
    moved = Net(64).double().to(way[1])
    moved.load_state_dict(model.state_dict())
    again = METHODS[name](moved)
    again.load_state_dict(optimizer.state_dict())
    train(model, optimizer)
    train(moved, again)
    if name != "kfac, mc":  # generators of two devices draw differently
        assert close(model, moved)
    assert all(p.isfinite().all() and p.device.type == way[1] for p in moved.parameters())


def test_float16_with_a_scaler():
    torch.manual_seed(0)
    model = Net(64).cuda()
    optimizer = KFAC(model, lr=0.01, momentum=0.9, memory=EMA(0.9))
    scaler = torch.amp.GradScaler("cuda")
    x, y, losses = X.float().cuda(), Y.cuda(), []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
