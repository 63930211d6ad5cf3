"""Layer-wise Gauss-Newton, in sample space by nature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from mukron.curvature import CaptureOptions, Empirical, Halves, LayerStatistics, inverse_weight, reduction_in_use
from mukron.damping import Adaptive, Rescaled, Rule
from mukron.layers import BIAS
from mukron.linalg import KernelFactor, LowRank
from mukron.optim import sizes
from mukron.optim.communication import Communication
from mukron.optim.docs import describe
from mukron.optim.momentum import HeavyBall, Momentum
from mukron.optim.optimizer import SecondOrder
from mukron.optim.options import StepOptions, StepRule, Trust
from mukron.optim.run_options import EVERY_LAYER, EXCHANGE
from mukron.optim.spec import MethodSpec, register
from mukron.optim.table import LayerEntry
from mukron.optim.transaction import Blocks, Transaction
from mukron.optim.unseen import not_seen
from mukron.optim.update import Move
from mukron.params import Parametrization
from mukron.params.excluded import Excluded
from mukron.theory import METHODS


@register(
    MethodSpec(
        name="gauss-newton",
        method=METHODS["gauss-newton"],
        lr=0.01,
        lr_range=(-7, 1),
        plain_lr_range=(-13, -6),
        bounded_lr=0.02,
        options=(*EVERY_LAYER, EXCHANGE),
        damping=Rescaled(1.0),
        captures=("jacobian",),
        state_size=sizes.kernel_size,
        samples=16,  # the cost is that of samples x outputs
    )
)
@describe
class GaussNewton(SecondOrder):
    """Gauss-Newton, layer by layer: (J^T diag(chi)^2 J / n + rho)^-1 g, solved over samples x outputs.

    It takes one backward pass per output: for networks with few outputs.

    Args:
        damping: A number means ``Rescaled(number)``: that many times the mean eigenvalue of the layer's kernel.
        momentum: A number or ``HeavyBall(beta, nesterov)``: on the update. ``GradientMomentum(beta)``: on the gradient,
            of which other batches' parts do not fit this batch's curvature. Default: no momentum, with a ``trust`` too.

    Example:
        >>> import torch, mukron
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = mukron.GaussNewton(model, lr=0.1)
    """

    by_block = True
    uses_products = True
    inverts = True
    momentum_kind = HeavyBall  # of other batches' gradients, averages do not fit the kernel of this one

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor | None = None,
        *,
        damping: float | Rule | Adaptive = 1.0,
        output: Callable[[Any], Tensor] | None = None,
        reduction: str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        trust: str | Trust | None = "spectral",
        fallback: str | StepRule | None = None,
        fallback_lr: float | None = None,
        momentum: float | Momentum = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        maximize: bool = False,
        exclude: tuple[Excluded, ...] | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
        communication: str | Communication = "auto",
    ) -> None:
        self.loss = Empirical(reduction, grad_scaler)
        super().__init__(
            model,
            parametrization,
            lr,
            damping=damping,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            decoupled=decoupled,
            maximize=maximize,
            fallback_lr=fallback_lr,
            params=params,
            process_group=process_group,
            options=StepOptions.of(
                self.method,
                Trust.of(trust), fallback=fallback, exclude=exclude, inverse_every=1, refresh_warmup=0,
                communication=Communication.of(communication),
            ),  # a kernel is that of its own batch's samples
            capture_options=CaptureOptions(
                inputs=False, signals=False, jacobian=True, fisher=self.loss, output=output,
                reduction=reduction, grad_scaler=grad_scaler,
            ),
        )  # fmt: skip

    def measure(self, layer: LayerEntry, statistics: LayerStatistics | None, step: Transaction) -> Blocks:
        """Collect the rows of a layer's Jacobian, weighted by the loss derivatives.

        Args:
            layer: The layer and its blocks.
            statistics: What this batch's passes gave for the layer; None: nothing.
            step: The step that is being taken; it holds the state as it will be.
        """
        if statistics is None or not statistics.jacobians:
            raise not_seen(layer, step)
        n = inverse_weight(step.passes, reduction_in_use(step.found_reduction, self.loss.reduction))
        scale = n if self.loss.grad_scaler is None else n / self.loss.grad_scaler.get_scale()
        # rows are samples x outputs; the errors go into the signals
        jacobians = statistics.jacobians
        h = torch.cat([j.inputs.repeat_interleave(j.errors.shape[1], dim=1) for j in jacobians], dim=1)
        outputs = gcd(*(j.errors.shape[1] for j in jacobians))
        signals = [j.signals * (scale * j.errors)[None, :, :, None, None] for j in jacobians]
        delta = torch.cat([part.flatten(1, 2) for part in signals], dim=1)
        if any(j.counts is not None for j in jacobians):  # ignored outputs are no rows, and none of the mean eigenvalue
            every = [torch.ones_like(j.errors, dtype=torch.bool) if j.counts is None else j.counts for j in jacobians]
            counts = torch.cat([part.flatten() for part in every])
            counts = counts | ~counts.any()  # where nothing counts, gradients are zero
            h, delta, outputs = h[:, counts], delta[:, counts], 1
        ones = h.new_ones(*h.shape[:3], 1)
        blocks = [block for block, entry in layer.blocks.items() if step.gradient(entry) is not None]
        factors = {block: KernelFactor.of(ones if block == BIAS else h, delta, n, outputs) for block in blocks}
        double = layer.name in step.double
        if double:  # of n times the gradient, which keeps its digits so
            statistics.halves = [Halves(delta.flatten(1, 2).double(), h.flatten(1, 2).double(), fused=False)]
            statistics.join()
        return {block: {"K": factor.double() if double else factor} for block, factor in factors.items()}

    def precondition(self, layer: LayerEntry, block: str, G: Move, step: Transaction) -> Move:
        """Divide the gradient of a block by its Gauss-Newton matrix, in sample space.

        Args:
            layer: The layer and its blocks.
            block: The weight or the bias.
            G: The gradient of the block.
            step: The step that is being taken; it holds the state as it will be.
        """
        operator = step.value(layer, "operators")[block]["K"]
        G = G.to(operator.dtype)
        return operator.of_own_gradient(G) if isinstance(G, LowRank) else operator.right(G)  # type: ignore[no-any-return]
