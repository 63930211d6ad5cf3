"""Statistics that are sent in the backward pass, before the step asks for them.

Ranks begin the same *messages* in the same order, of sizes that all of them know from the last step that measured:

    the first    what is there once a backward pass has arrived at the model's output: A, and B of Fisher signals
    the others   D, the loss's own derivatives, some layers at a time, as the backward pass comes by

Nothing of that is a promise. A rank that has something else to say than at the last step, or nothing, sends zeros; and
before the step, ranks catch up with the one that has begun the most. What a step uses are the tensors that its
statistics are made of (``sending.Outgoing``). Those that are on their way already are not sent again, and whatever else
was sent is dropped: gradients may be thrown away, added to or computed once more, on one rank or on all.

Messages are begun if the last two steps that measured had the same sizes on all ranks.
"""

from __future__ import annotations

import atexit
import datetime
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import (  # type: ignore[attr-defined]
    AllToAllOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    distributed_c10d,
)

from mukron.curvature.passes import Kinds, Pass, kinds_in
from mukron.curvature.ranks import Ranks, flat
from mukron.curvature.sending import Outgoing, tensors_of

MessageSizes = dict[
    tuple[int, str], list[int]
]  # by message: number of its layers' part and dtype; numbers for each rank


class Message(NamedTuple):
    """One that all ranks begin.

    Attributes:
        part: Which layers it has, by number; the first has all of them.
        dtype: Of its numbers.
        sends, receives: How many numbers, by rank.
    """

    part: int
    dtype: torch.dtype
    sends: Sequence[int]
    receives: Sequence[int]


class Told(NamedTuple):
    """What ranks tell each other of their sizes, in a step that measures.

    Attributes:
        sizes: Numbers for the rank that is told, by message.
        again: They are those of the last such step.
        name: What this process would call a lane; that of the first rank is taken.
    """

    sizes: dict[tuple[int, str], int]
    again: bool
    name: str


class Lane:
    """A group of ranks for the messages of one optimizer, so that their order is independent of all others.

    It is none of the groups that torch knows of: those have names that depend on how many groups a process is in.

    Args:
        ranks: The processes that train the model.
        name: One that no other lane has, the same on all of them.
    """

    # What was begun in lanes since their last step. A lane that is given up before others begin the same is kept: it
    # would wait for them as it ends.
    open: ClassVar[dict[Lane, list[Any]]] = {}
    alive: ClassVar[weakref.WeakSet[Lane]] = weakref.WeakSet()

    def __init__(self, ranks: Ranks, name: str) -> None:
        for lane, works in list(Lane.open.items()):
            if all(work.is_completed() for work in works):
                del Lane.open[lane]
        Lane.alive.add(self)
        store = PrefixStore(f"mukron/{name}", distributed_c10d._get_default_store())
        kind, place, device = ProcessGroup.BackendType, (ranks.rank, ranks.size), ranks.device
        self.group, self.options = ProcessGroup(store, *place), AllToAllOptions()
        if hasattr(self.options, "asyncOp"):  # from torch 2.7 on
            self.options.asyncOp = True
        if device.type == "cpu":
            self.group._set_default_backend(kind.GLOO)
            self.group._register_backend(device, kind.GLOO, ProcessGroupGloo(store, *place, _timeout_of(ranks.group)))
            return
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = _timeout_of(ranks.group)
        self.group._set_default_backend(kind.NCCL)
        self.group._register_backend(device, kind.NCCL, distributed_c10d.ProcessGroupNCCL(store, *place, options))

    @staticmethod
    def close_all() -> None:
        """End the threads of all lanes in which nothing is on its way, while Python still runs."""
        for lane in list(Lane.alive):
            if all(work.is_completed() for work in Lane.open.get(lane, ())):
                del lane.group

    @staticmethod
    def serves(ranks: Ranks) -> bool:
        """Whether there are lanes for processes like these."""
        name = distributed.get_backend(ranks.group)
        return name == ("gloo" if ranks.device.type == "cpu" else "nccl") and ranks.device.type in ("cpu", "cuda")


atexit.register(Lane.close_all)  # a thread that ends later than Python aborts the process


class _Begun(NamedTuple):
    message: Message
    work: Any
    outputs: Tensor
    inputs: Tensor  # is read until the work is done


class Ahead:
    """The messages of one optimizer.

    Args:
        ranks: The processes that train the model.
        empirical: Signals are derivatives of the user's loss.
    """

    def __init__(self, ranks: Ranks, empirical: bool) -> None:
        self.ranks, self.empirical, self.outgoing = ranks, empirical, Outgoing(ranks.size, ranks.rank)
        self.lane: Lane | None = None
        self.owner: Mapping[str, int] = {}  # of layers
        self.parts: Sequence[frozenset[str]] = ()  # layers of each message
        self.messages: Sequence[Message] = ()  # which all ranks begin in the coming backward pass
        self.begun: list[_Begun] = []
        self._passes = 0  # of a step, the last time
        self._sizes: MessageSizes | None = None  # likewise
        self._waits = frozenset[str]()  # layers whose rows are made at the step, the last time
        self._placed: list[dict[int, tuple[int, int, Tensor]]] = [{} for _ in range(ranks.size)]

    # In a backward pass.

    def advance(self, passes: Sequence[Pass]) -> None:
        """Begin the messages that are ready.

        Args:
            passes: Those that were differentiated since the last step.
        """
        while len(self.begun) < len(self.messages) and self._is_ready(self.messages[len(self.begun)], passes):
            self._begin(passes)

    def _is_ready(self, message: Message, passes: Sequence[Pass]) -> bool:
        if len(passes) != self._passes or not passes[-1].due:
            return False
        last = passes[-1]
        uses = [(key, use) for key, use in last.layers.items() if message.part and use.name in self.parts[message.part]]
        return all(use.reached or not last.wants_delta(key) for key, use in uses)

    @torch.no_grad()
    def _begin(self, passes: Sequence[Pass]) -> None:
        """Send the next message: what is there of its layers, or zeros if that is not of the size that all expect."""
        message, number, lane = self.messages[len(self.begun)], len(self.begun), self.lane
        assert lane is not None
        device = self.ranks.device
        try:
            with torch.autocast(device.type, enabled=False):
                parcels = self._unsent(passes, message)
        except RuntimeError:  # what is wrong will be said at the step, on all ranks
            parcels = [[] for _ in message.sends]
        if [sum(t.numel() for t in tensors) for tensors in parcels] == list(message.sends):
            inputs = torch.cat(
                [torch.empty(0, dtype=message.dtype, device=device), *(flat(t) for of in parcels for t in of)]
            )
            for placed, tensors in zip(self._placed, parcels, strict=True):
                begin = 0
                for t in tensors:
                    placed[id(t)] = number, begin, t
                    begin += t.numel()
        else:
            inputs = torch.zeros(sum(message.sends), dtype=message.dtype, device=device)
        outputs = torch.empty(sum(message.receives), dtype=message.dtype, device=device)
        splits = list(message.receives), list(message.sends)
        work = lane.group.alltoall_base(outputs, inputs, *splits, lane.options)
        self.begun.append(_Begun(message, work, outputs, inputs))
        Lane.open.setdefault(lane, []).append(work)

    def _unsent(self, passes: Sequence[Pass], message: Message) -> list[list[Tensor]]:
        """Tensors that go to each rank and are not on their way."""
        kinds = kinds_in(passes, self.parts[message.part] - self._waits)
        by_rank = self.outgoing.by_rank(kinds, self.owner, self.empirical)
        return [
            [t for t in self._of_part(of, message.part) if t.dtype == message.dtype and id(t) not in placed]
            if rank != self.ranks.rank
            else []
            for rank, (of, placed) in enumerate(zip(by_rank, self._placed, strict=True))
        ]

    def _of_part(self, kinds: Kinds, part: int) -> list[Tensor]:
        """Each tensor once; the first part has what is there at the output, the others have the rest."""
        early = {id(t): t for t in tensors_of(kinds, self.empirical, at_output=True)}
        if part == 0:
            return list(early.values())
        rest = {id(t): t for t in tensors_of(kinds, self.empirical, at_output=False) if id(t) not in early}
        return list(rest.values())

    # At the step.

    def measured(self, passes: Sequence[Pass]) -> int:
        """The number of messages that were begun; what passes have measured is put together after this.

        Args:
            passes: Those that were differentiated since the last step.
        """
        self._waits = frozenset(use.name for one in passes for use in one.layers.values() if use.waits)
        return len(self.begun)

    def catch_up(self, passes: Sequence[Pass], begun: int) -> None:
        """Begin what other ranks have begun.

        Args:
            passes: Those that were differentiated since the last step.
            begun: The number of messages of the rank that has begun the most.
        """
        while len(self.begun) < begun:
            self._begin(passes)

    def place(self, rank: int, tensor: Tensor) -> tuple[int, int] | None:
        """The message in which a tensor is on its way to a rank, and where it begins there; None: in none.

        Args:
            rank: The one it goes to.
            tensor: The tensor.
        """
        found = self._placed[rank].get(id(tensor))
        return None if found is None else found[:2]

    def arrived(self, rank: int, place: tuple[int, int], numbers: int) -> Tensor:
        """What has come from a rank, flat.

        Args:
            rank: The rank.
            place: The message, and where it begins there.
            numbers: How many.
        """
        message, _, outputs, _ = self.begun[place[0]]
        begin = sum(message.receives[:rank]) + place[1]
        return outputs[begin : begin + numbers]

    def wait(self) -> None:
        """Until all that was begun has arrived."""
        for one in self.begun:
            one.work.wait()

    def told(self, to_ranks: Sequence[Kinds], passes: int) -> list[Told]:
        """What each rank is told of this step's sizes.

        Args:
            to_ranks: What goes to each rank in this step.
            passes: How many there were.
        """
        sizes: MessageSizes = {}
        for rank, kinds in enumerate(to_ranks):
            for part, names in enumerate(self.parts if rank != self.ranks.rank else ()):
                of_part = {name: of for name, of in kinds.items() if name in names and name not in self._waits}
                for t in self._of_part(of_part, part):
                    if t.dtype.is_floating_point:
                        sizes.setdefault((part, str(t.dtype)), [0] * self.ranks.size)[rank] += t.numel()
        again = (sizes, passes) == (self._sizes, self._passes)
        self._sizes, self._passes = sizes, passes
        name = secrets.token_hex(8)
        return [Told({key: of[rank] for key, of in sizes.items()}, again, name) for rank in range(self.ranks.size)]

    def agree(self, told: Sequence[Told]) -> None:
        """Choose the messages of the coming backward passes, the same on all ranks; what has arrived is dropped.

        Args:
            told: What every rank has told this one.
        """
        self.begun, self.messages, self.outgoing = [], (), Outgoing(self.ranks.size, self.ranks.rank)
        self._placed = [{} for _ in self._placed]
        if self.lane is not None:
            Lane.open.pop(self.lane, None)
        if not all(one.again for one in told) or self._sizes is None:
            return
        if self.lane is None:
            self.lane = Lane(self.ranks, told[0].name)
        self.messages = [
            Message(
                key[0],
                getattr(torch, key[1].removeprefix("torch.")),
                self._sizes.get(key, [0] * self.ranks.size),
                [one.sizes.get(key, 0) for one in told],
            )
            for key in sorted({key for one in told for key in one.sizes})
        ]


def _timeout_of(group: Any) -> datetime.timedelta:
    """That of a group's collectives."""
    try:
        backend = group._get_backend(torch.device("cuda" if distributed.get_backend(group) == "nccl" else "cpu"))
        timeout: datetime.timedelta = backend.options._timeout
        return timeout
    except (AttributeError, RuntimeError):
        return distributed_c10d.default_pg_timeout
