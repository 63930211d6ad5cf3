"""What a training loop takes from a plan, beside parameter groups: gradients clipped alike at every width."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from mukron.params.clipping import clip
from mukron.params.errors import ParametrizationError

if TYPE_CHECKING:
    from mukron.params.parametrization import Parametrization


class ForTraining:
    """The part of a plan that a training loop calls."""

    _model: weakref.ref[nn.Module] | None

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
