"""Statistics as they travel: with derivatives of the mean over all ranks of their losses, each tensor made once.

A tensor that is made of the same statistics is the same tensor, however often it is asked for in a step: so what has
been sent ahead is known by itself when the step comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mukron.curvature.frequencies import Frequencies
from mukron.curvature.passes import Accumulator, Kinds, LayerStatistics
from mukron.curvature.ranks import aligned

EVERY_RANK = -1  # the "owner" of a layer whose rows go to all ranks


class Outgoing:
    """The statistics of one rank in one step, as they are sent to each rank.

    Args:
        size: The number of ranks; the loss of the joined batch is the mean of theirs.
        rank: This one.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.share = size, rank, 1 / size
        self._made: dict[Any, tuple[Any, Tensor]] = {}  # with what they were made of, whose place in memory is known

    def by_rank(self, kinds: Kinds, owner: Mapping[str, int], empirical: bool) -> list[Kinds]:
        """What goes to each rank.

        Args:
            kinds: What was measured, by layer and kind of use.
            owner: By layer, the rank that gets it, or ``EVERY_RANK``.
            empirical: Signals are derivatives of the user's loss.
        """
        to_ranks: list[Kinds] = [{} for _ in range(self.size)]
        for name, of in kinds.items():
            everywhere = owner[name] == EVERY_RANK
            for kind, part in of.items():
                scaled = self._scaled(name, part, empirical, alike=everywhere)
                for rank in range(self.size) if everywhere else (owner[name],):
                    stays = rank == self.rank and not everywhere
                    to_ranks[rank].setdefault(name, {})[kind] = scaled if stays else self._packed(scaled)
        return to_ranks

    def _scaled(self, name: str, of: LayerStatistics, empirical: bool, alike: bool) -> LayerStatistics:
        """alike: tensors lie in memory alike here and where they arrive, so that all ranks compute the same bits."""
        jacobians = [one._replace(errors=self._errors(name, one.errors)) for one in of.jacobians]
        halves = [
            half._replace(D=self._tensor(half.D, self.share, alike), H=self._tensor(half.H, 1.0, alike))
            for half in of.halves
        ]
        A, B = self._sums(of.A, 1.0, alike), self._sums(of.B, self.share if empirical else 1.0, alike)
        return replace(of, A=A, B=B, halves=halves, jacobians=jacobians)

    def _errors(self, name: str, errors: Tensor) -> Tensor:
        """A copy for each layer, as the cost model counts them."""
        return self._once((name, _place(errors)), errors, lambda: errors * self.share)

    def _sums(self, of: Any, share: float, alike: bool) -> Any:
        if of is None:
            return None
        total, parts = of.empty(), list(of.parts)
        total.counts, total.parts = of.counts, []
        if parts:
            over_passes = self._once(("sum", *map(_place, parts)), parts, lambda: reduce(torch.add, parts))
            total.parts = [self._tensor(over_passes, share**2)]
        if isinstance(of, Accumulator):
            total.rows = [self._tensor(rows, share, alike) for rows in of.rows]
        return total

    def _packed(self, statistics: LayerStatistics) -> LayerStatistics:
        """For a message: of a matrix the upper triangle, which says all of it."""
        return replace(statistics, A=self._triangle(statistics.A), B=self._triangle(statistics.B))

    def _triangle(self, sums: Any) -> Any:
        if not isinstance(sums, Accumulator) or (M := sums.matrix) is None:
            return sums
        small = sums.empty()
        small.rows, small.counts = sums.rows, sums.counts
        small.parts = [self._once(("triangle", _place(M)), M, lambda: M[:, _upper(M)])]
        return small

    def _tensor(self, X: Tensor, share: float, alike: bool = False) -> Tensor:
        """X times a number."""

        def made() -> Tensor:
            scaled = X if share == 1 else X * share
            return aligned(scaled.contiguous()) if alike else scaled

        return self._once((_place(X), share, alike), X, made)

    def _once(self, key: Any, source: Any, make: Any) -> Tensor:
        if key not in self._made:
            self._made[key] = source, make()
        return self._made[key][1]


def whole(statistics: LayerStatistics) -> LayerStatistics:
    """What was packed for a message.

    Args:
        statistics: As they have arrived.
    """
    for sums in (statistics.A, statistics.B):
        if isinstance(sums, Accumulator) and sums.matrix is not None and sums.matrix.ndim == 2:
            M = sums.matrix.new_zeros(len(sums.matrix), sums.d, sums.d)
            M[:, _upper(M)] = sums.matrix
            sums.parts = [M + M.triu(1).mT]
    return statistics


def tensors_of(kinds: Kinds, empirical: bool, *, at_output: bool) -> Iterator[Tensor]:
    """The tensors of statistics, some more than once.

    Args:
        kinds: The statistics.
        empirical: Signals are derivatives of the user's loss, which arrive layer by layer.
        at_output: Those alone that are there once a backward pass has arrived at the model's output.
    """
    for of_layer in kinds.values():
        for of in of_layer.values():
            for sums in (of.A,) if at_output and empirical else (of.A, of.B):
                if isinstance(sums, (Accumulator, Frequencies)):
                    yield from sums.parts
                if isinstance(sums, Accumulator):
                    yield from sums.rows
            for jacobian in of.jacobians:
                yield from (value for value in jacobian if isinstance(value, Tensor))
            for half in () if at_output else of.halves:
                yield from (half.D, half.H)


def _place(X: Tensor) -> Sequence[Any]:
    """Which numbers in memory a tensor has, and in which order."""
    return X.data_ptr(), X.shape, X.stride(), X.dtype


def _upper(M: Tensor) -> Tensor:
    """Which entries of a matrix are on its diagonal or above."""
    return torch.ones(M.shape[-2:], dtype=torch.bool, device=M.device).triu()
