"""Damping that adapts: the reduction ratio of a step, and what it does to the damping (Martens and Grosse 2015, 6.5).

    h        the closure's loss; g its gradient of one block
    G        what was preconditioned: g, or its average, with weight decay where that is coupled
    U, V     the direction P G, and the move: U within its trust, V = nu U
    eta, s   the group's learning rate; the parametrization's multiplier, a part of the preconditioner s P

A step minimizes (at eta = 1) the quadratic model whose curvature is that of the preconditioner, (s P)^-1. Along the
move eta s V it predicts, since (s P)^-1 s V = nu G,

    M = sum over blocks of  -eta s <g, V> + eta^2 s / 2 <V, nu G>
    ratio = (h(W - eta s V) - h(W)) / M

The loss is evaluated where the move alone leads: without momentum on the update, decoupled weight decay and the moves
of the fallback rule, of which the model knows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mukron.damping import Rule
from mukron.layers import WEIGHT
from mukron.linalg import LowRank
from mukron.optim.direction import base_rate, dense
from mukron.optim.update import Move, Update, write

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder
    from mukron.optim.table import LayerEntry
    from mukron.optim.transaction import Transaction

GOOD, BAD = 3 / 4, 1 / 4  # ratios above and below which the damping falls and rises
BELOW_ROUNDING = 10  # roundings of the loss: a predicted change that is smaller tests nothing


class ReductionRatio:
    """The test of one step's quadratic model. It is made before the closure runs, whose randomness it remembers.

    Attributes:
        groups: Parameter groups whose damping this step may change; none: the step is not tested.
    """

    def __init__(self, optimizer: SecondOrder, closure: Callable[[], Any] | None) -> None:
        if closure is None:
            raise ValueError(
                "damping that adapts evaluates the loss again after a step: pass a closure, optimizer.step(closure), "
                "that clears the gradients, computes the loss, calls its backward() and returns it"
            )
        if optimizer.exchange is not None:
            raise ValueError("damping does not adapt across processes: each would adapt to the loss of its own batch")
        if len({bool(group["maximize"]) for group in optimizer.param_groups}) > 1:
            raise ValueError("some groups maximize and others do not: no step of theirs is that of one quadratic model")
        self.optimizer, self.closure = optimizer, closure
        adaptive = [group for group in optimizer.param_groups if group.get("adaptive")]
        self.groups = [group for group in adaptive if (optimizer.steps + 1) % group["adaptive"]["every"] == 0]
        self.device = next(iter(optimizer.layers.values())).anchor.device
        self.random = random_state(self.device) if self.groups else []

    def adapt(self, step: Transaction, moves: Mapping[str, Move], loss: Any) -> None:
        """Stage the damping that follows from the ratio. Nothing is changed yet.

        loss: what the closure returned at the weights as they are.
        """
        if not step.applied:
            return  # gradients are not preconditioned yet
        before = _number(loss)
        updates, predicted = self._model(step, moves)
        eps = torch.finfo(loss.dtype if isinstance(loss, Tensor) and loss.is_floating_point() else torch.float64).eps
        ratio = None
        if predicted < -BELOW_ROUNDING * eps * abs(before):
            after = self._loss_after(updates)
            descends = -1 if self.groups[0]["maximize"] else 1
            ratio = descends * (after - before) / predicted if math.isfinite(after) else -math.inf
        for group in self.groups:
            adaptive, rule = group["adaptive"], Rule.of_group(group)
            step.stage_of_group(group, adaptive={**adaptive, "ratio": ratio})
            if ratio is None or BAD <= ratio <= GOOD:
                continue
            factor = adaptive["decay"] ** adaptive["every"]
            rho = float(rule.rho * factor if ratio > GOOD else rule.rho / factor)
            rho = min(max(rho, adaptive["lowest"]), adaptive["highest"])
            own_rule = isinstance(group["damping"], Rule)
            step.stage_of_group(group, damping=replace(rule, rho=rho) if own_rule else rho)  # type: ignore[type-var]

    def _model(self, step: Transaction, moves: Mapping[str, Move]) -> tuple[list[Update], float]:
        """The moves of preconditioned blocks, and M."""
        updates, parts = [], []
        for (name, block), (raw, G, U) in (step.applied or {}).items():
            layer = self.optimizer.layers[name]
            entry = layer.blocks[block]
            eta, move, weight = base_rate(entry), moves[entry.name], layer.layer.block(block, entry.parameter)
            V = dense(move) if isinstance(move, LowRank) else layer.layer.block(block, move)
            slope = _dot(dense(raw), V)  # <g, V>; coupled decay is a part of raw, and none of the loss
            if entry.group["weight_decay"] and not entry.group["decoupled"]:
                slope = slope - entry.group["weight_decay"] * _dot(weight, V)
            curvature = _dot(dense(G) * _shortened(layer, block, dense(U), V), V)
            parts.append(entry.scale * (-eta * slope + eta**2 * entry.chosen / 2 * curvature))
            of_move = weight if isinstance(move, LowRank) else entry.parameter
            updates.append(Update(of_move, move, step.rates[entry.name]))
        return updates, float(torch.stack(parts).sum())

    def _loss_after(self, updates: list[Update]) -> float:
        """The closure's loss after the updates, on the same batch with the same randomness; all is as before then."""
        optimizer, index = self.optimizer, self.device.index
        forked = torch.random.fork_rng([] if index is None else [index], device_type=_kind(self.device))
        with optimizer.capture.set_aside(), unchanged(optimizer.model), forked:
            set_random_state(self.random, self.device)
            write(updates)
            with torch.enable_grad():
                return _number(self.closure())


def _shortened(layer: LayerEntry, block: str, U: Tensor, V: Tensor) -> Tensor:
    """nu with V = nu U: one number a matrix, or one a token of an embedding, whose factor A is diagonal."""
    dims = (-2,) if layer.layer.one_hot and block == WEIGHT else (-2, -1)
    length = torch.linalg.vector_norm(U, dim=dims, keepdim=True)
    nu: Tensor = torch.linalg.vector_norm(V, dim=dims, keepdim=True).to(U.dtype) / length.where(length > 0, 1.0)
    return nu


def _dot(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return (a.to(dtype) * b.to(dtype)).sum(dtype=torch.float64)


def _number(loss: Any) -> float:
    if not isinstance(loss, (int, float)) and not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise TypeError(
            f"damping that adapts compares losses: the closure must return the loss, one number; got {loss!r:.80}"
        )
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


# What a second evaluation must not change.


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put weights, gradients and buffers (the statistics of BatchNorm) back as they were, bit for bit.

    Inside there are no gradients at first.
    """
    weights = [(parameter, parameter.grad, parameter.detach().clone()) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for parameter, _, _ in weights:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, grad, value in weights:
                parameter.copy_(value)
                parameter.grad = grad
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # torch forks the CPU's generator beside that kind's


def random_state(device: torch.device) -> list[Tensor]:
    """The states of torch's generators, of the CPU and of the device."""
    own = [] if device.type == "cpu" else [getattr(torch, device.type).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        getattr(torch, device.type).set_rng_state(state, device)
