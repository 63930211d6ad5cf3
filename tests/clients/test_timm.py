"""Models of timm, with mukron's optimizers and with timm's own and the groups of a plan; timm's schedulers."""

from __future__ import annotations

import operators  # noqa: F401
import pytest
import torch
from tiny import METHODS, TIMM_MODELS, pictures, planned
from torch.nn import functional as F

import mukron
from mukron.integrations import build_optimizer, for_timm
from schedules import LR, plan_of, spread_of_steps

pytest.importorskip("timm")
MUKRONS = [method for method in METHODS if method != "AdamW"]


def losses(model, optimizer, steps=6):
    from timm.scheduler import CosineLRScheduler

    x, y = pictures()
    schedule, found = CosineLRScheduler(optimizer, t_initial=2 * steps, t_in_epochs=False), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step_update(step + 1)
        found.append(float(loss.detach()))
    return found


def cells(methods):
    marks = [(name, method, pytest.mark.cell("timm", name, method)) for name in TIMM_MODELS for method in methods]
    return pytest.mark.parametrize(
        ("name", "method"), [pytest.param(*both, marks=mark, id=f"{both[0]}-{both[1]}") for *both, mark in marks]
    )


@cells(MUKRONS)
def test_models_are_trained(name, method):
    model, plan = planned(TIMM_MODELS[name])
    kind, lr = METHODS[method]
    found = losses(model, build_optimizer(kind, model, plan, lr))
    assert found[-1] < found[0]


@cells(["AdamW"])
def test_timms_optimizers_take_the_groups_of_a_plan(name, method):
    from timm.optim import create_optimizer_v2

    model, plan = planned(TIMM_MODELS[name])
    groups = for_timm(plan, "adamw", METHODS[method][1], weight_decay=0.05)
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=9.0, param_group_fn=groups)
    expected = groups(model)
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert rates == [(group["lr"], group["weight_decay"]) for group in expected]
    assert rates == [
        (group["lr"], group["weight_decay"]) for group in plan.param_groups("adamw", lr=3e-3, weight_decay=0.05)
    ]
    found = losses(model, optimizer)
    assert found[-1] < found[0]


class Epochs:
    """timm's schedulers are told the epoch."""

    def __init__(self, scheduler):
        self.scheduler, self.epoch = scheduler, 0

    def step(self):
        self.epoch += 1
        self.scheduler.step(self.epoch, metric=0.0)


USUAL = {"num_epochs": 20, "warmup_epochs": 5, "warmup_lr": 1e-5, "min_lr": LR / 10}
SCHEDULES = {
    "cosine, no warmup_lr and min_lr": {"sched": "cosine", "num_epochs": 20, "warmup_epochs": 0},
    "cosine": {"sched": "cosine", **USUAL},
    "cosine, cycles": {"sched": "cosine", **USUAL, "num_epochs": 4, "cycle_limit": 3, "cycle_decay": 0.5},
    "tanh": {"sched": "tanh", **USUAL},
    "step": {"sched": "step", **USUAL, "decay_epochs": 3},
    "multistep": {"sched": "multistep", **USUAL, "decay_milestones": [6, 8]},
    "poly": {"sched": "poly", **USUAL},
    "plateau": {"sched": "plateau", **USUAL, "patience_epochs": 1, "min_lr": 0.0},
    "plateau, min_lr": {"sched": "plateau", **USUAL, "patience_epochs": 1},
}


def schedule(name):
    def build(optimizer):
        from timm.scheduler import create_scheduler_v2

        return Epochs(create_scheduler_v2(optimizer, **SCHEDULES[name])[0])

    return build


def timms_sgd(model, plan, groups=None):
    from timm.optim import create_optimizer_v2

    groups = for_timm(plan, "sgd", LR) if groups is None else groups
    return create_optimizer_v2(model, "momentum", lr=9.0, param_group_fn=groups)


def planned_sgd(model, plan):
    """timm's class, for any scheduler."""
    from timm.optim import get_optimizer_class

    return plan.optimizer(get_optimizer_class("sgd", bind_defaults=False), LR, method="sgd")


def drift(make, name):
    spread, different = spread_of_steps(make, schedule(name), steps=15)
    assert different > 3
    return spread


quiet = pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning")


@quiet
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("make", [timms_sgd, planned_sgd])
def test_timms_schedulers_keep_the_plans_ratios(make, name):
    """At every step, measured by what moves. PlateauLRScheduler leaves its limit to torch, which knows no lr_scale."""
    spread = drift(make, name)
    assert spread > 0.1 if make is timms_sgd and name == "plateau, min_lr" else spread < 1e-6


@quiet
@pytest.mark.parametrize("name", SCHEDULES)
def test_timms_schedulers_keep_our_own_optimizers_ratios(name):
    model, plan = plan_of()
    optimizer = mukron.Shampoo(model, plan, lr=LR)
    names = [name for name, _ in model.named_parameters()]
    first = {name: optimizer.rate(name) for name in names}
    assert len({round(rate, 9) for rate in first.values()}) > 1
    scheduler, seen = schedule(name)(optimizer), set()
    for _ in range(15):
        factors = [optimizer.rate(name) / first[name] for name in names]
        assert factors == pytest.approx([factors[0]] * len(names), rel=1e-9)
        seen.add(round(factors[0], 9))
        scheduler.step()
    assert len(seen) > 3


@pytest.mark.parametrize("name", ["cosine", "poly"])
def test_plain_groups_lose_the_plans_ratios(name):
    """Why ``for_timm`` gives more than those."""
    plain = drift(lambda model, plan: timms_sgd(model, plan, lambda model: plan.param_groups("sgd", lr=LR)), name)
    assert plain > 1


def test_torchs_schedulers_take_other_groups():
    """They know no lr_scale, and those that begin from ``initial_lr`` flatten what ``for_timm`` gives."""

    def falling(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    assert spread_of_steps(timms_sgd, falling)[0] > 0.1
    assert spread_of_steps(planned_sgd, falling)[0] < 1e-6


@pytest.mark.parametrize("name", ["adamw", "nadamw", "lion"])
def test_a_plan_takes_timms_classes(name):
    """The same first step as with plain groups."""
    from timm.optim import create_optimizer_v2, get_optimizer_class

    method, moved = "lion" if name == "lion" else "adamw", []
    for ours in (True, False):
        model, plan = planned(TIMM_MODELS["Mixer"])
        if ours:
            optimizer = plan.optimizer(get_optimizer_class(name, bind_defaults=False), 1e-3, method=method)
        else:
            groups = plan.param_groups(method, lr=1e-3)
            optimizer = create_optimizer_v2(model, name, lr=1e-3, param_group_fn=lambda _, groups=groups: groups)
        x, y = pictures()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        moved.append([p.detach() for p in model.parameters()])
    for mine, other in zip(*moved, strict=True):
        torch.testing.assert_close(mine, other)
