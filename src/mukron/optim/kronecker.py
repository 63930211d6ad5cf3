"""K-FAC with powers of its factors other than one, and without one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mukron.curvature import Fisher, LayerStatistics
from mukron.damping import Adaptive, Rule
from mukron.layers import WEIGHT
from mukron.linalg import Solver
from mukron.memory import Memory
from mukron.optim.communication import Communication
from mukron.optim.docs import describe
from mukron.optim.kfac import KFAC
from mukron.optim.momentum import Momentum
from mukron.optim.options import StepRule, Trust
from mukron.optim.spec import register
from mukron.optim.table import LayerEntry
from mukron.optim.transaction import Blocks, Transaction
from mukron.params import Parametrization
from mukron.params.excluded import Excluded
from mukron.theory import FAMILIES, METHODS, kronecker


@register(
    replace(
        KFAC.spec,
        name="kronecker",
        method=METHODS["kronecker"],
        **{"lr": 0.005, "bounded_lr": 0.05, "lr_range": (-8, 1), "plain_lr_range": (-9, -1)},  # type: ignore[arg-type]
        sp_damping=None,
        stacks=False,
        family=FAMILIES["kronecker"],
    )
)
@describe
class Kronecker(KFAC):
    """K-FAC's factors to any powers: W <- W - lr (B + rho_B)^-e_B G (A + rho_A)^-e_A. Biases are divided by B alone.

    (1, 1) is K-FAC, (1, 0) FOOF, (0, 1) its mirror. Learning rates and damping follow the width by the law of the
    powers. Powers other than one are of whole matrices, by eigendecomposition or ``solver="newton"``: a step costs the
    cube of the width, however small the batch.

    Args:
        e_A: The power of A, the second moments of a layer's inputs; 0 or more.
        e_B: The power of B, the second moments of the derivatives by its outputs; 0 or more.
        damping: A number means ``Rescaled(number)``, which muP needs; or any rule of ``mukron.damping``.

    Example:
        >>> import torch, mukron
        >>> optimizer = mukron.Kronecker(torch.nn.Linear(4, 3), lr=0.1, e_A="1/2", e_B=1)
        >>> optimizer.method.title
        'Kronecker (1/2, 1)'
    """

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor | None = None,
        *,
        e_A: Fraction | int | str = Fraction(1, 2),
        e_B: Fraction | int | str = Fraction(1, 2),
        damping: float | Rule | Adaptive = 1.0,
        fisher: str | Fisher | None = None,
        likelihood: str = "categorical",
        class_dim: int | None = None,
        output: Callable[[Any], Tensor] | None = None,
        reduction: str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
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
        seed: int = 0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__", "e_A", "e_B")}
        powers = {"e_A": Fraction(e_A), "e_B": Fraction(e_B)}
        if min(powers.values()) < 0 or not any(powers.values()):
            raise ValueError(f"e_A and e_B must be 0 or more, and not both 0 (that is SGD), got {e_A} and {e_B}")
        self.method = kronecker(**powers)  # type: ignore[misc]
        whole = form == "auto" and not set(powers.values()) <= {0, 1}  # of roots whole matrices are needed anyway
        super().__init__(**{**given, "form": "matrix" if whole else form})

    def measure(self, layer: LayerEntry, statistics: LayerStatistics | None, step: Transaction) -> Blocks:
        """Measure those of A and B of a layer that have a power.

        Args:
            layer: The layer and its blocks.
            statistics: What this batch's passes gave for the layer; None: nothing.
            step: The step that is being taken; it holds the state as it will be.
        """
        factors, powers = super().measure(layer, statistics, step)[WEIGHT], self.powers_of(2)
        return {WEIGHT: {name: factor for name, factor in factors.items() if name in powers}}


@register(
    replace(
        Kronecker.spec,
        name="foof-mirror",
        method=METHODS["foof-mirror"],
        **{"lr": 0.01, "bounded_lr": 0.1, "lr_range": (-7, 1), "plain_lr_range": (-11, -2)},  # type: ignore[arg-type]
        family=None,
    )
)
@describe
class FOOFMirror(Kronecker):
    """K-FAC without A: W <- W - lr (B + rho_B)^-1 G. FOOF divides by the inputs' side alone, this by the outputs'.

    Args:
        damping: A number means ``Rescaled(number)``, which muP needs; or any rule of ``mukron.damping``.

    Example:
        >>> import torch, mukron
        >>> optimizer = mukron.FOOFMirror(torch.nn.Linear(4, 3), lr=0.1, damping=1.0)
    """

    useless = dict.fromkeys(("e_A", "e_B"), "has the powers 0 and 1")

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor | None = None,
        *,
        damping: float | Rule | Adaptive = 1.0,
        fisher: str | Fisher | None = None,
        likelihood: str = "categorical",
        class_dim: int | None = None,
        output: Callable[[Any], Tensor] | None = None,
        reduction: str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
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
        seed: int = 0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(**given, e_A=0, e_B=1)
