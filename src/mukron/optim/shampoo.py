"""Shampoo: preconditioned by the gradient's own second moments. Needs no hooks."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from mukron.curvature import Gathered, Listening, Memory, Sum, Window
from mukron.damping import MaxEigenvalue, Rule
from mukron.linalg import DiagonalFactor, Factor, MatrixFactor
from mukron.optim.base import WEIGHT, Blocks, SecondOrder, Settings, one_of
from mukron.optim.slots import Slot
from mukron.params import Parametrization
from mukron.theory import shampoo


class Shampoo(SecondOrder):
    """Shampoo: W <- W - lr (L + rho_L)^(-e/2) G (R + rho_R)^(-e/2) with L = sum G G^T, R = sum G^T G.

    damping: a number means ``MaxEigenvalue(number)``, which muP allows.
    e: the exponent; 1/2 is Gupta and others' own.
    memory: ``Sum()``, ``EMA(decay)`` or ``Batch()``.
    solver: "eigh", or "newton" for an iteration of matrix products.
    max_size: a side larger than this keeps only its diagonal, as an embedding's vocabulary does.
    """

    rule = MaxEigenvalue

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor = 0.1,
        *,
        damping: float | Rule = 1e-6,
        e: Fraction | int | str = Fraction(1, 2),
        memory: Memory | None = None,
        solver: str = "eigh",
        max_size: int = 8192,
        factor_every: int = 1,
        inverse_every: int = 1,
        kl_clip: float | None = None,
        graft: str | None = None,
        fallback: str = "sgd",
        exclude: tuple[str, ...] = (),
        **groups: Any,
    ) -> None:
        one_of("solver", solver, ("eigh", "newton"))
        self.method = shampoo(e)  # type: ignore[misc]
        self.max_size = max_size
        memory = Sum() if memory is None else memory
        if isinstance(memory, Window):
            raise ValueError("Shampoo's factors are matrices: choose Sum(), EMA(decay) or Batch()")
        settings = Settings(
            memory, factor_every, inverse_every, solver, kl_clip, graft, fallback, exclude=tuple(exclude)
        )
        listening = Listening(inputs=False, signals=False)
        super().__init__(model, parametrization, lr, damping=damping, listening=listening, settings=settings, **groups)

    def measure(self, slot: Slot, gathered: Gathered | None, gradients: Mapping[str, Tensor]) -> Blocks:
        return {
            block: {"L": self._moment(G.mT), "R": self._moment(G, diagonal=block == WEIGHT and slot.layout.one_hot)}
            for block, G in gradients.items()
        }

    def _moment(self, G: Tensor, diagonal: bool = False) -> Factor:
        """G^T G, or its diagonal."""
        if diagonal or G.shape[-1] > self.max_size:
            return DiagonalFactor(G.square().sum(-2))
        return MatrixFactor(G.mT @ G)
