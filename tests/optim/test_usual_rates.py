"""Learning rates where none are given: of the layers, and of the fallback rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton, Shampoo

METHODS = (KFAC, FOOF, Shampoo, GaussNewton)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("trust", "rates", "fallback"),
    [
        ("spectral", (0.1, 1.0, 0.05, 0.02), 0.005),
        ("kl", (0.1, 1.0, 0.05, 0.02), 0.005),
        ("graft:sgd", (0.1, 1.0, 0.05, 0.02), 0.005),
        ("graft:adam", (0.005,) * 4, None),
        ("rms", (0.005,) * 4, None),
        (None, (0.01, 0.02, 0.005, 0.01), None),
    ],
)
def test_the_rates_suit_the_method_and_its_trust(trust, rates, fallback):
    groups = [method(network(), trust=trust).param_groups[0] for method in METHODS]
    assert tuple(group["lr"] for group in groups) == rates
    assert {group["fallback_lr"] for group in groups} == {fallback}


@pytest.mark.parametrize("method", METHODS)
def test_adams_rate_is_in_proportion(method):
    usual = method(network()).param_groups[0]["lr"]
    assert method(network(), lr=3 * usual).param_groups[0]["fallback_lr"] == pytest.approx(0.015)
    assert method(network(), lr=3 * usual, fallback_lr=0.1).param_groups[0]["fallback_lr"] == 0.1


@pytest.mark.parametrize("trust", ["spectral", "kl", "graft:adam", "graft:sgd", "rms", None])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_the_trust_need_be_given(method, trust):
    """The loss of a small problem falls and never doubles."""
    model = network()
    optimizer = method(model, trust=trust)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) < 2 * losses[0]
    assert losses[-1] < 0.95 * losses[0]
