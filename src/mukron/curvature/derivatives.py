"""What the loss's own derivatives by a layer's output give, made once for all that has arrived of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mukron.curvature.stacking import Halves
from mukron.linalg import LowRank

if TYPE_CHECKING:
    from mukron.curvature.passes import Accumulator, LayerPass, LayerStatistics, Pass


class OfDelta(NamedTuple):
    """What they have given.

    Attributes:
        delta: The derivative; None: it is not kept.
        D: As rows, where D^T H is wanted.
        B: Made of it (the empirical Fisher).
        rounding: Of the products that the gradient is made of, where they are coarser than its dtype.
    """

    delta: Tensor | None
    D: Tensor | None
    B: Accumulator | None
    rounding: float


def of_delta(one: Pass, this: LayerPass) -> OfDelta:
    """What has arrived at a layer's output gives this.

    Args:
        one: The pass.
        this: The layer in it; a derivative has arrived.
    """
    delta, known = this.delta, this.of_delta
    if known is not None and (delta is None or known.delta is delta):
        return known
    assert delta is not None
    rounding = torch.finfo(delta.dtype).eps if delta.dtype in (torch.float16, torch.bfloat16) else 0.0
    numbers, D, B = one.precise(delta, this.name), None, None
    if this.rows is not None:
        D = one.unfolded(this.layer.signals(numbers)).flatten(1, 2)
    if one.options.empirical and this.statistics.A is not None:
        one.add_to(this, B := one.no_signals(this), numbers)
    this.of_delta = OfDelta(delta, D, B, rounding)
    return this.of_delta


def finish(one: Pass) -> None:
    """Make what had to wait for the end of the user's backward pass; derivatives are of no use any more.

    Args:
        one: The pass.
    """
    for key, this in one.layers.items():
        if this.waits:
            this.check()
            one.add_inputs(key, may_wait=False)
            this.of_delta = None
        if this.delta is not None:
            this.of_delta, this.delta = of_delta(one, this)._replace(delta=None), None


def with_derivatives(one: Pass, this: LayerPass) -> LayerStatistics:
    """The statistics of one use, with what derivatives have given so far.

    Args:
        one: The pass.
        this: The layer in it.
    """
    found = replace(this.statistics)
    if found.jacobians and one.errors is not None:  # a second backward pass may have added to them
        found.jacobians = [found.jacobians[0]._replace(errors=one.errors)]
    if this.delta is not None or this.of_delta is not None:
        made = of_delta(one, this)
        found.rounding, found.B = made.rounding, made.B or found.B
        if made.D is not None and this.rows is not None:
            found.halves = [Halves(made.D, this.rows, this.fused and not one.checked)]
    return found


def join_halves(statistics: LayerStatistics) -> None:
    """Put the halves of all passes together: the gradient, and the part of it that autograd does not form.

    Args:
        statistics: Those of a layer.
    """
    statistics.product = _joined(statistics, statistics.halves)
    statistics.unformed = _joined(statistics, [half for half in statistics.halves if half.fused])


def _joined(statistics: LayerStatistics, halves: list[Halves]) -> LowRank | None:
    if not halves or any(half.D.shape[1] != half.H.shape[1] for half in halves):
        return None
    if len(halves) == 1:
        return LowRank(halves[0].D, halves[0].H)
    D, rows = torch.cat([half.D for half in halves], dim=1), [half.H for half in halves]
    known = getattr(statistics.A, "rows", ())
    if [*map(id, known)] == [*map(id, rows)]:
        return LowRank(D, statistics.A.joined())  # type: ignore[union-attr]  # A's own rows: operators made of them know it
    return LowRank(D, torch.cat(rows, dim=1))


def take_shared(this: LayerPass, other: LayerPass) -> None:
    """Take the same rows and the same A as another map: inputs of several maps are one tensor.

    Args:
        this: A map.
        other: One with the same input, whose statistics are made.
    """
    shared, this.input = other.statistics, None
    this.rows, this.count = other.rows, other.count
    this.statistics.A, this.statistics.samples, this.statistics.rows = shared.A, shared.samples, shared.rows
