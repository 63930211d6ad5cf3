"""How far a network's output and its attention logits move along the descent of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from mukron.diagnose.attention import AttentionWatch
from mukron.diagnose.record import FED, HEAD, OUTPUT, SOURCE, UNSEEN, TrainingSetup
from mukron.optim import SecondOrder
from mukron.params.inventory import unwrap
from mukron.train.calls import call, untouched
from mukron.train.quantities import all_tensors, rms_difference

LARGEST_LOGIT = 1e3  # of attention, above which it is a mask


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
        self.setup, self.inputs, self.sees_attention = setup, batch[0], True
        try:
            values, derivatives = self._derived(batch[1], loss)
        except CheckpointError:  # layers that are computed again for their derivatives are so without the watch
            self.sees_attention = False
            values, derivatives = self._derived(batch[1], loss)
        self.before = {key: [tensor.detach() for tensor in tensors] for key, tensors in values.items()}
        self.directions = {key: _unit(found) for key, found in derivatives.items()}

    def read(self) -> dict[str, float]:
        """Returns the changes, the initial size of attention logits and the sizes of heads.

        What the loss does not depend on is left out.
        """
        with self._watched(gradients=False) as watch:
            values = _values(self._output(), watch)
        numbers: dict[str, float] = {}
        attention = [key for key in values if key.startswith("attention/")]
        if not self.sees_attention or (attention and not any(self.directions.get(key) for key in attention)):
            numbers[f"{UNSEEN}/attention"] = 1.0
        numbers |= {f"{HEAD}/{name}": 1.0 for name in self.heads}
        for key, now in values.items():
            before, direction = self.before.get(key, []), self.directions.get(key)
            if [tensor.shape for tensor in now] != [tensor.shape for tensor in before]:
                continue
            if key == f"descent/{OUTPUT}":
                numbers[OUTPUT] = rms_difference(now, before)
            if direction is not None:
                numbers[key] = _along(now, before, direction)
                name = key.partition("/")[2]
                if name in watch.head_dims and key.startswith("attention/"):
                    numbers[f"head_dim/{name}"] = float(watch.head_dims[name])
                    numbers[f"logits/{name}"] = self.sizes[name]
                    numbers |= {f"{SOURCE}{name}/{layer}": 1.0 for layer in self.sources.get(name, ())}
                    numbers |= {f"{FED}{name}/{layer}": 1.0 for layer in self.fed.get(name, ())}
        return numbers

    def _derived(self, targets: Any, loss: Callable[[Any, Any], Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        with self._watched(gradients=True) as watch:
            output = self._output()
            values = _values(output, watch)
            watch.collects = False
            self.sources, self.fed = watch.sources, watch.fed
            self.sizes = {name: _size(products) for name, products in watch.products.items()}
            self.heads = watch.embeddings_behind(all_tensors(output))
            return values, _derivatives(loss(output, targets), values)

    @contextmanager
    def _watched(self, gradients: bool) -> Iterator[AttentionWatch]:
        """Watch a forward pass, and what is computed of it, without side effects."""
        model, optimizer = self.setup.model, self.setup.optimizer
        unmeasured = optimizer.paused() if isinstance(optimizer, SecondOrder) else nullcontext()
        buffers = [(module, name) for module in model.modules() for name in module._buffers]
        kept = [(module, name, module._buffers[name]) for module, name in buffers]
        with untouched(model), unmeasured, torch.set_grad_enabled(gradients):
            for module, name, buffer in kept:  # copies: what is written to a buffer in place is no part of a derivative
                module._buffers[name] = None if buffer is None else buffer.clone()
            watched = AttentionWatch.over(unwrap(model)) if self.sees_attention else nullcontext(AttentionWatch())
            try:
                with watched as watch:
                    yield watch
            finally:
                for module, name, buffer in kept:
                    module._buffers[name] = buffer

    def _output(self) -> Any:
        forward = self.setup.forward
        return call(self.setup.model, self.inputs) if forward is None else forward(self.inputs)


def _values(output: Any, watch: AttentionWatch) -> dict[str, list[Tensor]]:
    """Return the tensors of an output and the attention logits, by the keys of what is measured."""
    names = (f"{OUTPUT}.{number}" if number else OUTPUT for number in count())
    values = {f"descent/{name}": [tensor] for name, tensor in zip(names, all_tensors(output), strict=False)}
    return {**values, **{f"attention/{name}": logits for name, logits in watch.logits.items()}}


def _derivatives(error: Tensor, values: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor | None]]:
    """Return the derivatives of the loss; None where it does not depend on a value."""
    flat = [tensor for tensors in values.values() for tensor in tensors]
    wanted = [tensor for tensor in flat if tensor.requires_grad] if error.requires_grad else []
    given = torch.autograd.grad(error, wanted, allow_unused=True) if wanted else ()
    found = {id(tensor): derivative for tensor, derivative in zip(wanted, given, strict=True)}
    return {key: [found.get(id(tensor)) for tensor in tensors] for key, tensors in values.items()}


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


def _size(logits: Sequence[Tensor]) -> float:
    """Return the root mean square of the logits that no mask leaves out, of which additive ones are very large."""
    seen = [part.detach()[part.detach().abs() < LARGEST_LOGIT].double() for part in logits]
    return math.sqrt(sum(float(part.square().sum()) for part in seen) / max(sum(part.numel() for part in seen), 1))
