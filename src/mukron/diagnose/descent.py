"""How far a network's output and its attention logits move along the descent of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from mukron.diagnose.attention import AttentionWatch
from mukron.diagnose.record import OUTPUT, TrainingSetup
from mukron.optim import SecondOrder
from mukron.params.inventory import unwrap
from mukron.train.calls import call, untouched
from mukron.train.quantities import first_tensor


class Descent:
    """Measures changes along e, the derivative of the loss in the initial state: <dy, e> / |e| as a root mean square.

    y is the network's output or a module's attention logits. Both are sums over a width of products that muP divides by
    that width. Such a sum has a part along e that stays as the width grows, which is what is learned, and a part in all
    other directions that falls like width^-1/2 and is the larger one in narrow networks. So the size of the whole
    change says little, and its part along e says the same at every width.

    Args:
        setup: The network, in its initial state, with its optimizer.
        batch: Inputs and targets.
        loss: The loss of outputs and targets.

    Example:
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> torch.nn.init.zeros_(model.weight).shape
        torch.Size([2, 1])
        >>> setup = TrainingSetup(model, None, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> batch = torch.ones(1, 1), torch.tensor([[-1.0, 0.0]])
        >>> descent = Descent(setup, batch, torch.nn.functional.mse_loss)
        >>> _ = model.weight.data.copy_(torch.tensor([[-0.5], [7.0]]))  # the loss does not fall along the second output
        >>> round(descent.read()["descent/output"] * 2**0.5, 4)
        0.5
    """

    def __init__(self, setup: TrainingSetup, batch: tuple[Any, Any], loss: Callable[[Any, Any], Tensor]) -> None:
        self.setup, self.inputs = setup, batch[0]
        with torch.enable_grad():
            output, watch = self._forward()
            values = _values(output, watch)
            flat = [tensor for tensors in values.values() for tensor in tensors]
            error = loss(output, batch[1])
            derivatives = iter(torch.autograd.grad(error, flat, allow_unused=True))
        self.before = {key: [tensor.detach() for tensor in tensors] for key, tensors in values.items()}
        self.directions = {key: _unit([next(derivatives) for _ in tensors]) for key, tensors in values.items()}

    def read(self) -> dict[str, float]:
        """Returns the changes, and the sizes of heads; nothing for what the loss does not depend on."""
        with torch.no_grad():
            output, watch = self._forward()
        numbers: dict[str, float] = {}
        for key, now in _values(output, watch).items():
            before, direction = self.before.get(key, []), self.directions.get(key)
            if direction is not None and [tensor.shape for tensor in now] == [tensor.shape for tensor in before]:
                numbers[key] = _along(now, before, direction)
        sizes = {f"head_dim/{name}": float(size) for name, size in watch.head_dims.items()}
        return {**numbers, **{key: size for key, size in sizes.items() if f"attention/{key[9:]}" in numbers}}

    def _forward(self) -> tuple[Any, AttentionWatch]:
        model, optimizer = self.setup.model, self.setup.optimizer
        unmeasured = optimizer.paused() if isinstance(optimizer, SecondOrder) else nullcontext()
        gradients = torch.is_grad_enabled()
        with (
            untouched(model),
            unmeasured,
            torch.set_grad_enabled(gradients),
            AttentionWatch.over(unwrap(model)) as watch,
        ):
            forward = self.setup.forward
            return (call(model, self.inputs) if forward is None else forward(self.inputs)), watch


def _values(output: Any, watch: AttentionWatch) -> dict[str, list[Tensor]]:
    first = first_tensor(output)
    values = {} if first is None else {f"descent/{OUTPUT}": [first]}
    return {**values, **{f"attention/{name}": logits for name, logits in watch.logits.items()}}


def _unit(derivatives: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Scale derivatives to norm 1; None where there are none."""
    known = [derivative.double() for derivative in derivatives if derivative is not None]
    size = math.sqrt(sum(float(derivative.square().sum()) for derivative in known))
    if len(known) < len(derivatives) or not 0 < size < math.inf:
        return None
    return [derivative / size for derivative in known]


def _along(now: Sequence[Tensor], before: Sequence[Tensor], direction: Sequence[Tensor]) -> float:
    """Return the root mean square of the change along a direction; logits that a mask leaves out are infinite."""
    change = sum(
        float(((new.double() - old.double()) * e).nan_to_num(0.0).sum())
        for new, old, e in zip(now, before, direction, strict=True)
    )
    return abs(change) / math.sqrt(sum(tensor.numel() for tensor in now))
