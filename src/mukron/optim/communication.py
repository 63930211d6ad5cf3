"""What ranks send each other in a step: three schemes a layer, the numbers that each moves, and the choice by cost.

    rows     inputs H and signals D go to every rank, which makes the move for itself: nothing comes back
    owner    H and D go to the layer's owner, and the move comes back
    factors  each rank's H^T H and D^T D go to the owner, which adds them up, and the move comes back

Numbers are counted where they arrive, over all ranks together: what stays on its rank does not count. With k ranks,
n rows each and a layer d_in x d_out (g groups, c signals a row, factors measured every f steps) they are

    rows     k (k - 1) n (d_in + c d_out) g / f
    owner      (k - 1) n (d_in + c d_out) g / f              + move
    factors    (k - 1) (d_in (d_in + 1) + d_out (d_out + 1)) g / 2 f   + move, a factor's upper triangle being enough

A move that is broadcast is (k - 1) d_in d_out g numbers, or (k - 1) N (d_in + d_out) g as D^T H where that is less; one
whose weight is sharded is the shards of the others. Gradients that ranks average themselves go to the owner in the same
message, (k - 1) d_in d_out g; D^T H of all rows, which a step that measures factors may have, needs none. A bias adds
its own numbers to gradients and moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BY_TIME, BY_ROWS, BY_OWNER, BY_FACTORS = "auto", "rows", "owner", "factors"
WAYS = (BY_ROWS, BY_OWNER, BY_FACTORS)
USUAL_BANDWIDTH, USUAL_SPEED = 50e9, 50e12  # bytes and multiplications a second, where a plan is made without a machine


@dataclass(frozen=True)
class Communication:
    """How ranks exchange the curvature of layers.

    Attributes:
        scheme: "rows", "owner" or "factors", for all layers; "auto": for each the one that takes the least time.
        bandwidth: Bytes a second that a rank receives, for "auto"; None: 50e9.
        measured: Bandwidth and the speed of multiplications are measured when the ranks first meet, for "auto".
        overlap: Send curvature in the backward pass as soon as it is there; False: send all of it in the step.

    Example:
        >>> Communication.of("auto:50e9")
        Communication(scheme='auto', bandwidth=50000000000.0, measured=False, overlap=True)
    """

    scheme: str = BY_TIME
    bandwidth: float | None = None
    measured: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.scheme not in (BY_TIME, *WAYS):
            known = ", ".join(map(repr, (BY_TIME, *WAYS)))
            more = "auto:BYTES_PER_SECOND and auto:measured"
            raise ValueError(f"unknown communication {self.scheme!r}; known: {known}, {more}")
        if self.measured and (self.scheme != BY_TIME or self.bandwidth is not None):
            raise ValueError(f'"measured" is for "auto" alone, and in place of a bandwidth; got {self!r}')
        if self.bandwidth is not None and not (self.scheme == BY_TIME and self.bandwidth > 0):
            raise ValueError(
                'communication="auto:BYTES_PER_SECOND" takes a positive bandwidth, and "auto" alone takes one; got '
                f"{self.bandwidth!r} with {self.scheme!r}"
            )

    @staticmethod
    def of(communication: Communication | str) -> Communication:
        """Make it from text: "auto", "auto:50e9", "auto:measured", "rows", "owner" or "factors".

        Args:
            communication: The text, or a value, which is returned as it is.
        """
        if isinstance(communication, Communication):
            return communication
        scheme, _, number = str(communication).strip().lower().partition(":")
        if number == "measured":
            return Communication(scheme, measured=True)
        try:
            bandwidth = float(number) if number else None
        except ValueError as error:
            expected = '"auto:BYTES_PER_SECOND" or "auto:measured"'
            raise ValueError(f"expected {expected}, got communication={communication!r}") from error
        return Communication(scheme, bandwidth)


class Speed(NamedTuple):
    """Of a rank, a second."""

    bandwidth: float = USUAL_BANDWIDTH  # bytes received
    multiplications: float = USUAL_SPEED


@dataclass(frozen=True)
class LayerTraffic:
    """What decides how many numbers a layer's step moves.

    Attributes:
        d_in, d_out: The sides of its weight as a matrix.
        groups: How many such matrices.
        rows: Samples times positions of a batch, by rank.
        errors: Derivatives by the network's outputs that travel beside the rows, by rank.
        signals: Rows of signals for each row of inputs; 0: the method has no factor of the output side.
        tokens: Inputs are indices: A is a vector of d_in numbers.
        inputs: The method has a factor of the input side.
        products: D, the loss's own derivatives, travels with H where factors are measured: the gradient is D^T H.
        own_signals: Signals are D itself, which then travels once.
        low_rank: Such a gradient is still D^T H when it has become a move: nothing was added to it.
        by_rows: Factors are held as rows: a matrix of them is of no use.
        factor_every, inverse_every: Intervals in steps.
        averages: Ranks average gradients themselves; False: somebody else has.
        shards: Numbers of the weight that each rank has; None: every rank has all of them.
        biases: Numbers of its bias, if that is preconditioned too.
        element: Bytes of a number.
    """

    d_in: int
    d_out: int
    groups: int = 1
    rows: tuple[int, ...] = (1, 1)
    signals: int = 1
    tokens: bool = False
    inputs: bool = True
    products: bool = False
    own_signals: bool = False
    low_rank: bool = False
    by_rows: bool = False
    factor_every: int = 1
    inverse_every: int = 1
    averages: bool = False
    shards: tuple[int, ...] | None = None
    biases: int = 0
    errors: tuple[int, ...] = ()
    element: int = 4

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def weight(self) -> int:
        return self.groups * self.d_in * self.d_out


class Traffic(NamedTuple):
    """Numbers that arrive in an average step, over all ranks: of curvature, of gradients, and of moves."""

    curvature: float = 0.0
    gradients: float = 0.0
    moves: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def __add__(self, other: object) -> Traffic:
        assert isinstance(other, Traffic)
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


def traffic_of(layer: LayerTraffic, scheme: str, owner: int) -> Traffic:
    """Numbers that one layer moves in an average step.

    Args:
        layer: The layer.
        scheme: "rows", "owner" or "factors".
        owner: The rank that owns it; under "rows" nobody does.
    """
    others = layer.ranks - 1
    copies = others if scheme == BY_ROWS else 1
    senders = [n for rank, n in enumerate(layer.rows) if scheme == BY_ROWS or rank != owner]
    if scheme == BY_FACTORS:
        curvature = float(others * (_input_factor(layer) + _triangle(layer.d_out) * layer.groups * bool(layer.signals)))
    else:
        derivatives = layer.signals + (layer.products and not layer.own_signals)
        of_row = (0 if layer.tokens or not layer.inputs else layer.d_in) + derivatives * layer.d_out
        curvature = float(copies * sum(senders) * of_row * layer.groups)
        curvature += copies * sum(n for rank, n in enumerate(layer.errors) if scheme == BY_ROWS or rank != owner)
        curvature += copies * len(senders) * layer.d_in * layer.groups * (layer.tokens and layer.inputs)
    return Traffic(curvature / layer.factor_every, _gradient(layer, scheme, owner), _move(layer, scheme, owner))


def _input_factor(layer: LayerTraffic) -> int:
    if not layer.inputs:
        return 0
    return layer.groups * (layer.d_in if layer.tokens else _triangle(layer.d_in))


def _triangle(d: int) -> int:
    return d * (d + 1) // 2


def _gradient(layer: LayerTraffic, scheme: str, owner: int) -> float:
    """To whoever makes the move; D^T H of all rows, where that travels, is the gradient of the weight."""
    if layer.shards is not None:
        return float(layer.weight - layer.shards[owner] + layer.biases * (layer.ranks - 1) / layer.ranks)
    if not layer.averages:
        return 0.0
    formed = 1 - _as_products(layer, scheme)
    copies = (layer.ranks - 1) * (2 if scheme == BY_ROWS else 1)
    return copies * (layer.weight * formed + layer.biases)


def _as_products(layer: LayerTraffic, scheme: str) -> float:
    """In which part of the steps D^T H of all rows is known."""
    return 1 / layer.factor_every if layer.products and scheme != BY_FACTORS else 0.0


def _move(layer: LayerTraffic, scheme: str, owner: int) -> float:
    if scheme == BY_ROWS:
        return 0.0
    if layer.shards is not None:
        return float(sum(layer.shards) - layer.shards[owner] + layer.biases * (layer.ranks - 1) / layer.ranks)
    halves = sum(layer.rows) * (layer.d_in + layer.d_out) * layer.groups
    low_rank = _as_products(layer, scheme) if layer.low_rank else 0.0
    weight = low_rank * min(halves, layer.weight) + (1 - low_rank) * layer.weight
    return (layer.ranks - 1) * (weight + layer.biases)


def work_of(layer: LayerTraffic) -> float:
    """Multiplications of an average step: factors, their inverses, and what they are applied to."""
    total, all_rows = 0.0, sum(layer.rows)
    sides = [(layer.d_in, all_rows)] * (layer.inputs and not layer.tokens)
    sides += [(layer.d_out, all_rows * layer.signals)] * bool(layer.signals)
    for d, N in sides:
        if layer.by_rows:
            total += (
                (N**2 * d) / layer.factor_every + N**3 / 3 / layer.inverse_every + N**2 * (layer.d_in + layer.d_out)
            )
        else:
            total += N * d**2 / layer.factor_every + d**3 / layer.inverse_every + layer.d_in * layer.d_out * d
    return layer.groups * total


def seconds_of(layer: LayerTraffic, scheme: str, speed: Speed) -> float:
    """Time of an average step on a rank: what arrives there, and what it works, owners being spread evenly."""
    arrives = traffic_of(layer, scheme, 0).total * layer.element / layer.ranks
    shared = 1 if scheme == BY_ROWS else layer.ranks
    return arrives / speed.bandwidth + work_of(layer) / shared / speed.multiplications


def schemes_for(layer: LayerTraffic) -> tuple[str, ...]:
    """Those that a layer can be exchanged by: rows are not for shards, nor factors for what is held as rows."""
    able = [BY_ROWS] * (layer.shards is None) + [BY_OWNER] + [BY_FACTORS] * (not layer.by_rows)
    return tuple(able)


def scheme_of(layer: LayerTraffic, communication: Communication, speed: Speed) -> str:
    """The scheme of a layer: the one that was asked for where the layer allows it, or the fastest."""
    able = schemes_for(layer)
    if communication.scheme != BY_TIME:
        return communication.scheme if communication.scheme in able else BY_OWNER
    return min(able, key=lambda scheme: seconds_of(layer, scheme, speed))


def owners_of(costs: Sequence[float], ranks: int, known: Sequence[int | None] | None = None) -> list[int]:
    """The rank that owns each of some layers: the most expensive first, each to the rank with the least to do.

    Args:
        costs: What each layer costs its owner.
        ranks: How many ranks there are.
        known: Owners that were chosen before; None for a layer that has none yet.
    """
    load, owner = [0.0] * ranks, list(known or [None] * len(costs))
    for place in sorted(range(len(costs)), key=lambda place: (owner[place] is None, -costs[place])):
        chosen = owner[place]
        if chosen is None:
            chosen = owner[place] = min(range(ranks), key=load.__getitem__)
        load[chosen] += costs[place]
    return [rank for rank in owner if rank is not None]


def sgd_numbers(weights: int, ranks: int, sharded: bool = False) -> float:
    """What arrives in a step of data-parallel SGD, over all ranks.

    Args:
        weights: Numbers in the network's weights.
        ranks: How many ranks there are.
        sharded: Weights are gathered for the forward and the backward pass, and gradients reduced to their shards.
    """
    return float((3 if sharded else 2) * (ranks - 1) * weights)


def kaisa_numbers(layer: LayerTraffic) -> float:
    """What arrives where factors are all-reduced as whole matrices, and moves broadcast, as distributed K-FACs do."""
    others = layer.ranks - 1
    factors = layer.d_in**2 * (layer.inputs and not layer.tokens) + layer.d_out**2 * bool(layer.signals)
    factors += layer.d_in * (layer.tokens and layer.inputs)
    weights = layer.weight + layer.biases
    return others * layer.groups * (2.0 * factors / layer.factor_every) + others * weights * 3.0
