"""On a GPU: the same steps as on the CPU, states that move between the two, half precision with a GradScaler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, FOOF, KFAC, GaussNewton, Shampoo, Window
from mukron.linalg.tracked import ROOT_TOLERANCE
from networks import INPUTS, Net

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # of the first backward pass in a process
]
METHODS = {
    "kfac": lambda model: KFAC(model, lr=0.05, momentum=0.9, fisher="exact", trust=None),
    "kfac, mc": lambda model: KFAC(model, lr=0.05, momentum=0.9, trust=None),
    "kfac, ema": lambda model: KFAC(model, lr=0.05, memory=EMA(0.9), fisher="exact", trust=None),
    "kfac, window": lambda model: KFAC(model, lr=0.05, memory=Window(2), fisher="exact", trust=None),
    "foof": lambda model: FOOF(model, lr=0.05, trust=None),
    "shampoo": lambda model: Shampoo(model, lr=0.05, damping=1e-3, trust=None),
    "shampoo, tracked": lambda model: Shampoo(model, lr=0.05, damping=1e-3, solver="tracked", trust=None),
    "shampoo, newton": lambda model: Shampoo(model, lr=0.05, damping=1e-3, solver="newton", trust=None),
    "gauss-newton": lambda model: GaussNewton(model, lr=0.05, trust=None),
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


def values(model):
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def close(model, other, start, name=""):
    """To rounding, as a part of the way from the start; tracked roots promise two per cent in each."""
    triples = zip(values(model), values(other), start, strict=True)
    tolerance = 5 * ROOT_TOLERANCE if "tracked" in name else 1e-9
    return all((a - b).norm() <= tolerance * (a - s).norm() for a, b, s in triples)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "kfac, mc"])
def test_the_same_step_as_on_the_cpu(name):
    torch.manual_seed(0)
    here = Net(64).double()
    there, start = copy.deepcopy(here).cuda(), values(here)
    train(here, METHODS[name](here))
    train(there, METHODS[name](there))
    assert close(here, there, start, name)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"factor_every": 2, "inverse_every": 2}, {"form": "matrix"}])
def test_convolutions_take_the_same_steps_as_on_the_cpu(options):
    """Large enough for lines that slide, for factors that have a stream of their own, and for two large ones."""
    torch.manual_seed(0)
    here = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, stride=2), nn.ReLU()),
        *(nn.Conv2d(128, 16, 3, groups=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    ).double()
    there, start = copy.deepcopy(here).cuda(), values(here)
    x, y = torch.randn(4, 3, 12, 11, dtype=torch.float64), torch.randint(5, (4,))
    for model in (here, there):
        optimizer = KFAC(model, lr=1e-4, momentum=0.9, fisher="exact", **{"trust": None, **options})
        for _ in range(3):
            optimizer.zero_grad()
            device = next(model.parameters()).device
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    assert close(here, there, start)


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
    start = values(model)
    train(model, optimizer)
    train(moved, again)
    if name != "kfac, mc":  # generators of two devices draw differently
        assert close(model, moved, start, name)
    assert all(p.isfinite().all() and p.device.type == way[1] for p in moved.parameters())


def test_float16_with_a_scaler():
    torch.manual_seed(0)
    model = Net(64).cuda()
    optimizer = KFAC(model, lr=0.01, momentum=0.9, memory=EMA(0.9), trust=None)
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
