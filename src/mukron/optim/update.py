"""The end of a step: decay, momentum on the update, and the weights themselves, in place.

Tensors may have a leading run dimension; rates and decays are then tensors that broadcast over it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mukron.curvature import local
from mukron.layers import WEIGHT
from mukron.linalg import LowRank

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

Move = Tensor | LowRank


def times(G: Move, factor: float | Tensor) -> Move:
    if not isinstance(factor, Tensor) and factor == 1:
        return G
    return LowRank(G.D * factor, G.H) if isinstance(G, LowRank) else G * factor


class Update(NamedTuple):
    """What one weight moves by.

    Attributes:
        weight: Changed in place; as matrices [groups, d_out, d_in] for a move D^T H, which is added without being
            formed.
        move: What to subtract, before the learning rate.
        rate: The learning rate.
        decay: What the step takes off the weight, as a part of it: learning rate times weight decay.
        buffer: Momentum's, of the weight's shape; None: no momentum.
        momentum: How much of the buffer is kept.
        nesterov: Look one step ahead along the buffer.
    """

    weight: Tensor
    move: Move
    rate: float | Tensor
    decay: float | Tensor = 0.0
    buffer: Tensor | None = None
    momentum: float = 0.0
    nesterov: bool = False


def updates_of(optimizer: SecondOrder, moves: Mapping[str, Move], rates: Mapping[str, float]) -> list[Update]:
    """What parameters' moves become: their learning rates, decay, and momentum if that is on the update.

    The step is committed: what could be refused was, by ``transaction.fits``, and ``direction`` has made buffers.
    """
    updates = []
    for name, move in moves.items():
        entry, rate = optimizer.entries[name], rates[name]
        weight: Tensor = entry.parameter if optimizer.exchange is None else local(entry.parameter)
        group, state = entry.group, optimizer.state[entry.parameter]
        buffer: Tensor | None = None
        if group["momentum"] and group["momentum_on"] == "update":
            buffer = state.get("momentum_buffer")
        if isinstance(move, LowRank):
            layer = optimizer.layers[entry.layer].layer
            weight, buffer = layer.block(WEIGHT, weight), None if buffer is None else layer.block(WEIGHT, buffer)
        decays = group["decoupled"] and group["weight_decay"]
        decay = rate / entry.scale * group["weight_decay"] * entry.decay if decays else 0.0
        updates.append(Update(weight, move, rate, decay, buffer, group["momentum"], group["nesterov"]))
    return updates


def write(updates: Sequence[Update]) -> None:
    """W <- (1 - decay) W - rate (move with momentum), for all weights, those of one learning rate at once."""
    for update in updates:
        if isinstance(update.decay, Tensor) or update.decay:
            update.weight.mul_(1 - update.decay)
    moves = _with_momentum(updates)
    alike = defaultdict(list)  # one fused operation for all weights of one learning rate
    for update, move in zip(updates, moves, strict=True):
        if isinstance(update.rate, Tensor):
            dense = move.matrix() if isinstance(move, LowRank) else move
            update.weight.addcmul_(dense.to(update.weight.dtype), update.rate, value=-1)
        elif isinstance(move, LowRank):
            update.weight.baddbmm_(move.D.mT, move.H, alpha=-update.rate)
        else:
            alike[update.rate].append((update.weight, move.to(update.weight.dtype)))
    for rate, pairs in alike.items():
        torch._foreach_add_([weight for weight, _ in pairs], [move for _, move in pairs], alpha=-rate)


def _with_momentum(updates: Sequence[Update]) -> list[Move]:
    """buffer <- momentum buffer + move;  Nesterov takes move + momentum buffer, others the buffer itself."""
    moves = [update.move for update in updates]
    dense = defaultdict(list)
    for place, (weight, move, _, _, buffer, momentum, nesterov) in enumerate(updates):
        if buffer is None:
            continue
        if isinstance(move, LowRank) and not nesterov and move.D.dtype == buffer.dtype:
            moves[place] = buffer.baddbmm_(move.D.mT, move.H, beta=momentum)
        else:
            matrix = move.matrix().reshape(weight.shape) if isinstance(move, LowRank) else move
            dense[momentum, nesterov].append((place, buffer, matrix.to(buffer.dtype)))
    for (momentum, nesterov), entries in dense.items():
        buffers, added = [buffer for _, buffer, _ in entries], [move for _, _, move in entries]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, added)
        ahead = torch._foreach_add(added, buffers, alpha=momentum) if nesterov else buffers
        for (place, _, _), move in zip(entries, ahead, strict=True):
            moves[place] = move
    return moves
