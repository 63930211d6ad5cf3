"""FOOF: K-FAC without B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mukron.optim import sizes
from mukron.optim.kfac import KFAC
from mukron.optim.options import FISHER, without
from mukron.optim.spec import register, with_momentum
from mukron.params import Parametrization
from mukron.theory import METHODS


@register(
    replace(
        KFAC.spec,
        name="foof",
        method=METHODS["foof"],
        lr=0.02,
        lr_range=(-9, 0),
        options=without(KFAC.spec.options, *(option.name for option in FISHER)),
        sp_damping=None,
        captures=("inputs",),
        arguments=with_momentum,
        state_size=sizes.input_factor,
    )
)
class FOOF(KFAC):
    """K-FAC without B: W <- W - lr G (A + rho_A)^-1. No Fisher, so no extra backward pass."""

    def __init__(
        self, model: nn.Module, parametrization: Parametrization | None = None, lr: float | Tensor = 0.1, **options: Any
    ) -> None:
        useless = {"fisher", "likelihood", "class_dim", "reduction", "grad_scaler", "seed"} & set(options)
        if useless:
            raise TypeError(f"FOOF has no Fisher factor: {', '.join(sorted(useless))} would have no effect")
        super().__init__(model, parametrization, lr, **options)
