"""Schedules move ``fallback_lr`` with ``lr``: parameters of the fallback rule step by fallback_lr lr / (first lr).

The first lr is the one that the group was built with, also where a scheduler writes another ``initial_lr`` into it.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler

from mukron import FOOF, KFAC, GaussNewton, Shampoo
from mukron.optim.direction import base_rate
from networks import INPUTS, Net

LR, FALLBACK_LR, STEPS = 0.1, 0.01, 6
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA).double(), torch.randint(5, (10,), generator=DATA)

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}
SCHEDULES = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=STEPS),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 4),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=LR, total_steps=STEPS + 2, cycle_momentum=True
    ),
    "two in a row": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        ],
        milestones=[2],
    ),
}


def net() -> Net:
    torch.manual_seed(0)
    return Net(8).double()


def follow(model, optimizer, scheduler=None, steps=STEPS, buffers=None, first=LR, fallback_lr=FALLBACK_LR):
    """Trains, and compares each change of the norm with the rule: buffer <- momentum buffer + gradient."""
    buffers = {} if buffers is None else buffers
    rates = []
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        group = next(group for group in optimizer.param_groups if any(p is model.norm.weight for p in group["params"]))
        rate = fallback_lr * float(group["lr"]) / first
        rates.append(rate)
        expected = {}
        for name, parameter in model.norm.named_parameters():
            buffers[name] = float(group["momentum"]) * buffers.get(name, 0) + parameter.grad
            expected[name] = parameter.detach() - rate * buffers[name]
        optimizer.step()
        for name, parameter in model.norm.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-12, msg=f"norm.{name}")
        if scheduler is not None:
            scheduler.step()
    assert optimizer.skipped == 0
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # of torch 2.6's own SequentialLR
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_scheduler_moves_both(method, schedule):
    model = net()
    optimizer = method(model, lr=LR, fallback_lr=FALLBACK_LR, trust=None)
    rates = follow(model, optimizer, schedule(optimizer))
    assert len(set(rates)) > 3


def test_a_rate_of_zero_is_zero_for_both():
    model = net()
    optimizer = KFAC(model, lr=LR, fallback_lr=FALLBACK_LR, trust=None)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    follow(model, optimizer, scheduler, steps=2)
    assert optimizer.param_groups[0]["lr"] == 0
    before = copy.deepcopy(model.state_dict())
    follow(model, optimizer, steps=1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_by_hand(method):
    model = net()
    optimizer = method(model, lr=LR, fallback_lr=FALLBACK_LR, trust=None)
    for lr in (LR, 0.05, 0.2, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        follow(model, optimizer, steps=1)


@pytest.mark.parametrize("schedule", ["cosine", "warm-up"])
def test_a_learning_rate_that_is_a_tensor(schedule):
    """Schedulers overwrite it in place: the first lr must not follow."""
    model = net()
    optimizer = KFAC(model, lr=torch.tensor(LR, dtype=torch.float64), fallback_lr=FALLBACK_LR, trust=None)
    rates = follow(model, optimizer, SCHEDULES[schedule](optimizer))
    assert len(set(rates)) > 3


def test_groups_have_first_rates_of_their_own():
    model = net()
    norm = list(model.norm.parameters())
    rest = [parameter for parameter in model.parameters() if not any(parameter is p for p in norm)]
    groups = [{"params": rest}, {"params": norm, "lr": 0.4, "fallback_lr": 0.03}]
    optimizer = KFAC(model, lr=LR, fallback_lr=FALLBACK_LR, params=groups, trust=None)
    follow(model, optimizer, SCHEDULES["cosine"](optimizer), first=0.4, fallback_lr=0.03)


def test_a_group_added_later_has_its_own():
    model = net()
    norm = list(model.norm.parameters())
    rest = [parameter for parameter in model.parameters() if not any(parameter is p for p in norm)]
    optimizer = KFAC(model, lr=LR, fallback_lr=FALLBACK_LR, params=rest, trust=None)
    optimizer.add_param_group({"params": norm, "lr": 0.4})
    follow(model, optimizer, SCHEDULES["cosine"](optimizer), first=0.4)


def test_without_a_fallback_lr_the_rate_is_the_groups():
    model = net()
    optimizer = KFAC(model, lr=LR, trust=None)
    follow(model, optimizer, SCHEDULES["cosine"](optimizer), fallback_lr=LR)


@pytest.mark.parametrize("schedule", ["cosine", "warm-up", "one cycle"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_after_loading(method, schedule):
    """The first lr is part of the state: an optimizer that is built with another one takes it over."""
    model = net()
    optimizer = method(model, lr=LR, fallback_lr=FALLBACK_LR, trust=None)
    scheduler, buffers = SCHEDULES[schedule](optimizer), {}
    follow(model, optimizer, scheduler, steps=3, buffers=buffers)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    resumed = net()
    again = method(resumed, lr=3 * LR, fallback_lr=5 * FALLBACK_LR, trust=None)
    scheduler = SCHEDULES[schedule](again)
    for part, state in zip((resumed, again, scheduler), states, strict=True):
        part.load_state_dict(state)
    rates = follow(resumed, again, scheduler, steps=3, buffers=buffers)
    assert len(set(rates)) == 3


def test_after_copying():
    model = net()
    optimizer = KFAC(model, lr=LR, fallback_lr=FALLBACK_LR, trust=None)
    optimizer.param_groups[0]["lr"] = LR / 2
    follow(model, optimizer, steps=1)
    copied = copy.deepcopy(optimizer)
    follow(copied.model, copied, steps=1)


def test_weight_decay_of_the_fallback_follows_too():
    """Decoupled decay is fallback_lr lr / (first lr) times weight_decay."""
    model = net()
    optimizer = KFAC(model, lr=LR, fallback_lr=FALLBACK_LR, weight_decay=0.5, trust=None)
    optimizer.param_groups[0]["lr"] = LR / 4
    F.cross_entropy(model(X), Y).backward()
    before, rate = model.norm.weight.detach().clone(), FALLBACK_LR / 4
    expected = before * (1 - rate * 0.5) - rate * model.norm.weight.grad
    optimizer.step()
    torch.testing.assert_close(model.norm.weight.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo, GaussNewton])
def test_a_schedule_may_begin_at_zero(method):
    """Adam's steps beside a bound keep their proportion to the layers' learning rate."""
    optimizer = method(Net(8), lr=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.2
    rates = {entry.preconditioned: base_rate(entry) for entry in optimizer.entries.values()}
    assert rates == {True: 0.2, False: pytest.approx(0.005 * 0.2 / method.spec.bounded_lr)}
