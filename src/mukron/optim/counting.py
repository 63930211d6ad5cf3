"""Bytes that arrive on this rank in collectives of torch.distributed, counted while they are started.

torch's dispatcher sees every collective, also those of DistributedDataParallel's backward pass and of FSDP2. With k
ranks, what arrives is counted as the best algorithms move it:

    all_gather, all_to_all       what other ranks sent
    broadcast, scatter, recv     all of it, but nothing on the rank that has it
    all_reduce                   2 (k - 1) / k of the tensor: a reduce_scatter and an all_gather
    reduce_scatter               (k - 1) / k of the input
    gather, reduce               what others sent, on the rank that gets it

Integers are told apart from numbers: sizes, digests and pickled objects are headers of what travels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional")


class _Call(NamedTuple):
    """A collective as it was called: its arguments, and the place of this rank in its group."""

    arguments: Sequence[Any]
    rank: int
    size: int

    def first(self) -> list[Tensor]:
        return list(_tensors(self.arguments[0]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _share_of_output(call: _Call) -> float:
    """The first argument is the output, with the parts of all ranks; this one's part is the second."""
    return _bytes(call.first()) - _bytes(list(_tensors(call.arguments[1])))


def _gathered(call: _Call) -> float:
    """A functional all_gather: the first argument is this rank's part."""
    return _bytes(call.first()) * (call.size - 1)


def _reduced(call: _Call) -> float:
    return 2 * _bytes(call.first()) * (call.size - 1) / call.size


def _scattered_sum(call: _Call) -> float:
    """The first argument is the output, this rank's part."""
    return _bytes(call.first()) * (call.size - 1)


def _scattered_sum_of_input(call: _Call) -> float:
    return _bytes(call.first()) * (call.size - 1) / call.size


def _exchanged(call: _Call) -> float:
    """all_to_all_single: output, input, group, and how many rows of the output come from each rank."""
    (output,), splits = call.first(), call.arguments[3]
    return _without_own(call, output, splits)


def _exchanged_functional(call: _Call) -> float:
    (given,), splits = call.first(), call.arguments[1]
    rows = sum(splits) if splits else len(given)
    return _without_own(call, given.new_empty((rows, *given.shape[1:]), device="meta"), splits)


def _without_own(call: _Call, output: Tensor, splits: Sequence[int]) -> float:
    if not splits:
        return _bytes([output]) * (call.size - 1) / call.size
    rows = sum(splits)
    return _bytes([output]) * (rows - splits[call.rank]) / rows if rows else 0


def _exchanged_lists(call: _Call) -> float:
    return _bytes([tensor for rank, tensor in enumerate(call.first()) if rank != call.rank])


def _from_root(place: int) -> Callable[[_Call], float]:
    return lambda call: 0 if call.rank == call.arguments[place] else _bytes(call.first())


def _to_root(place: int, inputs: int) -> Callable[[_Call], float]:
    def arrives(call: _Call) -> float:
        own = _bytes(list(_tensors(call.arguments[inputs])))
        return own * (call.size - 1) if call.rank == call.arguments[place] else 0

    return arrives


KIND_OF: dict[str, tuple[str, Callable[[_Call], float]]] = {  # by operation
    "c10d::allgather_": ("all_gather", _share_of_output),
    "c10d::_allgather_base_": ("all_gather", _share_of_output),
    "c10d::allgather_coalesced_": ("all_gather", _share_of_output),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", _share_of_output),
    "c10d::allreduce_": ("all_reduce", _reduced),
    "c10d::allreduce_coalesced_": ("all_reduce", _reduced),
    "c10d::reduce_scatter_": ("reduce_scatter", _scattered_sum),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", _scattered_sum),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", _scattered_sum),
    "c10d::alltoall_": ("all_to_all", _exchanged_lists),
    "c10d::alltoall_base_": ("all_to_all", _exchanged),
    "c10d::broadcast_": ("broadcast", _from_root(2)),
    "c10d::scatter_": ("scatter", _from_root(3)),
    "c10d::gather_": ("gather", _to_root(3, inputs=1)),
    "c10d::reduce_": ("reduce", _to_root(3, inputs=0)),
    "c10d::recv_": ("recv", lambda call: _bytes(call.first())),
    "c10d::recv_any_source_": ("recv", lambda call: _bytes(call.first())),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _gathered),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", _gathered),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", _gathered),
    "_c10d_functional::all_reduce": ("all_reduce", _reduced),
    "_c10d_functional::all_reduce_": ("all_reduce", _reduced),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", _reduced),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", _reduced),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", _scattered_sum_of_input),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", _scattered_sum_of_input),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", _scattered_sum_of_input),
    "_c10d_functional::all_to_all_single": ("all_to_all", _exchanged_functional),
    "_c10d_functional::broadcast": ("broadcast", _from_root(1)),
    "_c10d_functional::broadcast_": ("broadcast", _from_root(1)),
}
WITHOUT_NUMBERS = (
    *("barrier", "monitored_barrier_", "send", "isend", "wait_tensor", "check_for_nan"),
    "_wrap_tensor_autograd",
)


class CollectiveCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that arrive on this rank while it is active.

    Attributes:
        arrived: Bytes, by kind of collective and dtype.

    Raises:
        NotImplementedError: A collective was called that cannot be counted.

    Example:
        >>> with CollectiveCount() as count:
        ...     pass  # a step of training, in one of several processes
        >>> count.numbers, count.headers
        (0, 0)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arrived: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own collectives come by, once it has turned into tensors
        if function.namespace in NAMESPACES:
            self._count(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _count(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = f"{function.namespace}::{function.overloadpacket.__name__}"
        if name not in KIND_OF:
            if name.partition("::")[2] in WITHOUT_NUMBERS:
                return
            raise NotImplementedError(f"CollectiveCount does not know how many bytes arrive in {name}")
        given = function._schema.arguments
        arguments = [
            args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            for place, argument in enumerate(given)
        ]
        group = _group_of(arguments)
        kind, arrives = KIND_OF[name]
        call = _Call(arguments, group.rank(), group.size())
        tensor = next(_tensors(arguments), None)
        if tensor is not None and (number := arrives(call)):
            self.arrived[kind, tensor.dtype] += number  # type: ignore[assignment]

    @property
    def numbers(self) -> float:
        """Bytes of floating-point numbers."""
        return sum(size for (_, dtype), size in self.arrived.items() if dtype.is_floating_point)

    @property
    def headers(self) -> float:
        """Bytes of integers: sizes, digests, pickled objects."""
        return sum(self.arrived.values()) - self.numbers

    def by_kind(self) -> dict[str, float]:
        """Bytes of floating-point numbers, by kind of collective."""
        found: dict[str, float] = {}
        for (kind, dtype), size in self.arrived.items():
            if dtype.is_floating_point:
                found[kind] = found.get(kind, 0) + size
        return found


def _group_of(arguments: Sequence[Any]) -> Any:
    """The process group among a collective's arguments: torch gives it as an object of its own, or by its name."""
    for argument in arguments:
        if isinstance(argument, distributed.ProcessGroup):
            return argument
        if isinstance(argument, torch.ScriptObject):
            try:
                return distributed.ProcessGroup.unbox(argument)
            except (RuntimeError, TypeError):
                continue  # how it reduces
    names = [argument for argument in arguments if isinstance(argument, str)]
    resolve: Callable[[str], Any] = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009
    return resolve(names[-1])
