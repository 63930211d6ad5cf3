"""What a training loop takes from a plan, beside groups: optimizers for any scheduler, and gradients clipped alike."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from mukron.params.clipping import clip
from mukron.params.errors import ParametrizationError
from mukron.params.groups import GroupRequest, scaled_groups
from mukron.params.inventory import inventory
from mukron.params.planned import MULTIPLIER, method_of_kind, planned
from mukron.theory import Method

if TYPE_CHECKING:
    from mukron.params.parametrization import Parametrization


class ForTraining:
    """The part of a plan that a training loop calls."""

    _model: weakref.ref[nn.Module] | None

    def optimizer(
        self,
        kind: type[Optimizer],
        lr: float | Tensor,
        *,
        method: Method | str | None = None,
        weight_decay: float = 0.0,
        eps: float | None = None,
        model: nn.Module | None = None,
        beside: str | None = None,
        scaling: str | None = None,
        max_precondition_dim: int | None = None,
        **options: Any,
    ) -> Optimizer:
        """Make an optimizer of torch or of others for any scheduler: ``p.optimizer(torch.optim.AdamW, lr=1e-3)``.

        It takes the steps of ``kind(p.param_groups(...), **options)`` and is a ``kind`` itself. Its groups show the
        learning rate at the base width, and are multiplied by their ``lr_multiplier`` in the step alone: schedulers
        that set learning rates, or read ``defaults["lr"]``, keep the plan's ratios.

        Args:
            kind: The optimizer's class.
            lr: The learning rate at the base width; a tensor of one number where the class takes one.
            method: As in ``param_groups``. None: that of torch's own SGD, Adam, AdamW and Muon.
            weight_decay: As in ``param_groups``.
            eps: As in ``param_groups``.
            model: The model, if it is another copy than the one that was parametrized.
            beside: As in ``param_groups``.
            scaling: As in ``param_groups``.
            max_precondition_dim: As in ``param_groups``. It is given to the optimizer, too.
            options: All else that the class takes, such as ``betas=(0.9, 0.95)``.
        """
        plan, number = cast("Parametrization", self), lr
        if isinstance(lr, Tensor):
            if lr.numel() != 1:
                raise ParametrizationError(f"lr must be one number, got a tensor of shape {list(lr.shape)}")
            number = lr.item()
        law = method_of_kind(kind, method)
        request = GroupRequest(law, cast(float, number), weight_decay, eps, beside, scaling, max_precondition_dim)
        groups = [
            {**group, "lr": lr.clone() if isinstance(lr, Tensor) else lr, MULTIPLIER: multiplier}
            for multiplier, group in scaled_groups(plan, inventory(plan._checked(model)), request)
        ]
        if max_precondition_dim is not None:
            options["max_precondition_dim"] = max_precondition_dim
        return planned(kind)(groups, lr=lr, **options)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        model: nn.Module | None = None,
    ) -> Tensor:
        """Clip the gradients by a norm that means the same at every width, and return that norm.

        The norm of each parameter's gradient is taken in units of its growth since the base width, and all gradients
        are multiplied by one factor. At the base width this is ``torch.nn.utils.clip_grad_norm_``, whose norm grows
        with the width: see "Clipping" in docs/parametrization.md. With a GradScaler, unscale the gradients first.

        Args:
            max_norm: The largest norm, tuned at the base width.
            norm_type: The order of the norm; ``math.inf``: the largest entry.
            error_if_nonfinite: Raise an error if the norm is not finite. Otherwise all gradients become so too.
            foreach: Whether to use torch's functions for lists of tensors; None: where they are fast.
            model: The model, if it is another copy than the one that was parametrized.
        """
        plan = cast("Parametrization", self)
        return clip(plan, self._bound(model), max_norm, norm_type, error_if_nonfinite, foreach)

    def _bound(self, model: nn.Module | None) -> nn.Module:
        """The model that is meant: the given one, or the one that was parametrized."""
        if model is None and self._model is not None:
            model = self._model()
        if model is None:
            raise ParametrizationError("this plan is not bound to a model (or the model is gone); pass model=...")
        return model
