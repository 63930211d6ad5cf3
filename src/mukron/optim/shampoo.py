"""Shampoo: preconditioned by the gradient's own second moments. Needs no hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mukron import readers as read
from mukron.arguments import check_whole
from mukron.curvature import CaptureOptions, LayerStatistics
from mukron.damping import MaxEigenvalue, Rule
from mukron.layers import BIAS, WEIGHT
from mukron.linalg import (
    DiagonalFactor,
    Eigh,
    Factor,
    Identity,
    LowRank,
    MatrixFactor,
    Newton,
    Solver,
    State,
    Tracked,
    add_to_diagonal,
    kept_factor,
    turn,
)
from mukron.memory import EMA, Batch, Memory, Sum, Window
from mukron.optim import sizes
from mukron.optim.direction import apply, dense, momentum_on_gradient, whole_gradient
from mukron.optim.docs import describe
from mukron.optim.momentum import Momentum
from mukron.optim.optimizer import SecondOrder
from mukron.optim.options import StepOptions, StepRule, Trust
from mukron.optim.run_options import CUT, EVERY_LAYER, FUSED, INTERVALS, SPLIT, Option, memory_in_matrices
from mukron.optim.spec import MethodSpec, register
from mukron.optim.table import LayerEntry
from mukron.optim.transaction import Blocks, Transaction, measures
from mukron.optim.units import gradients_to_square, unit_of
from mukron.optim.update import Move, times
from mukron.params import Parametrization
from mukron.params.excluded import Excluded
from mukron.theory import FAMILIES, METHODS, shampoo

LEAST_SIGNAL = 1e-4  # of a bias's gradient, beside its weight's for one input: below that it may be rounding
ROOT_SOLVERS = ("eigh", "newton", "tracked")


@register(
    MethodSpec(
        name="shampoo",
        method=METHODS["shampoo"],
        lr=0.005,
        lr_range=(-8, 1),
        plain_lr_range=(-9, -1),
        bounded_lr=0.05,
        options=(
            *EVERY_LAYER,
            *INTERVALS,
            Option.typed("memory", memory_in_matrices, "what factors remember: sum, ema:DECAY or batch"),
            FUSED,
            CUT,
            SPLIT,
            Option("solver", read.one_of(ROOT_SOLVERS), f"how roots are computed: {', '.join(ROOT_SOLVERS)}"),
            Option(
                "tolerance",
                read.optional(read.number(above=0)),
                "of solver=tracked: the relative error at which a basis is renewed",
            ),
            Option(
                "max_size",
                read.whole(1),
                "the longest side of a layer that has a factor; where one is longer, the other's has the whole power",
            ),
        ),
        damping=MaxEigenvalue(1e-6),
        state_size=sizes.gradient_moments,
        largest_side=3000,  # roots are of whole matrices: above this one takes minutes on two cores
        family=FAMILIES["shampoo"],
    )
)
@describe
class Shampoo(SecondOrder):
    """Shampoo: W <- W - lr (L + rho_L)^(-e/2) G (R + rho_R)^(-e/2) with L = sum G G^T, R = sum G^T G.

    A bias is a tensor of order one and has one factor: b <- b - lr (L + rho_L)^-e g (Gupta and others 2018). A matrix
    with a factor on one side alone has that one to the same power, W <- W - lr (L + rho_L)^-e G: its steps are as long
    as with both, and learning rates follow the same law.

    Args:
        damping: A number means ``MaxEigenvalue(number)``, which muP allows. None: 1e-6; beside a ``trust`` 1e-4 with
            ``Sum()`` and 1e-2 with ``Batch()``.
        e: The exponent; 1/2 is the usual one.
        sides: Which sides of a matrix have a factor: "both", "input" (R) or "output" (L).
        memory: What factors remember: ``Sum()``, ``EMA(decay)`` or ``Batch()``, or text such as "ema:0.99". None:
            ``EMA()`` with a ``trust``, else ``Sum()``.
        solver: How roots are made: "eigh" or ``Eigh()``; "newton" or ``Newton()``, an iteration of matrix products;
            "tracked" or ``Tracked(tolerance)``, an eigenbasis that is kept from step to step.
        fused: Where the batch is small beside a layer, take its gradient as D^T H from the batch's signals and inputs
            and never form it: products then cost the batch times the width squared, not its cube. See ``KFAC``.
        tolerance: Of the solver "tracked"; the same as ``Tracked(tolerance)``.
        max_size: A side longer than this has no factor; the other side's has the whole power. An embedding keeps the
            diagonal of R, over its vocabulary, whatever its length. A matrix with two longer sides is refused: cut it
            into blocks, ``block``.

    Example:
        >>> import torch, mukron
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = mukron.Shampoo(model, lr=0.1, memory=mukron.EMA(0.99))
    """

    by_block = True

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor | None = None,
        *,
        damping: float | Rule | None = None,
        e: Fraction | int | str = Fraction(1, 2),
        sides: str = "both",
        memory: str | Memory | None = None,
        solver: str | Solver = "eigh",
        fused: bool = False,
        tolerance: float | None = None,
        max_size: int = 8192,
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
        block: int | None = None,
        split: Mapping[str, int | str] | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
    ) -> None:
        self.method = shampoo(e, str(sides))  # type: ignore[misc]
        solver = Solver.of(solver, (Eigh, Newton, Tracked))
        if tolerance is not None:
            if not isinstance(solver, Tracked):
                raise ValueError(f'tolerance={tolerance} is for solver="tracked"; {solver} has none')
            solver = Tracked(tolerance)
        check_whole("max_size", max_size)
        if max_size < 1:
            raise ValueError(f"max_size must be at least 1, got {max_size}")
        self.max_size = max_size
        bound = Trust.of(trust)
        options = StepOptions.of(
            self.method,
            bound,
            memory=(Sum() if bound is None else EMA()) if memory is None else Memory.of(memory),
            factor_every=factor_every,
            inverse_every=inverse_every,
            solver=solver,
            refresh_warmup=refresh_warmup,
            start=start,
            fallback=fallback,
            exclude=exclude,
            block=block,
            split=split,
        )
        if fused and (block is not None or split):
            raise ValueError("fused=True takes gradients as D^T H, which cannot be cut: leave out block= and split=")
        if isinstance(options.memory, Window):
            raise ValueError("Shampoo's factors are matrices: choose Sum(), EMA(decay) or Batch()")
        super().__init__(
            model,
            parametrization,
            lr,
            damping=_usual_damping(options) if damping is None else damping,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            decoupled=decoupled,
            maximize=maximize,
            fallback_lr=fallback_lr,
            params=params,
            process_group=process_group,
            options=options,
            capture_options=CaptureOptions(inputs=False, signals=False, fused=fused),
        )

    def check_tables(self) -> None:
        """Refuse layers without a factor on any side: their step would be the gradient itself."""
        refused = [
            layer for layer in self.layers.values() if not all(self.factors_of(layer, block) for block in layer.blocks)
        ]
        if refused:
            named = ", ".join(f'"{layer.name}" [{layer.layer.d_out}, {layer.layer.d_in}]' for layer in refused)
            blocks = not (self.capture_options.fused or any(layer.layer.one_hot for layer in refused))
            raise ValueError(
                f"Shampoo: {named}: no side that could have a factor is within max_size={self.max_size}. Raise max_size"
                + (f", or cut matrices into blocks: block={self.max_size}" if blocks else "")
            )

    def notes(self) -> list[str]:
        """Which layers have a factor on one side alone, and the law that they follow."""
        one_sided: dict[str, list[str]] = {}
        for name, layer in self.layers.items():
            factors = self.factors_of(layer, WEIGHT) if WEIGHT in layer.blocks else ()
            if len(factors) == 1:
                one_sided.setdefault(factors[0], []).append(name)
        e = self.method.e_A
        forms = {"L": f"L^-{e} G", "R": f"G R^-{e}"}
        return [
            f"one side has a factor, {forms[name]}, with the learning rates and damping of both sides: {', '.join(of)}"
            for name, of in one_sided.items()
        ]

    def factors_of(self, layer: LayerEntry, block: str) -> tuple[str, ...]:
        """Which of L and R the gradient of a block has. A bias, a matrix of one column, has one of them.

        Args:
            layer: The layer and its blocks.
            block: The weight or the bias.
        """
        matrix, named = layer.layer, [statistic.name for statistic, _ in self.method.factors]
        d_in = 1 if block == BIAS or matrix.one_hot else matrix.d_in  # a diagonal over tokens is never too long
        sizes = {"L": matrix.d_out, "R": d_in}
        factors = tuple(name for name in named if sizes[name] <= self.max_size)
        return factors[:1] if block == BIAS else factors

    def measure(self, layer: LayerEntry, statistics: LayerStatistics | None, step: Transaction) -> Blocks:
        """Make L and R of a layer's gradient and of what is remembered.

        Args:
            layer: The layer and its blocks.
            statistics: What this batch's passes gave for the layer; None: nothing.
            step: The step that is being taken; it holds the state as it will be.
        """
        memory = step.state_of(layer.anchor).get("memory", {})
        blocks: Blocks = {}
        for block, G in gradients_to_square(step, layer).items():
            kept = {name: dict(memory.get(block, {}).get(name, {})) for name in self.factors_of(layer, block)}
            blocks[block] = self._factors(layer, block, G, kept, step)
        return blocks

    def _factors(
        self, layer: LayerEntry, block: str, G: Move, kept: Mapping[str, State], step: Transaction
    ) -> dict[str, Factor]:
        """Those of L and R that are kept; tracked ones are measured in their bases, where Q_L^T G Q_R serves both."""
        d_out, d_in = (G.D.shape[-1], G.H.shape[-1]) if isinstance(G, LowRank) else G.shape[-2:]
        one_hot = block == WEIGHT and layer.layer.one_hot
        diagonal = {"L": d_out == 1, "R": one_hot or d_in == 1}
        solver = self.options.solver
        if isinstance(solver, Tracked):
            G = _turned(G, {name: side for name, side in kept.items() if not diagonal[name]})
            step.scratch[layer.name, block] = G, {name: side.get("Q") for name, side in kept.items()}
        factors: dict[str, Factor] = {}
        for name in kept:
            rows = rows_of(G, name)
            if diagonal[name]:
                factors[name] = DiagonalFactor(rows.square().sum(-2))
            elif isinstance(solver, Tracked):
                steps, other = self.options.inverse_every, d_in if name == "L" else d_out
                factors[name] = kept_factor(kept[name], rows, solver.tolerance, steps * other if steps > 1 else 0)
            else:
                factors[name] = MatrixFactor(rows.mT @ rows)
        return factors

    def powers_of(self, number: int) -> dict[str, Fraction]:
        """By factor, the power that a gradient is divided by: e in all.

        Args:
            number: How many of L and R there are.
        """
        return dict.fromkeys(("L", "R"), self.method.e_A / number)

    def precondition(self, layer: LayerEntry, block: str, G: Move, step: Transaction) -> Move:
        """Apply the roots of L and R to the gradient of a block.

        Args:
            layer: The layer and its blocks.
            block: The weight or the bias.
            G: The gradient of the block.
            step: The step that is being taken; it holds the state as it will be.
        """
        unit, e = unit_of(step, layer, block), float(self.method.e_A)
        move = times(self._precondition(layer, block, times(G, 1 / unit), step), unit ** (1 - 2 * e))
        return times(move, _share_of_signal(step, layer)) if block == BIAS and self.options.trust is not None else move

    def _precondition(self, layer: LayerEntry, block: str, G: Move, step: Transaction) -> Move:
        sides = step.value(layer, "operators")[block]
        G_turned, bases = step.scratch.get((layer.name, block), (None, {}))
        fresh = measures(self) and not momentum_on_gradient(layer.blocks[block])
        if G_turned is None or not fresh or any(not sides[name].lies_in(bases[name]) for name in sides):
            return apply(sides, G)
        # the bases that this step's factors were measured in still stand: Q_L C_L (Q_L^T G Q_R) C_R Q_R^T
        L, R = (sides.get(name, Identity()) for name in ("L", "R"))
        if isinstance(G_turned, LowRank):
            return LowRank(L.back(L.inside(G_turned.D)), R.back(R.inside(G_turned.H)))
        moved: Tensor = L.back(R.back(R.inside(L.inside(G_turned.mT).mT)).mT).mT
        return moved

    @property
    def renewals(self) -> dict[str, int]:
        """With the solver "tracked": how often the basis of each factor was renewed, by parameter and side."""
        return {
            f"{layer.name}.{block} {name}": kept["renewals"]
            for layer in self.layers.values()
            for block, sides in self.state.get(layer.anchor, {}).get("memory", {}).items()
            for name, kept in sides.items()
            if "renewals" in kept
        }


def _share_of_signal(step: Transaction, layer: LayerEntry) -> Tensor | float:
    """How much of a bias's move counts, by group: less than all where its gradient is rounding beside its weight's.

    A bias before a norm, and that of attention's keys, has no gradient but rounding. Shampoo divides it by its own
    size, which makes full moves of it.
    """
    blocks = [(block, layer.blocks[block]) for block in (WEIGHT, BIAS) if block in layer.blocks]
    found = [whole_gradient(step, layer, block, entry) for block, entry in blocks]
    both = [dense(raw) for raw in found if raw is not None]
    if len(both) < 2:
        return 1.0
    inputs, rows = both[0].numel() / both[1].numel(), len(both[1])  # blocks of the same outputs share a part of a bias
    G, g = (torch.linalg.vector_norm(x.reshape(rows, -1, 1), dim=1, keepdim=True, dtype=torch.float64) for x in both)
    least = max(LEAST_SIGNAL, torch.finfo(both[1].dtype).eps) * G / inputs**0.5
    share: Tensor = (g / least).where(least > 0, 1.0).clamp_max(1.0).to(both[1].dtype)
    return share


def _usual_damping(options: StepOptions) -> float:
    """A root that is made of few gradients amplifies all that they have not shown, and it serves later ones too."""
    usual = {Batch: 1e-2, Sum: 1e-4} if options.trust is not None else {}
    return usual.get(type(options.memory), 1e-6)


def _turned(G: Move, kept: Mapping[str, State]) -> Move:
    """Q_L^T G Q_R, of the sides that keep a basis."""
    if isinstance(G, LowRank):
        return LowRank(*(turn(kept[name], X) if name in kept else X for name, X in (("L", G.D), ("R", G.H))))
    G = turn(kept["L"], G.mT).mT if "L" in kept else G
    return turn(kept["R"], G) if "R" in kept else G


def rows_of(G: Move, name: str) -> Tensor:
    """Rows X with X^T X = G G^T for "L", G^T G for "R", as few as G has.

    Of G = D^T H they are N: with H H^T = C C^T, G G^T = (C^T D)^T (C^T D). Rounding's part of the trace keeps C real.
    """
    if not isinstance(G, LowRank):
        return G.mT if name == "L" else G
    return _root(G.H).mT @ G.D if name == "L" else _root(G.D).mT @ G.H


def _root(X: Tensor) -> Tensor:
    K = X @ X.mT
    trace = K.diagonal(dim1=-2, dim2=-1).sum(-1)
    least = 4 * torch.finfo(K.dtype).eps * trace
    lower, info = torch.linalg.cholesky_ex(add_to_diagonal(K, least + (trace == 0)))
    root: Tensor = torch.where((info == 0)[..., None, None], lower, torch.nan)  # not finite: the step sees it
    return torch.where((trace == 0)[..., None, None], 0.0, root)
