"""An optimizer for a model and its plan, whether the class is of mukron or of torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mukron.optim.optimizer import SecondOrder
from mukron.params import Parametrization
from mukron.params.groups import MATRIX_METHODS


def build_optimizer(
    kind: type[Optimizer],
    model: nn.Module,
    parametrization: Parametrization | None = None,
    lr: float | None = None,
    **options: Any,
) -> Optimizer:
    """Build an optimizer of mukron or of torch, with the learning rates that a plan gives.

    Those of mukron find the logits in what models of transformers return, unless ``output=`` is given.

    Args:
        kind: The class, as ``mukron.KFAC`` or ``torch.optim.AdamW``.
        model: The model.
        parametrization: From ``mukron.parametrize``. None: the standard parametrization.
        lr: Learning rate. None: mukron's usual one; classes of torch need a number beside a plan.
        **options: Other arguments of the class; beside a plan also those of ``Parametrization.optimizer``, such as
            ``method=`` for a class whose law is not known.

    Returns:
        The optimizer. One of torch's is safe with any scheduler, as ``Parametrization.optimizer`` makes it.

    Raises:
        TypeError: There is no such class, or a class of torch got a plan and no learning rate.
        ValueError: The class takes matrices alone.

    Example:
        >>> import torch, mukron
        >>> from mukron.integrations import build_optimizer
        >>> model = torch.nn.Linear(4, 3)
        >>> build_optimizer(torch.optim.AdamW, model, lr=0.1).param_groups[0]["lr"]
        0.1
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"expected a class of optimizers, as mukron.KFAC or torch.optim.AdamW, got {kind!r:.80}")
    if issubclass(kind, SecondOrder):
        if kind.spec.captures and options.get("output") is None:
            options["output"] = logits_of
        return kind(model, parametrization, lr, **options)
    given: dict[str, Any] = {} if lr is None else {"lr": lr}
    if parametrization is None:
        return kind([p for p in model.parameters() if p.requires_grad], **given, **options)
    if lr is None:
        raise TypeError(f"the learning rates of {kind.__name__}'s groups follow from one: give lr=...")
    if str(options.get("method", kind.__name__)).lower() in MATRIX_METHODS:
        raise ValueError(
            f"{kind.__name__} takes matrices alone, and another optimizer must train the other parameters; "
            f"use mukron's own, which trains all of them"
        )
    usual = inspect.signature(kind).parameters.get("weight_decay")
    options.setdefault("weight_decay", 0.0 if usual is None else usual.default)
    return parametrization.optimizer(kind, lr, model=model, **options)


def logits_of(returned: Any) -> Tensor:
    """Find the logits in what a model returns: a tensor, ``returned.logits``, or the first tensor after its loss.

    Args:
        returned: What the model returned.

    Returns:
        The logits.

    Raises:
        TypeError: There are none.

    Example:
        >>> import torch
        >>> from mukron.integrations import logits_of
        >>> logits_of({"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3)}).shape
        torch.Size([2, 3])
    """
    if isinstance(returned, Tensor):
        return returned
    found = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
    if isinstance(returned, (tuple, list)) and found is None:
        found = next((x for x in returned if isinstance(x, Tensor) and x.ndim), None)
    if not isinstance(found, Tensor):
        names = f" with {', '.join(map(repr, returned))}" if isinstance(returned, Mapping) else ""
        raise TypeError(
            f"the model returned a {type(returned).__name__}{names}, and no logits; say where its output is: "
            "output=lambda returned: returned.prediction"
        )
    return found
