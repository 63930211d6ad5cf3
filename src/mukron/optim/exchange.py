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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mukron.curvature import (
    EVERY_RANK,
    IN_A_STATE,
    Ahead,
    Delivery,
    Joint,
    Kinds,
    Pass,
    Ranks,
    Samples,
    by_kind,
    joined,
)
from mukron.linalg import LowRank
from mukron.optim.again import measure_again
from mukron.optim.apart import Alike, refuse_apart
from mukron.optim.communication import BY_FACTORS, BY_OWNER, BY_ROWS, LayerTraffic, owners_of, scheme_of
from mukron.optim.direction import announce, directions
from mukron.optim.gradients import Averaged, Given, Sharded
from mukron.optim.options import KLClip
from mukron.optim.schemes import Seen, ahead_of, cost_of, hold_as_exchanged, parts_in, seen_in, speed_of, traffic_for
from mukron.optim.sent_moves import parts_of, sent_move, size_of, whole_move
from mukron.optim.shards import shards_of, spread_state
from mukron.optim.unseen import refuse_partial, unmeasured
from mukron.optim.update import Move

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder
    from mukron.optim.table import LayerEntry
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


class Way(NamedTuple):
    """How a layer's curvature travels (``optim.communication``), and whether D and H do, of which its gradient is."""

    name: str
    products: bool = False


@dataclass
class Together:
    """What an optimizer knows of the processes that it trains in.

    Attributes:
        group: The processes whose gradients the step averages; None: somebody else does, or there is one process.
        owned: Who has the state of which layer; None: this process has all of it.
        schemes: By layer, how its curvature travels, once that is chosen.
        compared: The group whose weights and gradients were compared, and steps since.
        ahead: What is sent in backward passes; None: nothing.
    """

    group: Any = None
    owned: Owned | None = None
    schemes: dict[str, Way] = field(default_factory=dict)
    compared: tuple[Any, int] | None = None
    ahead: Ahead | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is of this process: groups cannot be copied."""
        return {**self.__dict__, "group": None, "compared": None, "ahead": None}


class Exchange(Protocol):
    """What the processes that train one model do together."""

    def owns(self, layer: str) -> bool:
        """Whether this rank computes the move of a layer."""

    def everywhere(self, layer: str) -> bool:
        """Whether every rank computes the move of a layer."""

    def counts(self, layer: str) -> bool:
        """Whether a sum over ranks takes this rank's number for a layer."""

    def probed(self, layers: Sequence[LayerEntry]) -> dict[str, Tensor]:
        """What the gradients of weights do to the probe, G v, by layer."""

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
    rescue: bool = False
    waiting: bool = False
    double: dict[str, bool] = field(default_factory=dict)
    alike: Alike = field(default_factory=Alike)
    sizes: dict[str, tuple[tuple[tuple[int, ...], ...], torch.dtype]] = field(default_factory=dict)  # of its moves


class Owners:
    """Each layer has an owner: the rank that has its curvature, computes its move and sends that to the others.

    Where that is faster, all ranks get the rows of a layer, and each computes the move for itself.

    Attributes:
        owner: The rank of each layer, or ``EVERY_RANK``.
        schemes: By layer, how its curvature travels (``optim.communication``); None until a batch has been seen.
        traffic: By layer, what the cost model knows of it since then.
    """

    def __init__(self, optimizer: SecondOrder, ranks: Ranks) -> None:
        self.optimizer, self.ranks, self.size = optimizer, ranks, ranks.size
        self.shards = shards_of({name: entry.parameter for name, entry in optimizer.entries.items()}, ranks.size)
        kind = Sharded if self.shards else Averaged if optimizer.together.group is not None else Given
        self.gradients: Given = kind(self)
        known, names = optimizer.together.owned and optimizer.together.owned.owner, list(optimizer.layers)
        costs = [cost_of(layer) for layer in optimizer.layers.values()]
        before = [None if (rank := (known or {}).get(name)) == EVERY_RANK else rank for name in names]
        self.owner = self._chosen = dict(zip(names, owners_of(costs, ranks.size, before), strict=True))
        self.schemes: dict[str, Way] | None = None
        self.traffic: dict[str, LayerTraffic] = {}
        self._words: list[_Word] = []
        self.ahead = optimizer.together.ahead = optimizer.capture.ahead = ahead_of(optimizer, ranks)
        if not optimizer.capture_options.measures:
            self._settle(dict.fromkeys(names, Way(BY_OWNER)))
            nothing = [Seen({})] * self.size
            self.traffic = {name: traffic_for(self, layer, nothing) for name, layer in optimizer.layers.items()}
        elif names and all(self._may_use(optimizer.together.schemes.get(name)) for name in names):
            self._settle({name: optimizer.together.schemes[name] for name in names})
        elif self.shards:  # which do not travel by rows: owners are known
            self._take_own()
        else:  # layers that may yet travel by rows stay alike on all ranks until a batch decides
            ways = {name: optimizer.together.schemes.get(name) for name in names}
            self.owner = self.owner | {k: EVERY_RANK for k, way in ways.items() if way is None or way.name == BY_ROWS}

    def _may_use(self, scheme: Way | None) -> bool:
        """Whether a scheme that was chosen earlier, perhaps by other ranks, serves here."""
        return scheme is not None and not (scheme.name == BY_ROWS and self.shards)

    def owns(self, layer: str) -> bool:
        """Whether this rank computes the move of a layer."""
        return self.owner[layer] in (self.ranks.rank, EVERY_RANK)

    def everywhere(self, layer: str) -> bool:
        """Whether every rank computes the move of a layer."""
        return self.owner[layer] == EVERY_RANK

    def counts(self, layer: str) -> bool:
        """Whether a sum over ranks takes this rank's number for a layer."""
        return self.owner[layer] == self.ranks.rank or (self.owner[layer] == EVERY_RANK and self.ranks.rank == 0)

    def gather(self, passes: Sequence[Pass]) -> Joint:
        """What the passes of all ranks have brought; nothing travels in a step that uses none of it."""
        capture, options = self.optimizer.capture, self.optimizer.capture_options
        measured = options.measures and bool(capture.due or capture.double or capture.options.fused)
        looks = measured or (options.measures and (capture.checks_uses or capture.asks_reduction))
        ahead = self.ahead if measured else None
        seen, kinds, samples, uses = self._looked_at(passes, ahead) if looks else ([], {}, {}, {})
        sent, unformed = self.gradients.sent(kinds if measured else {})
        joint, received = Joint({}, passes, lambda layer: None), list[Mapping[str, Tensor]]()
        if looks or type(self.gradients) is not Given:
            how = options.empirical, measured, unformed, options.form
            delivery = Delivery(seen, kinds, samples, uses, self.owner, *how, sent, ahead)
            joint, received = joined(delivery, self.ranks)
        return replace(joint, gradients=self.gradients.taken(received, unformed), moving=self.gradients.moving())

    def probed(self, layers: Sequence[LayerEntry]) -> dict[str, Tensor]:
        """G v of the joined batch, for the weights of some layers."""
        return self.gradients.probed(layers)

    def _looked_at(
        self, passes: Sequence[Pass], ahead: Ahead | None
    ) -> tuple[Sequence[Pass], Kinds, Samples, dict[str, Any]]:
        """The passes and what they measured. Where that fails on one rank it does on all: none waits for another."""
        kinds, samples, uses, failed, seen = Kinds(), Samples(), dict[str, Any](), None, seen_in(passes)
        optimizer, capture = self.optimizer, self.optimizer.capture
        begun = 0 if ahead is None else ahead.measured(passes)
        try:
            kinds, samples, uses = by_kind(list(passes))
        except Exception as error:
            failed = error
        if failed is None and capture.due and not passes and (capture.lost or not capture.model.training):
            failed = unmeasured()
        words = "" if failed is None else f"{type(failed).__name__}: {failed}"
        all_seen, errors, all_begun = zip(*self.ranks.objects((seen, words, begun)), strict=True)
        refuse_partial(optimizer, all_seen)
        if failed is not None:
            raise failed
        _raise_of_others(errors)
        if not self.traffic and any(of.rows for of in all_seen):
            self._choose(all_seen)
        if ahead is not None:
            ahead.catch_up(passes, max(all_begun))
            ahead.owner, ahead.parts = self.owner, parts_in(self.traffic)
        return passes, kinds, samples, uses

    def _choose(self, seen: Sequence[Seen]) -> None:
        """Choose each layer's scheme once, by the first batch of all ranks."""
        layers = self.optimizer.layers.items()
        self.traffic = {name: traffic_for(self, layer, seen) for name, layer in layers}
        if self.schemes is not None:
            return
        options, traffic = self.optimizer.options.communication, self.traffic
        speed = speed_of(self.ranks, options)
        chosen = {name: scheme_of(of, options, speed) for name, of in traffic.items()}
        schemes = {name: Way(of, traffic[name].products and of != BY_FACTORS) for name, of in chosen.items()}
        known = {
            name: of for name, of in self.optimizer.together.schemes.items() if name in schemes and self._may_use(of)
        }
        self._settle({**schemes, **known})

    def _settle(self, schemes: dict[str, Way]) -> None:
        optimizer = self.optimizer
        self.schemes = optimizer.together.schemes = schemes
        self.owner = self._chosen | {name: EVERY_RANK for name, (scheme, _) in schemes.items() if scheme == BY_ROWS}
        self._take_own()
        hold_as_exchanged(optimizer)

    def _take_own(self) -> None:
        """From now on the state of a layer is with its owner."""
        self.optimizer.together.owned = Owned(self.size, self.ranks.rank, self.owner)
        self.forget_others()

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
        total = None  # of gains of all ranks
        if isinstance(self.optimizer.options.trust, KLClip):
            total = sum(self.ranks.objects(float(step.gain) if failed is None else 0.0))
        try:
            if failed is None:
                word.counts = step.decide(moves, total)
        except Exception as error:
            failed = error
        if failed is not None:
            word.error = f"{type(failed).__name__}: {failed}"
        own = {name: move for name, move in moves.items() if self._travels(name)}
        word.waiting, word.double, word.rescue = step.waiting, _double(step), step.rescue
        word.alike = Alike.of(self.optimizer, step.gradient_sizes if type(self.gradients) is Given else None)
        word.sizes = {name: size_of(sent_move(step, name, move)) for name, move in own.items()} if word.counts else {}
        self._words = self.ranks.objects(word)
        if failed is not None:
            raise failed
        _raise_of_others([other.error for other in self._words])
        refuse_apart(self.optimizer, [other.alike for other in self._words])
        step.waiting = any(other.waiting for other in self._words)
        verdicts = [other.counts for other in self._words]
        if False not in verdicts and None in verdicts and not step.rescue and any(o.rescue for o in self._words):
            step.rescue = True  # all ranks look at inverses in the same way: some are made by all of them
            measure_again(step)
        return moves, False if False in verdicts else None if None in verdicts else True

    def _travels(self, name: str) -> bool:
        """Whether the move of a parameter goes from its layer's owner to the other ranks."""
        entry = self.optimizer.entries[name]
        return entry.preconditioned and self.owner[entry.layer] != EVERY_RANK

    def share(self, step: Transaction, moves: Moves) -> Moves:
        """The moves of all layers, in the order of parameters; of a weight that is spread each rank gets its part."""
        entries = self.optimizer.entries
        for other in self._words:
            for name, double in other.double.items():
                step.stage(self.optimizer.layers[name].anchor, double=double)
        shared = {name: move for name, move in moves.items() if not self._travels(name)}
        shared |= self._parts_of(step, moves) if self.shards else self._broadcast(step, moves)
        return {name: shared[name] for name in entries if name in shared}

    def _broadcast(self, step: Transaction, moves: Moves) -> Moves:
        """Moves that their owners send to all, one message for each owner and dtype."""
        entries, ranks, shared, waits = self.optimizer.entries, self.ranks, Moves(), []
        for rank, other in enumerate(self._words):
            own = rank == ranks.rank
            for dtype in dict.fromkeys(dtype for _, dtype in other.sizes.values()):
                names = [name for name, (_, kind) in other.sizes.items() if kind == dtype]
                shapes = [shape for name in names for shape in other.sizes[name][0]]
                parts = [part for name in names for part in parts_of(sent_move(step, name, moves[name]))] if own else []
                waits.append((names, other.sizes, shapes, *ranks.sending(parts, shapes, dtype, rank)))
        for names, sizes, shapes, buffer, work in waits:
            work.wait()
            arrived = buffer.to(ranks.device)
            pieces = iter(torch.split(arrived, [torch.Size(shape).numel() for shape in shapes]))
            for name in names:
                tensors = [next(pieces).reshape(shape) for shape in sizes[name][0]]
                shared[name] = tensors[0] if len(tensors) == 1 else LowRank(*tensors)
                announce(step, entries[name])
        return shared

    def _parts_of(self, step: Transaction, moves: Moves) -> Moves:
        """Of each owner's moves the parts that belong here."""
        entries, parcels = self.optimizer.entries, [dict[str, Tensor]() for _ in range(self.size)]
        for name, move in moves.items():
            if not self._travels(name):
                continue
            whole, shards = whole_move(step, name, move), self.shards.get(name)
            for rank, parcel in enumerate(parcels):
                parcel[name] = whole if shards is None else shards.part(whole, rank)
        shared = Moves()
        for of_owner in self.ranks.delivered(parcels):
            for name, part in of_owner.items():
                shared[name] = part
                announce(step, entries[name])
        return shared

    def whole(self, state: ByParameter) -> ByParameter:
        """The state of all parameters, each from the rank that has it. All ranks must call this.

        Args:
            state: Plain data, by the number of the parameter.
        """
        why = (
            f"on all of {self.size} ranks: the state of each layer is with the rank that owns it. Call it on every "
            "rank, and let one of them write the file"
        )
        here = f"state_dict() was called on rank {self.ranks.rank}"
        if not self.ranks.meet(WAITS_FOR_RANKS, f"{here}, and waits to be called {why}"):
            raise RuntimeError(f"{here}, but not {why}")
        found = self.ranks.delivered([state] * self.size, where=IN_A_STATE)
        merged = {key: {k: v for of in found for k, v in of.get(key, {}).items()} for one in found for key in one}
        entries = {entry.parameter: entry for entry in self.optimizer.entries.values()} if self.shards else {}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters if self.shards else ()):
            entry = entries[parameter]
            if (shards := self.shards.get(entry.name)) is not None:
                for key in spread_state(entry, state[number]):
                    merged[number][key] = shards.whole([of[number][key] for of in found], self.ranks.rank)
        return merged

    def forget_others(self) -> None:
        """Drop what this rank does not need of the state of layers that others own."""
        for layer in self.optimizer.layers.values():
            if not self.owns(layer.name):
                for entry in layer.blocks.values():
                    state = self.optimizer.state.get(entry.parameter, {})
                    for key in [key for key in state if key not in EVERYWHERE]:
                        del state[key]


def _raise_of_others(errors: Sequence[str]) -> None:
    """errors: by rank, in words."""
    for rank, error in enumerate(errors):
        if error:
            raise RuntimeError(f"rank {rank} could not take this step, so none does: {error}")


def _double(step: Transaction) -> dict[str, bool]:
    """Layers of this rank and whether the next step is to measure them in float64."""
    found = {layer.name: step.staged(layer.anchor, "double") for layer in step.active}
    return {name: double for name, double in found.items() if double is not None}
