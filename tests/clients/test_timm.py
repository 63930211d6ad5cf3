"""Models of timm, with mukron's optimizers and with timm's own and the groups of a plan."""

from __future__ import annotations

import pytest
from tiny import METHODS, TIMM_MODELS, pictures, planned
from torch.nn import functional as F

from mukron.integrations import build_optimizer, for_timm

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
    found = losses(model, optimizer)
    assert found[-1] < found[0]
