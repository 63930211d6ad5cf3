"""Shampoo measures very small and very large gradients in units of their own, which changes nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mukron import Shampoo


@pytest.mark.parametrize("memory", ["batch", "ema:0.5", "sum"])
@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1e12])
def test_roots_that_serve_several_steps_keep_their_unit(scale, memory):
    """Between two refreshes the step is linear in the gradient, whatever its size."""
    sizes = []
    for factor in (1.0, scale):
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False).double()
        optimizer = Shampoo(model, lr=1.0, inverse_every=4, factor_every=4, memory=memory, damping=1e-3, trust=None)
        for step in range(4):
            G = torch.randn(3, 4, dtype=torch.float64) * (1.0 if step == 0 else factor)
            model.weight.grad, before = G, model.weight.detach().clone()
            optimizer.step()
            sizes.append(float((before - model.weight).detach().norm() / G.norm()))
    assert sizes[:4] == pytest.approx(sizes[4:], rel=1e-3)


@pytest.mark.parametrize("memory", ["batch", "ema:0.5", "sum"])
def test_a_unit_that_changes_between_refreshes_renews_the_roots(memory):
    """Factors are measured every step, roots every fourth: a gradient of another size must not meet old roots."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).double()
    optimizer = Shampoo(model, lr=1.0, inverse_every=4, memory=memory, damping=1e-3, trust=None)
    for step in range(4):
        G = torch.randn(3, 4, dtype=torch.float64) * (1.0 if step == 0 else 1e12)
        model.weight.grad, before = G, model.weight.detach().clone()
        optimizer.step()
        moved = float((before - model.weight).detach().norm())
        assert 1e-3 < moved < 1e3  # a root of the gradient's own moments gives steps of about one
