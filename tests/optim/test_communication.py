"""What ranks send each other: the cost model beside messages that are counted one number at a time, and real steps."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from ranks import in_ranks

from mukron.optim.communication import (
    BY_FACTORS,
    BY_OWNER,
    BY_ROWS,
    WAYS,
    Communication,
    LayerTraffic,
    Speed,
    kaisa_numbers,
    owners_of,
    scheme_of,
    schemes_for,
    seconds_of,
    sgd_numbers,
    traffic_of,
    work_of,
)


def delivered(has, wants):
    """How many numbers arrive, where each rank has a set of numbers and wants another one."""
    return sum(len(wanted - there) for there, wanted in zip(has, wants, strict=True))


def simulated(layer, scheme, owner):
    """Curvature, gradients and moves of a step that measures factors, number by number."""
    ranks, groups = range(layer.ranks), range(layer.groups)
    makers = set(ranks) if scheme == BY_ROWS else {owner}
    kinds = {f"signals {c}": layer.d_out for c in range(layer.signals)}
    if layer.products:
        kinds["signals 0" if layer.own_signals else "D"] = layer.d_out
    if layer.inputs and not layer.tokens:
        kinds["H"] = layer.d_in
    rows = {
        rank: {
            (kind, rank, g, row, i) for kind, d in kinds.items() for g in groups for row in range(n) for i in range(d)
        }
        for rank, n in enumerate(layer.rows)
    }
    sides = {"A": layer.d_in} if layer.inputs and not layer.tokens else {}
    sides |= {"B": layer.d_out} if layer.signals else {}
    sums = {
        rank: {(side, rank, g, i, j) for side, d in sides.items() for g in groups for i in range(d) for j in range(d)}
        for rank in ranks
    }
    upper = {rank: {number for number in of if number[3] <= number[4]} for rank, of in sums.items()}
    frequencies = {
        rank: {("tokens", rank, g, i) for g in groups for i in range(layer.d_in)} if layer.tokens else set()
        for rank in ranks
    }
    measured = {rank: (upper if scheme == BY_FACTORS else rows)[rank] | frequencies[rank] for rank in ranks}
    everything = set().union(*measured.values())
    curvature = delivered(
        [measured[rank] for rank in ranks], [everything if rank in makers else set() for rank in ranks]
    )
    weight = {(g, o, i) for g in groups for o in range(layer.d_out) for i in range(layer.d_in)}
    return curvature, _gradients(layer, scheme, owner, weight), _moves(layer, scheme, owner, weight)


def _parts(layer, weight):
    """By rank, the numbers of a sharded weight that it has."""
    numbers = iter(sorted(weight))
    return [{next(numbers) for _ in range(n)} for n in layer.shards]


def _gradients(layer, scheme, owner, weight):
    if layer.shards is not None:
        return delivered(_parts(layer, weight), [weight if rank == owner else set() for rank in range(layer.ranks)])
    if not layer.averages:
        return 0
    own = set() if layer.products and scheme != BY_FACTORS else weight
    own = own | {("bias", i) for i in range(layer.biases)}
    if scheme == BY_ROWS:  # a ring sums each number in k - 1 messages, and spreads the sum in k - 1 more
        return sum(2 * (layer.ranks - 1) for _ in own)
    has = [{(rank, number) for number in own} for rank in range(layer.ranks)]
    return delivered(has, [set().union(*has) if rank == owner else set() for rank in range(layer.ranks)])


def _moves(layer, scheme, owner, weight):
    if scheme == BY_ROWS:
        return 0
    ranks = range(layer.ranks)
    if layer.shards is not None:
        return delivered([weight if rank == owner else set() for rank in ranks], _parts(layer, weight))
    move = weight
    if layer.products and layer.low_rank and scheme != BY_FACTORS:
        N, groups = sum(layer.rows), range(layer.groups)
        halves = {("D", g, r, i) for g in groups for r in range(N) for i in range(layer.d_out)}
        halves |= {("H", g, r, i) for g in groups for r in range(N) for i in range(layer.d_in)}
        move = min(halves, weight, key=len)
    move = move | {("bias", i) for i in range(layer.biases)}
    return delivered([move if rank == owner else set() for rank in ranks], [move] * layer.ranks)


def layers():
    """Layers of random sizes, with every combination of what they may be."""
    draw = random.Random(0)
    flags = itertools.product((False, True), repeat=4)
    for (products, own_signals, low_rank, averages), shape in itertools.product(flags, range(6)):
        ranks, d_in, d_out, groups = draw.randint(2, 4), draw.randint(1, 6), draw.randint(1, 6), draw.randint(1, 2)
        signals = 1 if own_signals and products else draw.randint(0, 2)
        layer = {"d_in": d_in, "d_out": d_out, "groups": groups, "signals": signals, "averages": averages}
        layer |= {"rows": tuple(draw.randint(0, 4) for _ in range(ranks)), "products": products}
        layer |= {"own_signals": own_signals and products, "low_rank": low_rank and products}
        layer |= {"biases": draw.choice((0, groups * d_out)), "inputs": shape != 1}
        if shape == 2 and not products:
            layer["tokens"] = True
        if shape == 3:
            cuts = sorted(draw.randint(0, groups * d_in * d_out) for _ in range(ranks - 1))
            ends = [0, *cuts, groups * d_in * d_out]
            layer |= {"shards": tuple(b - a for a, b in itertools.pairwise(ends)), "averages": False, "biases": 0}
        yield LayerTraffic(**layer)


def test_numbers_are_those_of_messages_counted_one_by_one():
    kinds = set()
    for layer in layers():
        for scheme, owner in itertools.product(WAYS, range(layer.ranks)):
            if scheme == BY_ROWS and layer.shards is not None:
                continue
            found = traffic_of(layer, scheme, owner)
            assert found == pytest.approx(simulated(layer, scheme, owner)), (layer, scheme, owner)
            kinds.add((scheme, layer.tokens, layer.shards is not None, found.gradients > 0))
    assert len(kinds) >= 14


def test_steps_that_measure_nothing_move_gradients_and_whole_moves():
    layer = LayerTraffic(40, 30, rows=(2, 2, 2), products=True, low_rank=True, averages=True, biases=30)
    every, tenth = (
        traffic_of(layer, BY_OWNER, 0),
        traffic_of(LayerTraffic(**{**vars(layer), "factor_every": 10}), BY_OWNER, 0),
    )
    assert tenth.curvature == every.curvature / 10
    assert every.gradients == 2 * 30  # the bias
    assert tenth.gradients == pytest.approx(2 * (30 + 0.9 * 1200))
    assert every.moves == 2 * (6 * 70 + 30)
    assert tenth.moves == pytest.approx(2 * (0.1 * 6 * 70 + 0.9 * 1200 + 30))


def test_all_reduce_and_sharded_training_by_their_parts():
    weights, ranks = 12, 4
    part = weights // ranks  # of a ring: each rank gets k - 1 partial sums, then k - 1 sums
    assert sgd_numbers(weights, ranks) == ranks * 2 * (ranks - 1) * part
    gathered = ranks * (weights - part)
    assert sgd_numbers(weights, ranks, sharded=True) == 2 * gathered + ranks * (ranks - 1) * part
    layer = LayerTraffic(3, 4, rows=(1, 1, 1, 1))
    factors = sgd_numbers(9, ranks) + sgd_numbers(16, ranks)
    assert kaisa_numbers(layer) == factors + sgd_numbers(12, ranks) + (ranks - 1) * 12


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (LayerTraffic(4096, 4096, rows=(16,) * 2, products=True, averages=True), BY_ROWS),
        (LayerTraffic(4096, 4096, rows=(1024,) * 8), BY_OWNER),
        (LayerTraffic(4096, 4096, rows=(32768,) * 8), BY_FACTORS),
        (LayerTraffic(4096, 4096, rows=(32768,) * 8, by_rows=True), BY_OWNER),
        (LayerTraffic(4096, 4096, rows=(16,) * 2, shards=(2**23,) * 2), BY_OWNER),
    ],
)
def test_few_rows_go_to_all_many_to_the_owner_and_more_as_factors(layer, expected):
    slow_network = Speed(1e6, 1e15)
    assert scheme_of(layer, Communication(), slow_network) == expected
    assert expected in schemes_for(layer)


def test_the_fastest_scheme_is_chosen():
    layer = LayerTraffic(256, 256, rows=(64,) * 4)
    for bandwidth in (1e6, 1e9, 1e12):
        speed = Speed(bandwidth, 1e12)
        times = {scheme: seconds_of(layer, scheme, speed) for scheme in WAYS}
        assert times[scheme_of(layer, Communication(), speed)] == min(times.values())
    assert scheme_of(layer, Communication(BY_FACTORS), speed) == BY_FACTORS


def test_owners_have_equal_work_and_keep_what_they_own():
    costs = [5.0, 3.0, 3.0, 2.0, 2.0, 1.0]
    owner = owners_of(costs, 2)
    load = [sum(cost for cost, rank in zip(costs, owner, strict=True) if rank == r) for r in (0, 1)]
    assert load == [8.0, 8.0]
    assert owners_of([*costs, 4.0], 2, [*owner, None])[:6] == owner


def test_work_is_that_of_products_and_inverses():
    layer = LayerTraffic(8, 4, rows=(3, 5), factor_every=2, inverse_every=4)
    A = 8 * 8**2 / 2 + 8**3 / 4 + 8 * 4 * 8
    B = 8 * 4**2 / 2 + 4**3 / 4 + 8 * 4 * 4
    assert work_of(layer) == A + B


@pytest.mark.parametrize("text", ["rows", "auto", "auto:50e9"])
def test_communication_is_read_from_text(text):
    scheme, _, bandwidth = text.partition(":")
    assert Communication.of(text) == Communication(scheme, float(bandwidth) if bandwidth else None)


@pytest.mark.parametrize(
    ("text", "said"),
    [("ring", "known: 'auto', 'rows'"), ("rows:5", '"auto" alone takes one'), ("auto:fast", "auto:BYTES_PER_SECOND")],
)
def test_other_texts_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        Communication.of(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "size"),
    [
        *(("spread", 2), ("gathered", 2), ("steps", 3), ("measured", 2)),
        pytest.param("all_layers", 4, marks=pytest.mark.matrix),
    ],
)
def test_what_arrives_is_what_was_predicted(function, size, tmp_path):
    if function in ("spread", "gathered") and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        pytest.skip("fully_shard trains on CPUs from torch 2.9 on")
    in_ranks(f"communicated:{function}", size, tmp_path)
