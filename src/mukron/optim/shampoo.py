"""Shampoo: preconditioned by the gradient's own second moments. Needs no hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mukron import readers as read
from mukron.curvature import Gathered, Listening, Memory, Sum, Window
from mukron.damping import MaxEigenvalue, Rule
from mukron.linalg import (
    DiagonalFactor,
    Factor,
    FactorizationError,
    LowRank,
    Matrix,
    MatrixFactor,
    Operator,
    Turned,
    add_to_diagonal,
    kept_factor,
    turn,
)
from mukron.optim import sizes
from mukron.optim.base import WEIGHT, Blocks, Move, SecondOrder, Settings, one_of
from mukron.optim.options import EVERY_LAYER, FUSED, INTERVALS, Option, memory_in_matrices
from mukron.optim.slots import Slot
from mukron.optim.spec import MethodSpec, register
from mukron.params import Parametrization
from mukron.precond import Layer, Preparation
from mukron.theory import FAMILIES, METHODS, shampoo

SOLVERS = ("eigh", "newton", "tracked")


@register(
    MethodSpec(
        name="shampoo",
        method=METHODS["shampoo"],
        lr=0.005,
        lr_range=(-9, -1),
        options=(
            *EVERY_LAYER,
            *INTERVALS,
            Option.typed("memory", memory_in_matrices, "what factors remember: sum (the default), ema:DECAY or batch"),
            FUSED,
            Option("solver", read.one_of(SOLVERS), f"how roots are computed: {', '.join(SOLVERS)}"),
            Option("tolerance", read.number(), "of solver=tracked: the relative error at which a basis is renewed"),
            Option(
                "max_size",
                read.whole(1),
                "the longest side of a layer that keeps a whole factor; of longer ones the diagonal is kept",
            ),
        ),
        damping=MaxEigenvalue(1e-6),
        state_size=sizes.gradient_moments,
        largest_side=4096,  # roots are of whole matrices: above this one takes minutes on two cores
        family=FAMILIES["shampoo"],
    )
)
class Shampoo(SecondOrder):
    """Shampoo: W <- W - lr (L + rho_L)^(-e/2) G (R + rho_R)^(-e/2) with L = sum G G^T, R = sum G^T G.

    damping: a number means ``MaxEigenvalue(number)``, which muP allows.
    e: the exponent; 1/2 is Gupta and others' own.
    memory: ``Sum()``, ``EMA(decay)`` or ``Batch()``.
    solver: "eigh"; "newton" for an iteration of matrix products; or "tracked", which keeps an eigenbasis from step to
        step, corrects for what has changed, and renews it when its error would exceed the tolerance.
    tolerance: of "tracked", the relative error of a factor's root in the worst direction seen; most steps' is far less.
    fused: where the batch is small beside a layer, take its gradient as D^T H from the batch's signals and inputs and
        never form it, as K-FAC's ``fused`` does: products then cost the batch times the width squared, not its cube.
    max_size: a side larger than this keeps only its diagonal, as an embedding's vocabulary does.
    """

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
        fused: bool = False,
        tolerance: float = 0.02,
        max_size: int = 8192,
        factor_every: int = 1,
        inverse_every: int = 1,
        kl_clip: float | None = None,
        graft: str | None = None,
        fallback: str = "sgd",
        exclude: tuple[str, ...] = (),
        **groups: Any,
    ) -> None:
        one_of("solver", solver, SOLVERS)
        self.method = shampoo(e)  # type: ignore[misc]
        if not tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {tolerance}")
        self.max_size, self.tolerance = max_size, tolerance
        self._turned: dict[tuple[str, str], tuple[Move, dict[str, Tensor | None]]] = {}  # of the step being made
        memory = Sum() if memory is None else memory
        if isinstance(memory, Window):
            raise ValueError("Shampoo's factors are matrices: choose Sum(), EMA(decay) or Batch()")
        settings = Settings(
            memory, factor_every, inverse_every, solver, kl_clip, graft, fallback, exclude=tuple(exclude)
        )
        listening = Listening(inputs=False, signals=False, fused=fused)
        super().__init__(model, parametrization, lr, damping=damping, listening=listening, settings=settings, **groups)

    def measure(self, slot: Slot, gathered: Gathered | None, gradients: Mapping[str, Tensor]) -> Blocks:
        whole: dict[str, Move] = dict(gradients)
        if self._halves(slot):
            own = self._gradient_of(slot, WEIGHT, slot.parameters[WEIGHT])
            assert own is not None
            whole[WEIGHT] = own
        tracked = self.settings.solver == "tracked"
        return {block: (self._in_basis if tracked else self._moments)(slot, block, G) for block, G in whole.items()}

    def _moments(self, slot: Slot, block: str, G: Move) -> dict[str, Factor]:
        rows_L, rows_R = rows_of(G)
        return {"L": self._moment(rows_L), "R": self._moment(rows_R, diagonal=self._one_hot(slot, block))}

    def prepare(self, layers: Sequence[Layer], rescue: bool = True) -> Preparation:
        prepared, numbers = super().prepare(layers, rescue)
        uses = self.settings.inverse_every
        for (factors, _), found in zip(layers, prepared, strict=True):
            if isinstance(found, FactorizationError):
                continue
            operators, _ = found
            for name, other in (("L", "R"), ("R", "L")):
                operator = operators[name]
                if isinstance(operator, Turned) and uses > 1 and uses * factors[other].d > factors[name].d:
                    operators[name] = Matrix(operator.matrix())  # it will be applied often enough to be multiplied out
        return prepared, numbers

    def precondition(self, slot: Slot, block: str, G: Move, operators: Mapping[str, Mapping[str, Operator]]) -> Move:
        G_turned, bases = self._turned.pop((slot.name, block), (None, {}))
        sides = operators[block]
        fresh = self.steps % self.settings.factor_every == 0
        if G_turned is None or not fresh or any(not sides[name].lies_in(Q) for name, Q in bases.items()):
            return super().precondition(slot, block, G, operators)
        # the bases that this step's factors were measured in still stand: Q_L C_L (Q_L^T G Q_R) C_R Q_R^T
        L, R = sides["L"], sides["R"]
        if isinstance(G_turned, LowRank):
            return LowRank(L.back(L.inside(G_turned.D)), R.back(R.inside(G_turned.H)))
        return L.back(R.back(R.inside(L.inside(G_turned.mT).mT)).mT).mT

    @property
    def renewals(self) -> dict[str, int]:
        """With solver="tracked": how often the basis of each factor was renewed, by parameter and side."""
        found = {}
        for slot in self.slots.values():
            for block, sides in self.state.get(slot.anchor, {}).get("memory", {}).items():
                for name, kept in sides.items():
                    if "renewals" in kept:
                        found[f"{slot.name}.{block} {name}"] = kept["renewals"]
        return found

    def _is_diagonal(self, d: int, one_hot: bool = False) -> bool:
        return one_hot or d == 1 or d > self.max_size

    def _one_hot(self, slot: Slot, block: str) -> bool:
        return block == WEIGHT and slot.layout.one_hot

    def _in_basis(self, slot: Slot, block: str, G: Move) -> dict[str, Factor]:
        """The same, in the bases that are kept: Q_L^T G Q_R serves both sides."""
        memory = self.state[slot.anchor].get("memory", {}).get(block, {})
        kept = {name: dict(memory.get(name, {})) for name in ("L", "R")}  # what changes counts once the step does
        d_out, d_in = (G.D.shape[-1], G.H.shape[-1]) if isinstance(G, LowRank) else G.shape[-2:]
        diagonal = {"L": self._is_diagonal(d_out), "R": self._is_diagonal(d_in, self._one_hot(slot, block))}
        if isinstance(G, LowRank):
            G = LowRank(G.D if diagonal["L"] else turn(kept["L"], G.D), G.H if diagonal["R"] else turn(kept["R"], G.H))
        else:
            G = G if diagonal["L"] else turn(kept["L"], G.mT).mT
            G = G if diagonal["R"] else turn(kept["R"], G)
        rows = dict(zip(("L", "R"), rows_of(G), strict=True))
        self._turned[slot.name, block] = G, {name: each.get("Q") for name, each in kept.items()}
        return {
            name: self._moment(rows[name], True)
            if diagonal[name]
            else kept_factor(kept[name], rows[name], self.tolerance)
            for name in rows
        }

    def _moment(self, G: Tensor, diagonal: bool = False) -> Factor:
        """G^T G, or its diagonal."""
        if self._is_diagonal(G.shape[-1], diagonal):
            return DiagonalFactor(G.square().sum(-2))
        return MatrixFactor(G.mT @ G)


def rows_of(G: Move) -> tuple[Tensor, Tensor]:
    """Rows X and Y with X^T X = G G^T and Y^T Y = G^T G, as few as G has.

    Of G = D^T H they are N: with H H^T = C C^T, G G^T = (C^T D)^T (C^T D). A hair of the trace keeps C real.
    """
    if not isinstance(G, LowRank):
        return G.mT, G
    return _root(G.H).mT @ G.D, _root(G.D).mT @ G.H


def _root(X: Tensor) -> Tensor:
    K = X @ X.mT
    trace = K.diagonal(dim1=-2, dim2=-1).sum(-1)
    hair = 4 * torch.finfo(K.dtype).eps * trace
    lower, info = torch.linalg.cholesky_ex(add_to_diagonal(K, hair + (trace == 0)))
    root: Tensor = torch.where((info == 0)[..., None, None], lower, torch.nan)  # not finite: the step sees it
    return torch.where((trace == 0)[..., None, None], 0.0, root)
