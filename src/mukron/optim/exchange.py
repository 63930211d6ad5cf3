"""Where processes talk: the one place for what ranks gather, own, agree on and share.

In one process there is nobody to talk to, and an optimizer's ``exchange`` is None. The step asks it at these points:

    owns     at its beginning: whether this rank computes the move of a layer
    gather   after the passes: statistics of all ranks' batches, of the layers that this rank owns
    agree    before the step counts: the same decision on every rank, or an error on all of them
    share    after that: the moves of all layers, each from its owner
    whole    when the state is saved: that of all layers

Curvature, inverses and averages of gradients of a layer are in its owner's state alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mukron.curvature import Joint, Pass, Ranks, joined
from mukron.layers import BIAS
from mukron.linalg import LowRank
from mukron.optim.direction import announce, dense, directions
from mukron.optim.options import KLClip
from mukron.optim.update import Move

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder
    from mukron.optim.table import LayerEntry, ParameterEntry
    from mukron.optim.transaction import Transaction

Moves = dict[str, Move]
ByParameter = dict[Any, dict[str, Any]]  # states
SAVED_NAMES = ("steps", "kept", "mukron")  # under which the state of a parameter is saved (``optim.saving``)
EVERYWHERE = ("double", "momentum_buffer", *SAVED_NAMES)  # what every rank keeps of a layer's state
WAITS_FOR_RANKS = datetime.timedelta(minutes=5)  # for ranks to join in saving a state


class Owned(NamedTuple):
    """Which process has the state of which layer."""

    ranks: int
    rank: int  # of this process
    owner: dict[str, int]  # by layer


class Exchange(Protocol):
    """What the processes that train one model do together."""

    def owns(self, layer: str) -> bool:
        """Whether this rank computes the move of a layer."""

    def gather(self, passes: Sequence[Pass]) -> Joint:
        """What the passes of all ranks have brought for the layers of this one."""

    def agree(self, step: Transaction, made: bool) -> tuple[Moves, bool | None]:
        """Try the step, and decide on it together: it counts, is skipped (False), or is tried again (None).

        made: an earlier attempt has made the operators.
        """

    def share(self, step: Transaction, moves: Moves) -> Moves:
        """The moves of all layers, each from the rank that owns it."""

    def whole(self, state: ByParameter) -> ByParameter:
        """The state of all parameters, each from the rank that has it."""


@dataclass
class _Word:
    """What one rank has to say of an attempt."""

    counts: bool | None = None
    error: str = ""
    waiting: bool = False
    double: dict[str, bool] = field(default_factory=dict)
    sizes: dict[str, tuple[tuple[tuple[int, ...], ...], torch.dtype]] = field(default_factory=dict)  # of its moves


class Owners:
    """Each layer has an owner: the rank that has its curvature, computes its move and sends that to the others."""

    def __init__(self, optimizer: SecondOrder, ranks: Ranks) -> None:
        self.optimizer, self.ranks, self.size = optimizer, ranks, ranks.size
        self.owner = owners_of(list(optimizer.layers.values()), ranks.size, optimizer.owned and optimizer.owned.owner)
        self._words: list[_Word] = []

    def owns(self, layer: str) -> bool:
        """Whether this rank computes the move of a layer."""
        return self.owner[layer] == self.ranks.rank

    def gather(self, passes: Sequence[Pass]) -> Joint:
        """What the passes of all ranks have brought; nothing travels in a step that uses none of it."""
        capture = self.optimizer.capture
        options, measured = capture.options, bool(capture.due or capture.double)
        if not (options.measures and (measured or capture.checks_uses or capture.asks_reduction)):
            return Joint({}, passes, lambda layer: None)
        return joined(passes, self.owner, self.ranks, options.empirical, measured)

    def agree(self, step: Transaction, made: bool) -> tuple[Moves, bool | None]:
        """The decision of all ranks. A rank that fails tells the others, which fail too instead of waiting for it."""
        moves, word, failed = Moves(), _Word(), None
        try:
            if not made:
                step.measure()
                step.prepare()
            moves = {} if step.operators_failed else directions(self.optimizer, step)
        except Exception as error:
            failed = error
        total = None
        if isinstance(self.optimizer.options.trust, KLClip):
            total = sum(self.ranks.objects(float(step.gain) if failed is None else 0.0))
        try:
            if failed is None:
                word.counts = step.decide(moves, total)
        except Exception as error:
            failed = error
        if failed is not None:
            word.error = f"{type(failed).__name__}: {failed}"
        own = {name: move for name, move in moves.items() if self.optimizer.entries[name].preconditioned}
        word.waiting, word.double = step.waiting, _double(step)
        word.sizes = {name: _size(_sent(step, name, move)) for name, move in own.items()} if word.counts else {}
        self._words = self.ranks.objects(word)
        if failed is not None:
            raise failed
        for rank, other in enumerate(self._words):
            if other.error:
                raise RuntimeError(f"rank {rank} could not take this step, so none does: {other.error}")
        step.waiting = any(other.waiting for other in self._words)
        verdicts = [other.counts for other in self._words]
        return moves, False if False in verdicts else None if None in verdicts else True

    def share(self, step: Transaction, moves: Moves) -> Moves:
        """The moves of all layers, in the order of parameters: one message for each owner and dtype."""
        entries, ranks = self.optimizer.entries, self.ranks
        for other in self._words:
            for name, double in other.double.items():
                step.stage(self.optimizer.layers[name].anchor, double=double)
        shared = {name: move for name, move in moves.items() if not entries[name].preconditioned}
        waits = []
        for rank, other in enumerate(self._words):
            own = rank == ranks.rank
            for dtype in dict.fromkeys(dtype for _, dtype in other.sizes.values()):
                names = [name for name, (_, kind) in other.sizes.items() if kind == dtype]
                shapes = [shape for name in names for shape in other.sizes[name][0]]
                parts = [part for name in names for part in _parts(_sent(step, name, moves[name]))] if own else []
                waits.append((names, other.sizes, shapes, *ranks.sending(parts, shapes, dtype, rank)))
        for names, sizes, shapes, buffer, work in waits:
            work.wait()
            pieces = iter(torch.split(buffer, [torch.Size(shape).numel() for shape in shapes]))
            for name in names:
                tensors = [next(pieces).reshape(shape) for shape in sizes[name][0]]
                shared[name] = tensors[0] if len(tensors) == 1 else LowRank(*tensors)
                announce(step, entries[name])
        return {name: shared[name] for name in entries if name in shared}

    def whole(self, state: ByParameter) -> ByParameter:
        """The state of all parameters, each from the rank that has it. All ranks must call this.

        Args:
            state: Plain data, by the number of the parameter.
        """
        if not self.ranks.meet(WAITS_FOR_RANKS):
            raise RuntimeError(
                f"state_dict() was called on rank {self.ranks.rank}, but not on all of {self.size} ranks: the state of "
                "each layer is with the rank that owns it. Call it on every rank, and let one of them write the file"
            )
        found = self.ranks.delivered([state] * self.size)
        return {key: {k: v for of in found for k, v in of.get(key, {}).items()} for one in found for key in one}

    def forget_others(self) -> None:
        """Drop what this rank does not need of the state of layers that others own."""
        for layer in self.optimizer.layers.values():
            if not self.owns(layer.name):
                for entry in layer.blocks.values():
                    state = self.optimizer.state.get(entry.parameter, {})
                    for key in [key for key in state if key not in EVERYWHERE]:
                        del state[key]


def owners_of(layers: Sequence[LayerEntry], ranks: int, known: Mapping[str, int] | None = None) -> dict[str, int]:
    """The rank that owns each layer: the most expensive first, each to the rank with the least to do.

    known: owners that were chosen before, of layers that were there then.
    """
    load, owner = [0.0] * ranks, {layer.name: (known or {}).get(layer.name, -1) for layer in layers}
    for layer in sorted(layers, key=lambda layer: (owner[layer.name] < 0, -cost_of(layer))):
        if owner[layer.name] < 0:
            owner[layer.name] = min(range(ranks), key=load.__getitem__)
        load[owner[layer.name]] += cost_of(layer)
    return owner


def cost_of(layer: LayerEntry) -> float:
    """About how many multiplications a layer's inverses and its move take: cubes of its sides, and both products."""
    matrix = layer.layer
    d_out, d_in = float(matrix.d_out), 1.0 if matrix.one_hot or list(layer.blocks) == [BIAS] else float(matrix.d_in)
    return matrix.groups * (d_out**3 + d_in**3 + d_out * d_in * (d_out + d_in))


def _sent(step: Transaction, name: str, move: Move) -> Move:
    """A move as it travels: D^T H where that is smaller than the matrix, in the precision in which it is written."""
    entry = step.optimizer.entries[name]
    dtype = _dtype(step, entry)
    if isinstance(move, LowRank):
        if move.D.numel() + move.H.numel() < entry.parameter.numel() and move.D.dtype == dtype:
            return move
        move = step.optimizer.layers[entry.layer].layer.values("weight", dense(move))
    return move.to(dtype)


def _dtype(step: Transaction, entry: ParameterEntry) -> torch.dtype:
    """That of the buffer that the move is added to, or of the weight."""
    buffer = step.staged(entry.parameter, "momentum_buffer")
    on_update = entry.group["momentum"] and entry.group["momentum_on"] == "update"
    return entry.parameter.dtype if buffer is None or not on_update else buffer.dtype


def _double(step: Transaction) -> dict[str, bool]:
    """Layers of this rank and whether the next step is to measure them in float64."""
    found = {layer.name: step.staged(layer.anchor, "double") for layer in step.active}
    return {name: double for name, double in found.items() if double is not None}


def _parts(move: Move) -> tuple[Tensor, ...]:
    return (move.D, move.H) if isinstance(move, LowRank) else (move,)


def _size(move: Move) -> tuple[tuple[tuple[int, ...], ...], torch.dtype]:
    parts = _parts(move)
    return tuple(tuple(part.shape) for part in parts), parts[0].dtype
