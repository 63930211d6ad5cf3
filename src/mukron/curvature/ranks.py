"""The processes that train one model together: what each has measured, brought together on all of them.

    what ranks measured of a layer   goes to the rank that owns it, in one message for each dtype
    the move of a layer              comes back from there
    everything else                  travels with the sizes of those, in one message

So an owner's statistics are those of the joined batch, as if every rank's passes were micro-batches of one process.
Gradients are averages over ranks. The loss of the joined batch is the mean of the ranks' losses, so derivatives of a
rank's own loss are divided by the number of ranks.
"""

from __future__ import annotations

import datetime
import io
import pickle
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn import functional

IN_A_STEP = (
    "the processes that train this model did not come together in a step: one of them has ended, or takes another "
    "number of steps or of forward and backward passes, as with fewer batches (drop_last=True in samplers and loaders "
    "makes them equal)"
)
IN_A_PASS = (
    "the processes that train this model did not come together in a backward pass, where they number the samples that "
    "targets are drawn for: one of them has ended, or takes another number of passes in a step, as with fewer batches "
    '(drop_last=True in samplers and loaders makes them equal). With fisher="empirical" numbers of passes may differ'
)
IN_A_FORWARD_PASS = IN_A_STEP.replace("in a step", "in a forward pass")
IN_A_STATE = (
    "the processes that train this model did not come together in state_dict(): call it on every rank, and let one of "
    "them write the file"
)
PLACES = {
    IN_A_STEP: "in the step",
    IN_A_PASS: "in a backward pass",
    IN_A_FORWARD_PASS: "in a forward pass",
    IN_A_STATE: "in state_dict()",
}
SOON = 10.0  # seconds, after which a process that waits says what for
T = TypeVar("T")
ALIGNMENT = 64  # bytes, to which torch aligns memory on CPUs; GPUs take more


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that is spread over several; of any other tensor all."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


InMessage = tuple[int, int]  # of a tensor that was sent ahead: its message, and where it begins there


class SentAhead(Protocol):
    """What is on its way before it is delivered."""

    def place(self, rank: int, tensor: Tensor) -> InMessage | None:
        """Where a tensor is that goes to a rank; None: it is not on its way."""

    def wait(self) -> None:
        """Until all of it has arrived."""

    def arrived(self, rank: int, place: InMessage, numbers: int) -> Tensor:
        """So many numbers that have come from a rank, flat."""


class _Described(NamedTuple):
    """A tensor on its way, without its numbers; where it is the transpose of what is in memory, so it arrives."""

    shape: torch.Size
    dtype: torch.dtype
    turned: bool
    place: InMessage | None = None

    @classmethod
    def of(cls, tensor: Tensor, place: InMessage | None = None) -> _Described:
        return cls(tensor.shape, tensor.dtype, _is_turned(tensor), place)

    def restored(self, numbers: Tensor) -> Tensor:
        numbers = aligned(numbers)
        if not self.turned:
            return numbers.reshape(self.shape)
        return numbers.reshape(*self.shape[:-2], self.shape[-1], self.shape[-2]).mT


def aligned(tensor: Tensor) -> Tensor:
    """The tensor where products of it round as those of a tensor of its own do: kernels depend on addresses."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def _is_turned(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and not tensor.is_contiguous() and tensor.mT.is_contiguous()


def flat(tensor: Tensor) -> Tensor:
    """Its numbers in the order in which they are in memory: products of another order round in another way."""
    return (tensor.mT if _is_turned(tensor) else tensor).reshape(-1)


@contextmanager
def said(where: str) -> Iterator[None]:
    """Say more than torch.distributed does where ranks do not come together.

    Args:
        where: Where they should have.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{where} (torch.distributed: {error})") from error


class Ranks:
    """A process group, and what its ranks exchange. Every call must be made by all of them."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        # Gloo has no exchange of tensors on GPUs
        self.wire = torch.device("cpu") if distributed.get_backend(group) == "gloo" else device
        self.size, self.rank = distributed.get_world_size(group), distributed.get_rank(group)

    def objects(self, own: T, where: str = IN_A_STEP) -> list[T]:
        """Every rank's object, in the order of ranks."""
        data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        lengths = [length for length, _ in self.numbers(where, len(data))]
        with said(where):
            parts = self.gathered(functional.pad(data, (0, max(lengths) - len(data))).to(self.wire))
        return [pickle.loads(bytes(part[:n].cpu().numpy())) for part, n in zip(parts, lengths, strict=True)]

    def numbers(self, where: str, one: int, other: int = 0) -> list[tuple[int, int]]:
        """Every rank's two numbers. Ranks that are at different places of a step are told so, all of them.

        Args:
            where: What is said where ranks do not come, a key of ``PLACES``.
            one, other: This rank's numbers.
        """
        places = list(PLACES)
        with said(where):
            sent = torch.tensor([places.index(where), one, other], device=self.device)
            found = [part.tolist() for part in self.gathered(sent)]
        if any(place != places.index(where) for place, _, _ in found):
            ranks = ", ".join(f"rank {rank} was {PLACES[places[place]]}" for rank, (place, _, _) in enumerate(found))
            raise RuntimeError(
                f"the processes that train this model did not come together: {ranks}. All of them must take the same "
                "numbers of steps and of forward and backward passes, with the model in training mode"
            )
        return [(first, second) for _, first, second in found]

    def meet(self, patience: datetime.timedelta, waiting: str) -> bool:
        """Whether all ranks come here in time.

        Args:
            patience: How long to wait.
            waiting: What to say if that takes a while.
        """
        reminder = threading.Timer(SOON, warnings.warn, (waiting, UserWarning))
        reminder.daemon = True
        reminder.start()
        try:
            distributed.barrier(group=self.group, async_op=True).wait(timeout=patience)
        except RuntimeError:
            return False
        finally:
            reminder.cancel()
        return True

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have one shape."""
        sent = own.contiguous().to(self.wire)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        distributed.all_gather(parts, sent, group=self.group)
        return [part.to(own.device) for part in parts]

    def share(self, numbers: int) -> tuple[int, int]:
        """Where this rank's part of a joint draw begins, and how many numbers all ranks draw.

        numbers: how many this rank needs. So draws do not depend on how a batch is split over ranks.
        """
        counts = [count for count, _ in self.numbers(IN_A_PASS, numbers)]
        return sum(counts[: self.rank]), sum(counts)

    def delivered(self, parcels: Sequence[T], ahead: SentAhead | None = None, where: str = IN_A_STEP) -> list[T]:
        """What every rank sends to this one: nested objects with all tensors in them, one message for each dtype.

        Args:
            parcels: What this rank sends to each of them. Tensors that are one in a parcel are one when it arrives.
            ahead: Knows of tensors that are on their way already.
            where: What is said where ranks do not come.
        """
        sent = [packed(parcel) for parcel in parcels]
        places = [
            [None if ahead is None else ahead.place(rank, t) for t in tensors] for rank, (_, tensors) in enumerate(sent)
        ]
        described = self.objects(
            [
                (text, [_Described.of(t, at) for t, at in zip(tensors, of_rank, strict=True)])
                for (text, tensors), of_rank in zip(sent, places, strict=True)
            ],
            where,
        )
        texts, kinds = zip(*(of_rank[self.rank] for of_rank in described), strict=True)
        found: list[list[Any]] = [[None] * len(of_rank) for of_rank in kinds]
        for dtype in dict.fromkeys(k.dtype for of in described for _, of_rank in of for k in of_rank if not k.place):
            ours = [
                [flat(t) for t, at in zip(tensors, of_rank, strict=True) if t.dtype == dtype and not at]
                for (_, tensors), of_rank in zip(sent, places, strict=True)
            ]
            wanted = [
                [k for k, kind in enumerate(of_rank) if kind.dtype == dtype and not kind.place] for of_rank in kinds
            ]
            sizes = [[of[k].shape.numel() for k in at] for at, of in zip(wanted, kinds, strict=True)]
            received = self._exchanged(ours, [sum(of) for of in sizes], dtype)
            for rank, (at, of) in enumerate(zip(wanted, sizes, strict=True)):
                for k, piece in zip(at, torch.split(received[rank], of), strict=True) if rank != self.rank else ():
                    found[rank][k] = kinds[rank][k].restored(piece)
        if ahead is not None:
            ahead.wait()
            for rank, of_rank in enumerate(kinds):
                for k, kind in enumerate(of_rank):
                    if kind.place:
                        found[rank][k] = kind.restored(ahead.arrived(rank, kind.place, kind.shape.numel()))
        found[self.rank] = sent[self.rank][1]
        return [unpacked(text, of_rank) for text, of_rank in zip(texts, found, strict=True)]

    def _exchanged(self, ours: Sequence[Sequence[Tensor]], lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Flat tensors to every rank, and as many numbers from each; what stays here is not copied."""
        kind = torch.uint8 if dtype == torch.bool else dtype
        parts = [[] if rank == self.rank else list(of) for rank, of in enumerate(ours)]
        numbers = [torch.zeros(0, dtype=kind, device=self.device), *(t.to(kind) for of in parts for t in of)]
        inputs = torch.cat(numbers).to(self.wire)
        expected = [0 if rank == self.rank else length for rank, length in enumerate(lengths)]
        outputs = torch.empty(sum(expected), dtype=kind, device=self.wire)
        split = [sum(t.numel() for t in of) for of in parts]
        distributed.all_to_all_single(outputs, inputs, expected, split, group=self.group)
        return list(torch.split(outputs.to(self.device, dtype), expected))

    def sending(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype, owner: int
    ) -> tuple[Tensor, Any]:
        """Begin to send one rank's tensors to all: a flat buffer of them on its way, and what to wait for.

        Args:
            parts: The tensors, on the rank that has them.
            shapes: Their shapes, which all ranks know.
            dtype: Of all of them.
            owner: The rank that has them.
        """
        if owner == self.rank:
            buffer = torch.cat([part.reshape(-1) for part in parts]).to(self.wire)
        else:
            buffer = torch.empty(sum(torch.Size(s).numel() for s in shapes), dtype=dtype, device=self.wire)
        source = distributed.get_global_rank(self.group, owner)
        return buffer, distributed.broadcast(buffer, source, group=self.group, async_op=True)


class _Packer(pickle.Pickler):
    """Leaves tensors out, each one once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, tuple[int, Tensor]] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        return self.tensors.setdefault(id(value), (len(self.tensors), value))[0]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, key: int) -> Tensor:
        return self.tensors[key]


def packed(value: Any) -> tuple[bytes, list[Tensor]]:
    """A nested object as bytes, and the tensors in it."""
    packer = _Packer(file := io.BytesIO())
    packer.dump(value)
    return file.getvalue(), [tensor for _, tensor in packer.tensors.values()]


def unpacked(text: bytes, tensors: Sequence[Tensor]) -> Any:
    return _Unpacker(io.BytesIO(text), tensors).load()
