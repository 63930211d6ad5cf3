"""FOOF: K-FAC without B."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mukron.damping import Adaptive, Rule
from mukron.optim import docs, sizes
from mukron.optim.kfac import KFAC, OF_THE_FISHER
from mukron.optim.options import Communication, Excluded, Memory, Momentum, Solver, StepRule, Trust
from mukron.optim.run_options import without
from mukron.optim.spec import register, with_momentum
from mukron.params import Parametrization
from mukron.theory import METHODS


@register(
    replace(
        KFAC.spec,
        name="foof",
        method=METHODS["foof"],
        **{"lr": 0.02, "bounded_lr": 1.0, "lr_range": (-6, 2), "plain_lr_range": (-9, 0)},  # type: ignore[arg-type]
        options=without(KFAC.spec.options, "fisher", "likelihood"),
        sp_damping=None,
        captures=("inputs",),
        arguments=with_momentum,
        state_size=sizes.input_factor,
    )
)
@docs.describe
class FOOF(KFAC):
    """K-FAC without B: W <- W - lr G (A + rho_A)^-1. It has no Fisher, so no extra backward pass.

    Args:
        damping: A number means ``Rescaled(number)``, which muP needs; or any rule of ``mukron.damping``.

    Example:
        >>> import torch, mukron
        >>> optimizer = mukron.FOOF(torch.nn.Linear(4, 3), lr=0.1, damping=1.0)
    """

    useless = dict.fromkeys(OF_THE_FISHER, "has no Fisher factor")

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor | None = None,
        *,
        damping: float | Rule | Adaptive = 1.0,
        output: Callable[[Any], Tensor] | None = None,
        class_dim: int | None = None,
        reduction: str | None = None,
        sharing: str = "expand",
        memory: str | Memory | None = None,
        form: str = "auto",
        fused: bool = False,
        solver: str | Solver = "cholesky",
        factor_every: int = 1,
        inverse_every: int | None = None,
        refresh_warmup: int | None = None,
        start: int = 0,
        trust: str | Trust | None = "spectral",
        fallback: str | StepRule | None = None,
        fallback_lr: float | None = None,
        momentum: float | Momentum | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        maximize: bool = False,
        exclude: tuple[Excluded, ...] | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
        communication: str | Communication = "auto",
    ) -> None:
        super().__init__(**{name: value for name, value in locals().items() if name not in ("self", "__class__")})
