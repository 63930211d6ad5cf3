"""Every scheduler of torch, with the settings that may treat groups alike, and whether ratios between groups stay."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from mukron.params import base_shapes, parametrize
from networks import Net

LR, STEPS, BASE, WIDTH = 0.1, 12, 8, 32


def rates(optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def in_a_row(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts)


TORCH = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=10, power=2.0),
    "SequentialLR": in_a_row,
    "ChainedScheduler": chained,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "CosineAnnealingLR(eta_min=...)": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10, eta_min=LR / 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "CosineAnnealingWarmRestarts(eta_min=...)": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, T_0=4, eta_min=LR / 10
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "ReduceLROnPlateau(min_lr=...)": lambda o: lr_scheduler.ReduceLROnPlateau(
        o, factor=0.5, patience=0, min_lr=LR / 10
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=LR / 10, max_lr=LR, step_size_up=3),
    "CyclicLR with lists": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=[lr / 10 for lr in rates(o)], max_lr=rates(o), step_size_up=3
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=STEPS + 2),
    "OneCycleLR with a list": lambda o: lr_scheduler.OneCycleLR(o, max_lr=rates(o), total_steps=STEPS + 2),
    "SWALR": lambda o: SWALR(o, swa_lr=LR / 20, anneal_epochs=4),
    "SWALR with a list": lambda o: SWALR(o, swa_lr=[lr / 20 for lr in rates(o)], anneal_epochs=4),
}


def plan_of(width: int = WIDTH):
    torch.manual_seed(0)
    model = Net(width).double()
    return model, parametrize(model, base_shapes(Net, width=BASE))


def take(scheduler) -> None:
    """One step of a scheduler; those that look at a loss see one that never falls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*epoch parameter in `scheduler.step")  # of torch 2.6's own SequentialLR
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) or hasattr(scheduler, "best"):
            scheduler.step(1.0)
        else:
            scheduler.step()


def moved(model: nn.Module, optimizer) -> dict[str, float]:
    """How far one step moves each parameter against a gradient of ones, without what earlier steps have left."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {name: float((before[name] - p.detach()).mean()) for name, p in model.named_parameters()}


def spread_of_steps(make, schedule, steps: int = STEPS) -> tuple[float, int]:
    """How far ratios of steps drift from the plan's, at most over all steps, and how many different steps there were.

    make: an optimizer of SGD's kind for a model and its plan.
    """
    model, plan = plan_of()
    optimizer = make(model, plan)
    laws = {name: scale.lr for name, scale in plan.scales("sgd").items()}
    assert len(set(laws.values())) == 3
    scheduler, worst, sizes = schedule(optimizer), 0.0, set()
    for _ in range(steps):
        units = [size / laws[name] for name, size in moved(model, optimizer).items()]
        if max(units) > 1e-9:
            worst = max(worst, max(units) / max(min(units), 1e-12) - 1)
        sizes.add(round(max(units), 9))
        take(scheduler)
    return worst, len(sizes)


def keeping(schedules) -> dict[str, bool]:
    """By scheduler, whether plain groups keep the plan's ratios."""
    from torch.optim import SGD

    return {
        name: spread_of_steps(lambda _, plan: SGD(plan.param_groups("sgd", lr=LR), lr=LR, momentum=0.9), schedule)[0]
        < 1e-6
        for name, schedule in schedules.items()
    }


def table(kept: dict[str, bool], whose: str) -> str:
    """Two rows: which schedulers keep ratios between plain groups, and which do not."""
    keep, others = (", ".join(f"`{name}`" for name in kept if kept[name] == wanted) for wanted in (True, False))
    others = others.replace("with a list`", "` with a list").replace("with lists`", "` with lists")
    keep = keep.replace(" with a list`", "` with a list").replace(" with lists`", "` with lists")
    head = f"| groups of `p.param_groups` | {whose} |\n| --- | --- |\n"
    return f"{head}| keep the plan's ratios | {keep} |\n| do not | {others} |\n"
