"""Every scheduler of torch moves the learning rates of our own optimizers and keeps the plan's ratios."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import functional as F

from mukron import FOOF, KFAC, SOAP, GaussNewton, Muon, Shampoo
from networks import INPUTS
from schedules import LR, STEPS, TORCH, plan_of, take

METHODS = {method.__name__: method for method in (KFAC, FOOF, Shampoo, SOAP, Muon, GaussNewton)}
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA).double(), torch.randint(5, (10,), generator=DATA)


def one_step(model, optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("options", [{}, {"fallback_lr": 0.01}, {"fallback": "sgd"}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_ratios_stay_the_plans(method, options, schedule):
    """Those of preconditioned parameters, of the fallback rule, and between the two."""
    model, plan = plan_of()
    optimizer = METHODS[method](model, plan, lr=LR, **options)
    names = [name for name, _ in model.named_parameters()]
    first = {name: optimizer.rate(name) for name in names}
    assert len({round(rate, 9) for rate in first.values()}) > 1
    scheduler, seen = TORCH[schedule](optimizer), []
    for step in range(STEPS):
        if step < 2:  # the others move rates alone
            one_step(model, optimizer)
        factors = [optimizer.rate(name) / first[name] for name in names]
        assert factors == pytest.approx([factors[0]] * len(names), rel=1e-9)
        assert factors[0] == pytest.approx(float(optimizer.param_groups[0]["lr"]) / LR)
        seen.append(round(factors[0], 9))
        take(scheduler)
    assert len(set(seen)) > 1
    assert optimizer.steps == 2
    assert optimizer.skipped == 0


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("method", ["KFAC", "Muon"])
def test_resumed_training_goes_on_bit_for_bit(method, schedule):
    def made():
        model, plan = plan_of()
        optimizer = METHODS[method](model, plan, lr=LR)
        return model, optimizer, TORCH[schedule](optimizer)

    def train(model, optimizer, scheduler) -> None:
        for _ in range(3):
            one_step(model, optimizer)
            take(scheduler)

    run = made()
    train(*run)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in run[:2]], file)
    of_scheduler = copy.deepcopy(run[2].state_dict())
    file.seek(0)
    train(*run)
    again = made()
    for part, state in zip(again, [*torch.load(file, weights_only=True), of_scheduler], strict=True):
        part.load_state_dict(state)
    train(*again)
    assert again[1].param_groups[0]["lr"] == run[1].param_groups[0]["lr"]
    for name, value in run[0].state_dict().items():
        assert torch.equal(again[0].state_dict()[name], value), name
