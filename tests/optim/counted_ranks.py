"""What ranks do that ``test_counting`` starts: collectives whose bytes are known, each counted."""

from __future__ import annotations

from functools import partial

import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from mukron.optim.counting import CollectiveCount

NUMBER = 4  # bytes


def _parts(size, numbers=3):
    return [torch.zeros(numbers) for _ in range(size)]


def calls(rank, size):
    """By name: a collective, its kind, and how many numbers each rank should count."""
    x, group = torch.ones(3), distributed.group.WORLD
    splits = [[(sender + 2 * receiver) % 4 for sender in range(size)] for receiver in range(size)]  # of any sizes
    sent = [splits[receiver][rank] for receiver in range(size)]
    exchanged = partial(
        distributed.all_to_all_single, torch.zeros(sum(splits[rank]), 2), torch.zeros(sum(sent), 2), splits[rank], sent
    )
    alike = partial(distributed.all_to_all_single, torch.zeros(size * 5), torch.zeros(size * 5))
    others, from_others = size - 1, sum(splits[rank]) - splits[rank][rank]
    yield "all_to_all_single", exchanged, "all_to_all", 2 * from_others
    yield "all_to_all_single, equal parts", alike, "all_to_all", 5 * others
    yield "broadcast", partial(distributed.broadcast, x, 1), "broadcast", 3 * (rank != 1)
    yield "all_gather", partial(distributed.all_gather, _parts(size), x), "all_gather", 3 * others
    yield "all_reduce", partial(distributed.all_reduce, x), "all_reduce", 2 * 3 * others / size
    scattered = partial(distributed.reduce_scatter, torch.zeros(3), _parts(size))
    yield "reduce_scatter", scattered, "reduce_scatter", 3 * others
    to_first = partial(distributed.gather, x, _parts(size) if rank == 0 else None, 0)
    yield "gather", to_first, "gather", 3 * others * (rank == 0)
    yield "reduce", partial(distributed.reduce, x, 0), "reduce", 3 * others * (rank == 0)
    scatter = partial(distributed.scatter, torch.zeros(3), _parts(size) if rank == 0 else None, 0)
    yield "scatter", scatter, "scatter", 3 * (rank != 0)
    yield "functional all_reduce", lambda: functional.all_reduce(x, "sum", group) + 0, "all_reduce", 6 * others / size
    whole = lambda: functional.all_gather_tensor(x, 0, group) + 0  # noqa: E731
    yield "functional all_gather", whole, "all_gather", 3 * others
    summed = lambda: functional.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, group) + 0  # noqa: E731
    yield "functional reduce_scatter", summed, "reduce_scatter", 2 * others
    yield "functional broadcast", lambda: functional.broadcast(x, 1, group) + 0, "broadcast", 3 * (rank != 1)
    to_all = lambda: functional.all_to_all_single(torch.zeros(sum(sent)), splits[rank], sent, group) + 0  # noqa: E731
    yield "functional all_to_all", to_all, "all_to_all", from_others
    yield "barrier", distributed.barrier, "barrier", 0


def collectives(rank, folder):
    size = distributed.get_world_size()
    for name, call, kind, numbers in calls(rank, size):
        with CollectiveCount() as count:
            call()
        expected = {kind: NUMBER * numbers} if numbers else {}
        assert count.by_kind() == expected, f"{name}: {count.arrived}, expected {expected}"
        assert count.numbers == NUMBER * numbers
        assert count.headers == 0, name
    _objects(rank, size)
    _backward_pass(size)
    _group_of_two(rank)


def _objects(rank, size):
    """Their pickles, padded to the longest, and how long each is."""
    found = [None] * size
    with CollectiveCount() as count:
        distributed.all_gather_object(found, {"rank": rank, "text": "x" * 1000})
    assert count.numbers == 0
    assert (size - 1) * 1000 < count.headers < (size - 1) * 1200


def _backward_pass(size):
    """DistributedDataParallel's own all_reduce is seen, and is 2 (k - 1) / k of the gradients."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    with CollectiveCount() as count:
        model(torch.ones(1, 3)).sum().backward()
    assert count.by_kind() == {"all_reduce": 2 * 8 * NUMBER * (size - 1) / size}


def _group_of_two(rank):
    """The ranks of a group are counted, not those of the world."""
    group = distributed.new_group([0, 1])
    if rank < 2:
        with CollectiveCount() as count:
            distributed.all_reduce(torch.ones(6), group=group)
            distributed.broadcast(torch.ones(6), 1, group=group)
        assert count.by_kind() == {"all_reduce": 6 * NUMBER, **({"broadcast": 6 * NUMBER} if rank == 0 else {})}
