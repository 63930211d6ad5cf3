"""What a training loop takes from a plan, beside groups: optimizers for any scheduler, and gradients clipped alike."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from mukron.params.clipping import clip
from mukron.params.errors import ParametrizationError
from mukron.params.groups import GroupRequest, scaled_groups
from mukron.params.inventory import inventory
from mukron.params.kinds import DECOUPLED, check_decay, eps_of, method_of_kind, scaling_of, takes
from mukron.params.planned import MULTIPLIER, planned
from mukron.theory import Method, get_method

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
        decoupled_weight_decay: bool | None = None,
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
            weight_decay: As in ``param_groups``. It must be decoupled, unless steps are proportional to the gradient.
            eps: The optimizer's eps at the base width. None: the default of its class.
            model: The model, if it is another copy than the one that was parametrized.
            beside: As in ``param_groups``.
            scaling: As in ``param_groups``. None: what the options of torch's, pytorch_optimizer's and dion's Muon say.
            max_precondition_dim: As in ``param_groups``. It is given to the optimizer, too.
            decoupled_weight_decay: The option of that name of torch's Adam, NAdam and RAdam. For a class that has no
                such option, and of which nothing is known: whether its weight decay is decoupled.
            options: All else that the class takes, such as ``betas=(0.9, 0.95)``.
        """
        plan, number = cast("Parametrization", self), lr
        if isinstance(lr, Tensor):
            if lr.numel() != 1:
                raise ParametrizationError(f"lr must be one number, got a tensor of shape {list(lr.shape)}")
            number = lr.item()
        law = method_of_kind(kind, method)
        divides = bool(get_method(law).factors)  # by the size of the gradient, in some form
        if get_method(law).name == "adam":
            law = "adamw"  # the same, with a decay that is checked here
        if get_method(law).name == "muon":
            scaling = scaling_of(kind, scaling, options)
        request = GroupRequest(law, cast(float, number), weight_decay, eps, beside, scaling, max_precondition_dim)
        if (key := request.format.eps_key) is not None:
            request = replace(request, eps=eps_of(kind, key, eps))
        said = {} if decoupled_weight_decay is None else {DECOUPLED: decoupled_weight_decay}
        if said != {DECOUPLED: True} or not divides or takes(kind, DECOUPLED):  # else it is for the check alone
            options |= said
        if weight_decay:
            check_decay(kind, divides, request.format.entries, options, decoupled_weight_decay)
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
