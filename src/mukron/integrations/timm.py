"""timm's ``create_optimizer_v2``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mukron.params import Parametrization


def for_timm(
    parametrization: Parametrization, method: str, lr: float, weight_decay: float = 0.0, **options: Any
) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Make groups for timm's optimizers: ``create_optimizer_v2(model, "adamw", lr, param_group_fn=for_timm(...))``.

    They keep the plan's ratios under timm's schedulers, with ``warmup_lr`` and ``min_lr`` too, and without a scheduler:
    timm's take a group's rate from its ``initial_lr``, which is the one at the base width, and multiply what they set
    by its ``lr_scale``. Torch's schedulers know no ``lr_scale`` and would give all groups one rate, and so does the
    lower limit of timm's PlateauLRScheduler. ``Parametrization.optimizer`` is safe with every scheduler and takes
    timm's classes: ``plan.optimizer(timm.optim.get_optimizer_class("nadamw", bind_defaults=False), lr,
    method="adamw")``.

    timm gives an optimizer parameters, and no model: K-FAC, Shampoo, SOAP and Muon of mukron are made without it, as
    ``mukron.KFAC(model, plan, lr=0.05)``, and go into timm's schedulers.

    Args:
        parametrization: From ``mukron.parametrize``.
        method: The law that learning rates follow, as for ``Parametrization.param_groups``: "sgd", "adamw", "lion".
        lr: Learning rate at the base width; groups have theirs by themselves, whatever ``create_optimizer_v2`` is
            given. So are ``warmup_lr`` and ``min_lr`` of a scheduler those at the base width.
        weight_decay: Weight decay, likewise.
        **options: Other arguments of ``Parametrization.param_groups``.

    Returns:
        A function of the model.

    Example:
        >>> import torch, mukron
        >>> from mukron.integrations import for_timm
        >>> def network(width):
        ...     return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 3))
        >>> model = network(64)
        >>> plan = mukron.parametrize(model, mukron.base_shapes(network, width=16))
        >>> groups = for_timm(plan, "adamw", lr=0.1)(model)
        >>> sorted({round(group["lr"], 4) for group in groups})
        [0.025, 0.1]
    """

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        def at(rate: float) -> list[dict[str, Any]]:
            return parametrization.param_groups(method, lr=rate, weight_decay=weight_decay, model=model, **options)

        # a rate of 1 shows the multipliers, of a rate of 0 too
        return [
            {**group, "initial_lr": lr, "lr_scale": unit["lr"]} for group, unit in zip(at(lr), at(1.0), strict=True)
        ]

    return groups
