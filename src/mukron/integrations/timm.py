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

    timm gives an optimizer parameters, and no model: K-FAC, Shampoo, SOAP and Muon of mukron are made without it, as
    ``mukron.KFAC(model, plan, lr=0.05)``, and go into timm's schedulers.

    Args:
        parametrization: From ``mukron.parametrize``.
        method: The law that learning rates follow, as for ``Parametrization.param_groups``: "sgd", "adamw", "lion".
        lr: Learning rate, which every group then has by itself, whatever ``create_optimizer_v2`` is given.
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
        return parametrization.param_groups(method, lr=lr, weight_decay=weight_decay, model=model, **options)

    return groups
