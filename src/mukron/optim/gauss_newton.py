"""Layer-wise Gauss-Newton, in sample space by nature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mukron.curvature import Gathered, Listening
from mukron.damping import Rescaled, Rule
from mukron.linalg import Factor, FactorizationError, Operator
from mukron.optim import sizes
from mukron.optim.base import BIAS, Blocks, Move, SecondOrder, Settings, one_of
from mukron.optim.options import EVERY_LAYER
from mukron.optim.slots import Slot
from mukron.optim.spec import MethodSpec, register
from mukron.params import Parametrization
from mukron.precond import KernelFactor, Layer, Preparation, Prepared
from mukron.theory import METHODS


@register(
    MethodSpec(
        name="gauss-newton",
        method=METHODS["gauss-newton"],
        lr=0.01,
        lr_range=(-13, -6),
        options=EVERY_LAYER,
        damping=Rescaled(1.0),
        captures=("jacobian",),
        state_size=sizes.kernel,
        samples=16,  # the cost is that of samples x outputs
    )
)
class GaussNewton(SecondOrder):
    """Gauss-Newton, layer by layer: (J^T diag(chi)^2 J / n + rho)^-1 g, solved over samples x outputs.

    damping: a number means ``Rescaled(number)``: that many times the mean eigenvalue of the layer's kernel.
    reduction: of your loss, "mean" or "sum"; its derivative by the outputs is read in your backward pass.
    Costs one backward pass an output: for few outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor = 0.1,
        *,
        damping: float | Rule = 1.0,
        output: Callable[[Any], Tensor] | None = None,
        reduction: str = "mean",
        grad_scaler: torch.amp.GradScaler | None = None,
        kl_clip: float | None = None,
        graft: str | None = None,
        fallback: str = "sgd",
        exclude: tuple[str, ...] = (),
        **groups: Any,
    ) -> None:
        one_of("reduction", reduction, ("mean", "sum"))
        self.reduction, self.grad_scaler = reduction, grad_scaler
        listening = Listening(inputs=False, signals=False, jacobian=True, output=output)
        settings = Settings(kl_clip=kl_clip, graft=graft, fallback=fallback, exclude=tuple(exclude))
        super().__init__(model, parametrization, lr, damping=damping, listening=listening, settings=settings, **groups)

    def measure(self, slot: Slot, gathered: Gathered | None, gradients: Mapping[str, Tensor]) -> Blocks:
        if gathered is None or not gathered.jacobians:
            raise RuntimeError(
                f'layer "{slot.name}" has a gradient, but no forward pass of the model was seen for it: run the model '
                "itself (not its parts) in training mode with gradients on and not paused"
            )
        samples = self.capture.samples
        scale = float(samples) if self.reduction == "mean" else 1.0
        if self.grad_scaler is not None:
            scale /= self.grad_scaler.get_scale()
        # rows are samples x outputs; the errors go into the signals
        h = torch.cat([j.inputs.repeat_interleave(j.errors.shape[1], dim=1) for j in gathered.jacobians], dim=1)
        signals = [j.signals * (scale * j.errors)[None, :, :, None, None] for j in gathered.jacobians]
        delta = torch.cat([each.flatten(1, 2) for each in signals], dim=1)
        ones = h.new_ones(*h.shape[:3], 1)
        return {block: {"K": KernelFactor(ones if block == BIAS else h, delta, samples)} for block in gradients}

    def prepare(self, layers: Sequence[Layer], rescue: bool = True) -> Preparation:
        return [self._operator(*layer) for layer in layers], []

    def _operator(self, factors: Mapping[str, Factor], rho: Mapping[str, Tensor]) -> Prepared | FactorizationError:
        factor = factors["K"]
        assert isinstance(factor, KernelFactor)
        try:
            operator, rung = factor.operator_at(rho["K"])
        except FactorizationError as error:
            return error
        return {"K": operator}, {"K": rung} if rung else {}

    def precondition(self, slot: Slot, block: str, G: Move, operators: Mapping[str, Mapping[str, Operator]]) -> Tensor:
        assert isinstance(G, Tensor)
        return operators[block]["K"].right(G)
