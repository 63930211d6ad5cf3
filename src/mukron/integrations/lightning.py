"""Lightning's ``configure_optimizers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mukron.integrations.building import build_optimizer
from mukron.params import Parametrization


def for_lightning(
    model: nn.Module,
    kind: type[Optimizer],
    parametrization: Parametrization | None = None,
    lr: float | None = None,
    *,
    schedule: Callable[[Optimizer], Any] | None = None,
    interval: str = "step",
    monitor: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Build what ``configure_optimizers`` returns: ``return for_lightning(self.network, mukron.KFAC, plan, lr=0.05)``.

    Args:
        model: The network that ``training_step`` calls, not the ``LightningModule`` around it.
        kind: The class, as ``mukron.KFAC`` or ``torch.optim.AdamW``.
        parametrization: From ``mukron.parametrize``. None: the standard parametrization.
        lr: Learning rate, as for ``build_optimizer``.
        schedule: Builds a scheduler of learning rates from the optimizer. None: there is none.
        interval: When the scheduler steps, "step" or "epoch".
        monitor: The name of the logged number that the scheduler follows, which ``ReduceLROnPlateau`` needs.
        **options: Other arguments of the class.

    Returns:
        The optimizer and its scheduler, by the names that Lightning has for them.

    Raises:
        TypeError: The model is a LightningModule.

    Example:
        >>> import torch, mukron
        >>> from mukron.integrations import for_lightning
        >>> sorted(for_lightning(torch.nn.Linear(4, 3), mukron.Shampoo, schedule=lambda o: "a scheduler"))
        ['lr_scheduler', 'optimizer']
    """
    if hasattr(model, "configure_optimizers"):
        raise TypeError(
            f"{type(model).__name__} is a LightningModule, whose training_step Lightning calls; pass the network that "
            "training_step calls, as self.network"
        )
    optimizer = build_optimizer(kind, model, parametrization, lr, **options)
    if schedule is None:
        return {"optimizer": optimizer}
    scheduler = {"scheduler": schedule(optimizer), "interval": interval}
    return {"optimizer": optimizer, "lr_scheduler": scheduler if monitor is None else {**scheduler, "monitor": monitor}}
