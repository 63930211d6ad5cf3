"""Muon: orthogonalized momentum. Needs no hooks and no factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mukron import readers as read
from mukron.arguments import check_flag, check_number, check_whole
from mukron.linalg import orthogonalized
from mukron.optim.direction import dense
from mukron.optim.docs import describe
from mukron.optim.momentum import GradientMomentum, Momentum
from mukron.optim.optimizer import SecondOrder
from mukron.optim.options import StepOptions, StepRule, check_one_of
from mukron.optim.run_options import EVERY_LAYER, SPLIT, Option, without
from mukron.optim.spec import MethodSpec, register
from mukron.optim.table import LayerEntry, growth_of
from mukron.optim.transaction import Blocks, Transaction
from mukron.optim.update import Move
from mukron.params import Parametrization
from mukron.params.excluded import Excluded
from mukron.params.shape_factor import ADJUSTMENTS, check_scaling, shape_factor
from mukron.theory import METHODS

PRECISIONS: dict[str, torch.dtype | None] = {"bfloat16": torch.bfloat16, "float32": None}


@register(
    MethodSpec(
        name="muon",
        method=METHODS["muon"],
        lr=0.02,
        bounded_lr=0.02,
        lr_range=(-9, -2),
        options=(
            *without(EVERY_LAYER, "trust"),
            SPLIT,
            Option("rounds", read.whole(1), "rounds of the Newton-Schulz iteration"),
            Option("eps", read.number(above=0), "the least norm that a gradient is divided by"),
            Option("precision", read.one_of(tuple(PRECISIONS)), f"of its products: {', '.join(PRECISIONS)}"),
            Option(
                "adjust_lr_fn",
                read.one_of(ADJUSTMENTS),
                "how a layer's learning rate depends on its shape at the base width: original or match_rms_adamw",
            ),
        ),
    )
)
@describe
class Muon(SecondOrder):
    """Muon: W <- W - lr s U V^T, where U S V^T is the average of gradients (Jordan and others 2024).

    It is for matrices inside a network: Linear and Conv layers, a convolution's weight being a matrix of its output
    channels. By default embeddings, output layers, norms and biases are left to the fallback rule, AdamW. Without a
    ``parametrization`` the output layer is taken to be the last one of the model; ``exclude`` names others.

    With the same settings its steps are those of ``torch.optim.Muon``. s is 1 or, for a layer with more outputs than
    inputs, their ratio's root; both sides are those of the base width, since what follows from growth is the
    parametrization's part.

    Args:
        momentum: A number, the weight of the past in the average of gradients, or ``GradientMomentum(beta, nesterov)``.
            None: 0.95.
        nesterov: Whether a number means Nesterov's momentum.
        rounds: Rounds of the Newton-Schulz iteration, which makes U V^T by products.
        eps: The least Frobenius norm that a gradient is divided by, at the base width.
        precision: Of the products: "bfloat16" or "float32", which on a GPU follows torch's setting for TF32.
        adjust_lr_fn: What s is, under the names that torch has for it: "original", as above, or "match_rms_adamw",
            0.2 times the root of the longer side.

    Example:
        >>> import torch, mukron
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> optimizer = mukron.Muon(model, lr=0.02)
        >>> list(optimizer.layers)  # the last one is left to AdamW
        ['0']
    """

    in_stacks = True
    momentum_kind = GradientMomentum
    useless = dict.fromkeys(("trust", "damping", "memory", "solver"), "has no factors")

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor | None = None,
        *,
        momentum: float | GradientMomentum | None = None,
        nesterov: bool = True,
        rounds: int = 5,
        eps: float = 1e-7,
        precision: str = "bfloat16",
        adjust_lr_fn: str = "original",
        fallback: str | StepRule | None = None,
        fallback_lr: float | None = None,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        maximize: bool = False,
        exclude: tuple[Excluded, ...] | None = None,
        split: Mapping[str, int | str] | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
    ) -> None:
        check_whole("rounds", rounds)
        check_number("eps", eps)
        if rounds < 1 or not eps > 0:
            raise ValueError(f"rounds must be at least 1 and eps above 0, got rounds={rounds}, eps={eps}")
        check_one_of("precision", precision, PRECISIONS)
        check_scaling("adjust_lr_fn", adjust_lr_fn, ADJUSTMENTS)
        check_flag("nesterov", nesterov)
        momentum = 0.95 if momentum is None else momentum
        self.rounds, self.eps, self.precision, self.adjust_lr_fn = rounds, eps, precision, adjust_lr_fn
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
            options=StepOptions.of(self.method, None, fallback=fallback, exclude=exclude, split=split),
        )

    def measure(self, layer: LayerEntry, statistics: Any, step: Transaction) -> Blocks:
        """Measure nothing: there are no factors.

        Args:
            layer: The layer and its blocks.
            statistics: What this batch's passes gave for the layer; None: nothing.
            step: The step that is being taken; it holds the state as it will be.
        """
        return {}

    def precondition(self, layer: LayerEntry, block: str, G: Move, step: Transaction) -> Move:
        """Orthogonalize the averaged gradient of a layer, or of several of its shape as one stack.

        Args:
            layer: The layer and its blocks, or the first of them.
            block: The weight.
            G: The gradient of the block, or of all of them, [groups, d_out, d_in].
            step: The step that is being taken; it holds the state as it will be.
        """
        r_in, r_out = growth_of(layer, self.parametrization)
        eps = self.eps * layer.blocks[block].eps
        moved: Tensor = orthogonalized(dense(G), eps, self.rounds, PRECISIONS[self.precision])
        return moved * shape_factor((layer.layer.d_out / r_out, layer.layer.d_in / r_in), self.adjust_lr_fn)
