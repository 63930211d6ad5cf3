"""Depthwise convolutions are left to the fallback rule by every method, which ``plan()`` says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mukron

METHODS = {
    "kfac": mukron.KFAC,
    "foof": mukron.FOOF,
    "shampoo": mukron.Shampoo,
    "soap": mukron.SOAP,
    "muon": mukron.Muon,
    "gauss-newton": mukron.GaussNewton,
}


class Block(nn.Module):
    def __init__(self, width: int, multiplier: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width * multiplier, 3, padding=1, groups=width)
        self.conv_pw = nn.Conv2d(width * multiplier, width, 1)

    def forward(self, x):
        return x + self.conv_pw(torch.tanh(self.conv_dw(x)))


def network(width: int, multiplier: int = 1) -> nn.Module:
    stages = [nn.Sequential(*(Block(width, multiplier) for _ in range(2))) for _ in range(2)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))
    return nn.Sequential(nn.Conv2d(1, width, 3), *stages, *head)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"exclude": ()}, {"exclude": ("0",)}], ids=str)
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_they_are_trained_by_the_fallback_rule(method, planned, options):
    torch.manual_seed(0)
    model = network(8)
    plan = mukron.parametrize(model, mukron.base_shapes(network, width=4)) if planned else None
    optimizer = METHODS[method](model, plan, lr=0.01, **options)
    assert not any("conv_dw" in name for name in optimizer.layers)
    assert {f"{i}.{j}.conv_pw" for i in (1, 2) for j in (0, 1)} <= {*optimizer.layers}
    depthwise = model[1][0].conv_dw.weight
    before = depthwise.detach().clone()
    train(model, optimizer)
    assert not torch.equal(depthwise, before)
    (note,) = [note for note in optimizer.plan().notes if "depthwise" in note]
    assert "4 depthwise convolutions are among these: *.*.conv_dw x 4; " in note
    if plan is not None:
        exclude = options.get("exclude")
        rows = {row[0]: row[-1] for row in plan.explain(method, whole=True, exclude=exclude).rows}
        assert rows["1.0.conv_dw.weight"].startswith("not preconditioned")
        assert rows["1.0.conv_dw.bias"].startswith("not preconditioned")


def test_with_a_multiplier_of_channels_too():
    make = lambda width: network(width, multiplier=2)  # noqa: E731
    plan = mukron.parametrize(model := make(8), mukron.base_shapes(make, width=4))
    assert not any("conv_dw" in name for name in mukron.KFAC(model, plan).layers)


def test_without_them_nothing_is_said():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 3))
    optimizer = mukron.KFAC(model, lr=0.01)
    assert {"0", "1", "3"} == {*optimizer.layers}
    assert not any("depthwise" in note for note in optimizer.plan().notes)


def test_groups_for_other_optimizers_take_them_beside():
    plan = mukron.parametrize(model := network(8), mukron.base_shapes(network, width=4))
    inside = {id(each) for group in plan.param_groups("shampoo", lr=0.1) for each in group["params"]}
    beside = {id(each) for group in plan.param_groups("adamw", lr=0.1, beside="shampoo") for each in group["params"]}
    assert id(model[1][0].conv_dw.weight) in beside - inside
