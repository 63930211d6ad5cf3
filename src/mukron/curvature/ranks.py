"""The processes that train one model together: what each has measured, brought together on all of them.

    rows, D and H, Jacobians   are gathered: every rank has those of all ranks, in the order of the ranks
    matrices and frequencies   are summed
    everything else            travels with their sizes, in one message a step

So statistics are those of the joined batch, as if every rank's passes were micro-batches of one process. Gradients are
averages over ranks. The loss of the joined batch is the mean of the ranks' losses, so derivatives of a rank's own loss
are divided by the number of ranks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")


class Ranks:
    """A process group, and what its ranks exchange. Every call must be made by all of them."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = distributed.get_world_size(group), distributed.get_rank(group)

    def objects(self, own: T) -> list[T]:
        """Every rank's object, in the order of ranks."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, own, group=self.group)
        return found

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have one shape."""
        parts = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(parts, own.contiguous(), group=self.group)
        return parts

    def share(self, numbers: int) -> tuple[int, int]:
        """Where this rank's part of a joint draw begins, and how many numbers all ranks draw.

        numbers: how many this rank needs. So draws do not depend on how a batch is split over ranks.
        """
        counts = [int(part) for part in self.gathered(torch.tensor([numbers], device=self.device))]
        return sum(counts[: self.rank]), sum(counts)

    def structures(self, own: T) -> list[T]:
        """Every rank's nested object with all tensors in it; tensors that are one in it are one in the result."""
        text, tensors = packed(own)
        described = self.objects((text, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]))
        found = self._tensors(tensors, [shapes for _, shapes in described])
        return [unpacked(text, of_rank) for (text, _), of_rank in zip(described, found, strict=True)]

    def _tensors(
        self, own: Sequence[Tensor], shapes: Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]
    ) -> list[list[Tensor]]:
        """The tensors of every rank, whose sizes all ranks know: one message for each dtype."""
        found: list[list[Any]] = [[None] * len(of_rank) for of_rank in shapes]
        for dtype in dict.fromkeys(dtype for of_rank in shapes for _, dtype in of_rank):
            places = [[k for k, (_, kind) in enumerate(of_rank) if kind == dtype] for of_rank in shapes]
            sizes = [
                [torch.Size(of_rank[k][0]).numel() for k in of] for of, of_rank in zip(places, shapes, strict=True)
            ]
            longest = max(map(sum, sizes))
            sent = torch.uint8 if dtype == torch.bool else dtype
            buffer = torch.zeros(longest, dtype=sent, device=self.device)
            if parts := [own[k].reshape(-1).to(sent) for k in places[self.rank]]:
                buffer[: sum(sizes[self.rank])] = torch.cat(parts)
            for r, received in enumerate(self.gathered(buffer)):
                pieces = torch.split(received[: sum(sizes[r])].to(dtype), sizes[r])
                for k, piece in zip(places[r], pieces, strict=True):
                    found[r][k] = piece.reshape(shapes[r][k][0])
        found[self.rank] = list(own)
        return found

    def summed(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The sum of each tensor over all ranks, which have them in one order; one message for each dtype."""
        total: list[Any] = [None] * len(own)
        for dtype in dict.fromkeys(tensor.dtype for tensor in own):
            places = [k for k, tensor in enumerate(own) if tensor.dtype == dtype]
            buffer = torch.cat([own[k].reshape(-1) for k in places])
            distributed.all_reduce(buffer, group=self.group)
            for k, part in zip(places, torch.split(buffer, [own[k].numel() for k in places]), strict=True):
                total[k] = part.reshape(own[k].shape)
        return total

    def agreed(self, numbers: Sequence[float]) -> list[float]:
        """The first rank's numbers, not finite where any rank's are not."""
        if not numbers:
            return []
        ours, *others = (part.tolist() for part in self.gathered(torch.tensor(numbers, dtype=torch.float64)
                                                                .to(self.device)))  # fmt: skip
        finite = torch.tensor([ours, *others], dtype=torch.float64).isfinite().all(0).tolist()
        return [
            number if fine or number - number != 0 else float("nan") for number, fine in zip(ours, finite, strict=True)
        ]

    def union(self, keys: Sequence[T]) -> list[T]:
        """What any rank names, in the order of ranks."""
        return list(dict.fromkeys(chain.from_iterable(self.objects(list(keys)))))


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
