"""The Trainer of transformers, and those that derive from it (trl, sentence-transformers)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from mukron.integrations.building import build_optimizer
from mukron.optim.optimizer import SecondOrder
from mukron.params import Parametrization


class OptimizerFactory:
    """What the Trainer calls in place of a class, with its model and the options.

    Example:
        >>> import torch
        >>> from mukron.integrations.trainer import OptimizerFactory
        >>> type(OptimizerFactory()(torch.nn.Linear(4, 3), kind=torch.optim.SGD)).__name__
        'SGD'
    """

    def __call__(self, model: nn.Module, *, kind: type[Optimizer], **options: Any) -> Optimizer:
        """Build the optimizer.

        Args:
            model: The Trainer's model.
            kind: The class of the optimizer.
            **options: Other arguments of ``build_optimizer``.
        """
        return build_optimizer(kind, model, **options)


def for_trainer(
    kind: type[Optimizer], parametrization: Parametrization | None = None, lr: float | None = None, **options: Any
) -> tuple[type[OptimizerFactory], dict[str, Any]]:
    """Name an optimizer to the Trainer: ``Trainer(..., optimizer_cls_and_kwargs=for_trainer(mukron.KFAC, plan))``.

    The Trainer then builds it for its model, on the model's device. Learning rate and weight decay are those given
    here, not those of ``TrainingArguments``, which the Trainer hands to its own optimizers alone.

    Args:
        kind: The class, as ``mukron.KFAC`` or ``torch.optim.AdamW``.
        parametrization: From ``mukron.parametrize``. None: the standard parametrization.
        lr: Learning rate, as for ``build_optimizer``.
        **options: Other arguments of the class.

    Returns:
        A factory and its arguments.

    Raises:
        ValueError: ``fused=True`` with an optimizer of mukron, whose gradients the Trainer changes.

    Example:
        >>> import mukron
        >>> from mukron.integrations import for_trainer
        >>> factory, options = for_trainer(mukron.KFAC, lr=0.05)
        >>> options["lr"]
        0.05
    """
    if options.get("fused") and isinstance(kind, type) and issubclass(kind, SecondOrder):
        raise ValueError(
            f"fused=True of {kind.__name__} does not work in the Trainer, which multiplies all gradients by a factor "
            "at every step, with max_grad_norm=0 too (by 1 then); gradients that fused=True does not form would be "
            "left out of that. Leave out fused=True: it changes what a step costs, not the step"
        )
    return OptimizerFactory, {"kind": kind, "parametrization": parametrization, "lr": lr, **options}
