"""Squared errors with positions: the same run as with every position as a sample of its own."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from mukron.train import RunConfig, train

INPUTS, OUTPUTS, LENGTH = 5, 3, 4


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, OUTPUTS))


def numbers(flat: bool = False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, LENGTH, INPUTS, generator=generator)
    y = torch.tanh(x @ torch.randn(INPUTS, OUTPUTS, generator=generator))
    return (x.flatten(0, 1), y.flatten(0, 1)) if flat else (x, y)


def classes(flat: bool = False):
    x, y = numbers(flat)
    return x, y.argmax(-1)


@pytest.mark.parametrize("options", [{"trust": "none"}, {}], ids=["plain", "bounded"])
@pytest.mark.parametrize("method", ["kfac", "foof", "shampoo", "sgd", "gauss-newton"])
@pytest.mark.parametrize("data", ["numbers", "classes"])
def test_positions_are_samples(data, method, options, monkeypatch):
    monkeypatch.setitem(sys.modules, "here", sys.modules[__name__])
    if method == "sgd" and options:
        pytest.skip("SGD has no trust")
    exact = {"fisher": "exact"} if method == "kfac" else {}
    losses = [
        [
            row["train_loss"]
            for row in train(
                RunConfig(
                    **{"model": "here:network", "base_width": 8, "width": 16, "data": f"here:{data}", "loss": "mse"},
                    **{"method": method, "lr": 0.05, "epochs": 3, "dtype": "float64"},
                    method_options={**options, **exact},
                    data_options={"flat": flat},
                )
            ).epochs
        ]
        for flat in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][-1] < losses[0][0]
