"""SOAP: Adam in the eigenbases of Shampoo's factors. Needs no hooks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mukron import readers as read
from mukron.arguments import check_flag, check_number, check_whole
from mukron.curvature import LayerStatistics
from mukron.layers import WEIGHT
from mukron.linalg import QR, BasisFactor, Eigh, Factor, Operator, PlainFactor, Solver, carried, turned, turned_back
from mukron.memory import Memory, Window
from mukron.optim import sizes
from mukron.optim.direction import dense, whole_gradient
from mukron.optim.docs import describe
from mukron.optim.momentum import GradientMomentum, Momentum
from mukron.optim.optimizer import SecondOrder
from mukron.optim.options import StepOptions, StepRule, Trust
from mukron.optim.run_options import CUT, EVERY_LAYER, INTERVALS, SPLIT, Option, memory_in_matrices
from mukron.optim.spec import MethodSpec, register
from mukron.optim.table import LayerEntry, warn_of_one_sided
from mukron.optim.transaction import Blocks, Transaction
from mukron.optim.update import Move
from mukron.params import Parametrization
from mukron.params.excluded import Excluded
from mukron.theory import FAMILIES, METHODS, soap

BASIS_SOLVERS = ("qr", "eigh")
# Of the largest entry, in roots of the rounding: smaller ones are noise, of which Adam would make full moves. L and R
# are squares, so that a direction with less than the root of their rounding is lost in them.
LEAST_ENTRY = 4.0


@register(
    MethodSpec(
        name="soap",
        method=METHODS["soap"],
        lr=0.002,
        lr_range=(-9, 0),
        plain_lr_range=(-13, -5),
        bounded_lr=0.1,
        options=(
            *EVERY_LAYER,
            *INTERVALS,
            Option.typed("memory", memory_in_matrices, "what L and R remember: sum, ema:DECAY or batch"),
            Option("solver", read.one_of(BASIS_SOLVERS), f"how bases are renewed: {', '.join(BASIS_SOLVERS)}"),
            CUT,
            SPLIT,
            Option("beta2", read.number(), "decay of the average of squares in the eigenbasis"),
            Option("eps", read.number(above=0), "added to the root of that average, at the base width"),
            Option("max_size", read.whole(1), "the longest side of a layer that is turned into its eigenbasis"),
        ),
        state_size=sizes.bases,
        moments=sizes.momentum_and_squares,
        largest_side=3000,  # the first basis is an eigendecomposition: above this it takes minutes on two cores
        family=FAMILIES["soap"],
    )
)
@describe
class SOAP(SecondOrder):
    """SOAP: Adam's step in the eigenbases Q_L and Q_R of Shampoo's L and R (Vyas and others 2024).

    W <- W - lr Q_L (Q_L^T M Q_R / (V^1/2 + eps)) Q_R^T, where M is the average of gradients and V that of the squares
    of (Q_L^T G Q_R)_ij. It is for matrices inside a network: Linear and Conv layers, a convolution's weight being a
    matrix of its output channels. By default embeddings, output layers, norms and biases are left to the fallback rule,
    AdamW. Without a ``parametrization`` the output layer is taken to be the last one of the model; ``exclude`` names
    others.

    When bases are renewed, V is carried over: each new mean square is the sum of old ones, weighted by the squared
    cosines between old and new directions.

    Args:
        momentum: A number, the weight of the past in the average of gradients, or ``GradientMomentum(beta, nesterov)``.
            None: 0.9.
        nesterov: Whether a number means Nesterov's momentum.
        beta2: Decay of the average of squares.
        eps: Added to the root of that average, at the base width.
        memory: What L and R remember: ``EMA(decay)``, ``Sum()`` or ``Batch()``, or text such as "ema:0.99".
        solver: How bases are renewed: "qr" or ``QR()``, one round of orthogonal iteration; "eigh" or ``Eigh()``.
        sides: Which sides are turned into their eigenbasis: "both", "input" or "output". It decides muP's law.
        max_size: A side longer than this is not turned; ``sides`` says the same of all layers, with its law.
        inverse_every: Steps from one renewal of the bases to the next; a multiple of ``factor_every``. None: about 10
            with a ``trust``, else 1.
        refresh_warmup: Steps at the start, at each of which bases are renewed. None: 10 with a ``trust``, else 0.

    Example:
        >>> import torch, mukron
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> optimizer = mukron.SOAP(model, lr=0.1)
        >>> list(optimizer.layers)  # the last one is left to AdamW
        ['0']
    """

    by_block = True
    momentum_kind = GradientMomentum
    useless = dict.fromkeys(("damping",), "has an eps in its place")

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor | None = None,
        *,
        momentum: float | GradientMomentum | None = None,
        nesterov: bool = False,
        beta2: float = 0.95,
        eps: float = 1e-8,
        memory: str | Memory = "ema:0.95",
        solver: str | Solver = "qr",
        sides: str = "both",
        max_size: int = 8192,
        factor_every: int = 1,
        inverse_every: int | None = None,
        refresh_warmup: int | None = None,
        start: int = 0,
        trust: str | Trust | None = "spectral",
        fallback: str | StepRule | None = None,
        fallback_lr: float | None = None,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        maximize: bool = False,
        exclude: tuple[Excluded, ...] | None = None,
        block: int | None = None,
        split: Mapping[str, int | str] | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
    ) -> None:
        self.method = soap(str(sides))  # type: ignore[misc]
        check_flag("nesterov", nesterov)
        check_number("beta2", beta2)
        check_number("eps", eps)
        check_whole("max_size", max_size)
        if not (0 <= beta2 < 1 and eps > 0 and max_size >= 1):
            raise ValueError(
                f"beta2 must lie in [0, 1), eps must be above 0 and max_size at least 1; got beta2={beta2}, eps={eps}, "
                f"max_size={max_size}"
            )
        self.beta2, self.eps, self.max_size = beta2, eps, max_size
        self.turned = {"L": sides != "input", "R": sides != "output"}
        options = StepOptions.of(
            self.method,
            Trust.of(trust),
            memory=Memory.of(memory),
            factor_every=factor_every,
            inverse_every=inverse_every,
            solver=Solver.of(solver, (QR, Eigh)),
            refresh_warmup=refresh_warmup,
            start=start,
            fallback=fallback,
            exclude=exclude,
            block=block,
            split=split,
        )
        if isinstance(options.memory, Window):
            raise ValueError("SOAP's factors are matrices: choose Sum(), EMA(decay) or Batch()")
        super().__init__(
            model,
            parametrization,
            lr,
            momentum=momentum,
            nesterov=nesterov and not isinstance(momentum, Momentum) and momentum != 0,
            weight_decay=weight_decay,
            decoupled=decoupled,
            maximize=maximize,
            fallback_lr=fallback_lr,
            params=params,
            process_group=process_group,
            options=options,
        )

    def warn(self) -> None:
        """A side that is not turned follows another law."""
        remedy = f'raise max_size, turn one side at every width (sides="input"), or cut matrices: block={self.max_size}'
        of_input, of_output = (self.max_size if self.turned[side] else math.inf for side in ("R", "L"))
        warn_of_one_sided("SOAP", self.layers.values(), self.parametrization, (of_input, of_output), remedy)

    def measure(self, layer: LayerEntry, statistics: LayerStatistics | None, step: Transaction) -> Blocks:
        """Make L and R of a layer's gradient; a side that is not turned keeps its own coordinates.

        Args:
            layer: The layer and its blocks.
            statistics: What this batch's passes gave for the layer; None: nothing.
            step: The step that is being taken; it holds the state as it will be.
        """
        raw = whole_gradient(step, layer, WEIGHT, layer.blocks[WEIGHT])
        if raw is None:
            return {}
        G, factors = dense(raw), dict[str, Factor]()
        for name, rows in (("L", G.mT), ("R", G)):
            if self.turned[name] and 1 < rows.shape[-1] <= self.max_size:
                factors[name] = BasisFactor(rows.mT @ rows, {})
            else:
                factors[name] = PlainFactor(rows.square().sum(-2))
        return {WEIGHT: factors}

    def powers_of(self, number: int) -> dict[str, Fraction]:
        """None: of L and R the bases alone are used.

        Args:
            number: How many factors there are, two.
        """
        return dict.fromkeys(("L", "R"), Fraction(0))

    def precondition(self, layer: LayerEntry, block: str, G: Move, step: Transaction) -> Move:
        """Take Adam's step in the eigenbases.

        Args:
            layer: The layer and its blocks.
            block: The weight.
            G: The average of gradients.
            step: The step that is being taken; it holds the state as it will be.
        """
        entry = layer.blocks[block]
        sides, state = _sides(step.value(layer, "operators")), step.state_of(entry.parameter)
        raw = whole_gradient(step, layer, block, entry)
        assert raw is not None
        bases = [side for side in sides if side.dtype is not None]
        dtype = bases[0].dtype if bases else raw.dtype if isinstance(raw, Tensor) else raw.D.dtype
        squares = turned(dense(raw).to(dtype), *sides).square()
        V, weight = state.get("squares"), state.get("squares_weight", 0.0)
        if V is not None:
            before = _sides(step.state_of(layer.anchor)["operators"])
            squares = carried(V.to(squares.dtype), before, sides).lerp(squares, 1 - self.beta2)
        else:
            squares = squares * (1 - self.beta2)
        weight = (1 - self.beta2) + self.beta2 * weight  # 1 - beta2^t
        step.stage(entry.parameter, squares=squares, squares_weight=weight)
        root = (squares / weight).sqrt()
        least = LEAST_ENTRY * torch.finfo(root.dtype).eps ** 0.5 * root.amax((-2, -1), keepdim=True) if bases else 0.0
        move = turned(dense(G).to(dtype), *sides) / (root + least + self.eps * entry.eps)
        return turned_back(move.where(root + least > 0, 0.0), *sides)


def _sides(operators: dict[str, dict[str, Operator]]) -> tuple[Operator, Operator]:
    return operators[WEIGHT]["L"], operators[WEIGHT]["R"]
