"""Moves as they travel from a layer's owner to the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mukron.layers import WEIGHT
from mukron.linalg import LowRank
from mukron.optim.direction import dense
from mukron.optim.update import Move

if TYPE_CHECKING:
    from mukron.optim.table import ParameterEntry
    from mukron.optim.transaction import Transaction


def sent_move(step: Transaction, name: str, move: Move) -> Move:
    """A move as it travels: D^T H where that is smaller than the matrix, in the precision in which it is written."""
    entry = step.optimizer.entries[name]
    dtype = _dtype(step, entry)
    smaller = isinstance(move, LowRank) and move.D.numel() + move.H.numel() < entry.parameter.numel()
    if isinstance(move, LowRank) and smaller and move.D.dtype == dtype:
        return move
    return whole_move(step, name, move)


def whole_move(step: Transaction, name: str, move: Move) -> Tensor:
    """A move as a tensor of the parameter's shape, in the precision in which it is written."""
    entry = step.optimizer.entries[name]
    if isinstance(move, LowRank):
        move = step.optimizer.layers[entry.layer].layer.values(WEIGHT, dense(move))
    return move.to(_dtype(step, entry))


def _dtype(step: Transaction, entry: ParameterEntry) -> torch.dtype:
    """That of the buffer that the move is added to, or of the weight."""
    buffer = step.staged(entry.parameter, "momentum_buffer")
    on_update = entry.group["momentum"] and entry.group["momentum_on"] == "update"
    return entry.parameter.dtype if buffer is None or not on_update else buffer.dtype


def parts_of(move: Move) -> tuple[Tensor, ...]:
    """The tensors of a move."""
    return (move.D, move.H) if isinstance(move, LowRank) else (move,)


def size_of(move: Move) -> tuple[tuple[tuple[int, ...], ...], torch.dtype]:
    """Their shapes and their dtype."""
    parts = parts_of(move)
    return tuple(tuple(part.shape) for part in parts), parts[0].dtype
