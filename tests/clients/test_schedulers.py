"""Every scheduler of transformers, which a Trainer chooses by name, keeps the plan's ratios."""

from __future__ import annotations

from pathlib import Path

import operators  # noqa: F401
import pytest
import torch
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from mukron import KFAC, SOAP, Muon, Shampoo
from networks import INPUTS
from schedules import LR, STEPS, keeping, plan_of, rates, spread_of_steps, table, take

optimization = pytest.importorskip("transformers.optimization")

PAGE = Path(__file__).parents[2] / "docs/parametrization.md"
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA).double(), torch.randint(5, (10,), generator=DATA)
OPTIONS = {
    "reduce_lr_on_plateau": {"factor": 0.5, "patience": 0},
    "cosine_with_min_lr": {"min_lr": LR / 10},
    "cosine_warmup_with_min_lr": {"min_lr": LR / 10},
    "polynomial": {"lr_end": LR / 10},
    "warmup_stable_decay": {"num_decay_steps": 4},
    "greedy": {"factor": 0.5, "patience": 0, "min_lr": LR / 10},
}
UNSCHEDULED = ("constant",)


def train(model, optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()


def scheduled(name: str):
    def schedule(optimizer):
        return optimization.get_scheduler(name, optimizer, 3, STEPS, OPTIONS.get(name, {}))

    return schedule


TRANSFORMERS = {str(kind.value): scheduled(kind.value) for kind in optimization.TYPE_TO_SCHEDULER_FUNCTION}


def test_all_names_are_known():
    assert {kind.value for kind in optimization.SchedulerType} == set(TRANSFORMERS)
    assert set(OPTIONS) <= set(TRANSFORMERS)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_ratios_stay_the_plans(name):
    """At every step, measured by what moves."""
    spread, different = spread_of_steps(lambda _, plan: plan.optimizer(SGD, LR, momentum=0.9), TRANSFORMERS[name])
    assert spread < 1e-6
    assert different > 1


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("method", [KFAC, Shampoo, SOAP, Muon])
def test_our_own_optimizers(method, name):
    model, plan = plan_of()
    optimizer = method(model, plan, lr=LR)
    names = [name for name, _ in model.named_parameters()]
    first = {name: optimizer.rate(name) for name in names}
    assert len({round(rate, 9) for rate in first.values()}) > 1
    scheduler, seen = TRANSFORMERS[name](optimizer), set()
    for step in range(STEPS):
        if step < 2:  # the others move rates alone
            train(model, optimizer)
        factors = [optimizer.rate(name) / first[name] for name in names]
        assert factors == pytest.approx([factors[0]] * len(names), rel=1e-9)
        seen.add(round(factors[0], 9))
        take(scheduler)
    assert (len(seen) == 1) == (name in UNSCHEDULED)


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "polynomial"])
def test_the_lowest_rate_is_that_of_the_base_width(name):
    """These read ``defaults["lr"]``."""
    model, plan = plan_of()
    optimizer = plan.optimizer(AdamW, LR)
    scheduler = TRANSFORMERS[name](optimizer)
    for _ in range(STEPS):
        train(model, optimizer)
        take(scheduler)
    assert rates(optimizer) == pytest.approx([LR / 10] * len(optimizer.param_groups))


def test_the_docs_say_which_schedulers_keep_plain_groups():
    kept = keeping(TRANSFORMERS)
    assert set(kept.values()) == {True, False}
    assert table(kept, "transformers' schedulers, by `lr_scheduler_type`") in PAGE.read_text()
