"""Statistics of one layer from those of several: of passes, of uses of its weight, and of maps that the weight stacks.

Stacked maps are groups of the layer. They may have different inputs, and different numbers of positions: keys have as
many as there are tokens to attend to.

A weight that is used twice in a forward pass has twice as many positions. So A is the sum of both uses' A, and B the
mean over the rows of both, as if the layer had been called once with both inputs side by side.

A weight [vocabulary, dimension] that an embedding and a head use has the curvature  F = A_e (x) B_e + B_h (x) A_h, the
vocabulary's side first: A_e are frequencies of tokens, B_h the head's signals. Sums of like sides would mix things of
different units. A (x) B with the partial traces of F, and so its trace, is  tr_d(F) (x) tr_V(F) / tr F:

    A = (tr A_h  B_h + tr B_e  A_e) tr A_e / tr F        tr F = tr A_e tr B_e + tr A_h tr B_h
    B = B_e + A_h tr B_h / tr A_e

The trace of A is that of A_e. Without a head A and B are those of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mukron.curvature.forms import MATRIX
from mukron.curvature.frequencies import Frequencies

if TYPE_CHECKING:
    from mukron.curvature.passes import Accumulator, LayerPass, LayerStatistics


class Jacobian(NamedTuple):
    """Every output's derivative by a layer's weight: the sum over positions of signals inputs^T."""

    inputs: Tensor  # [groups, samples, positions, d_in]
    signals: Tensor  # [groups, samples, outputs, positions, d_out]
    errors: Tensor  # [samples, outputs], the derivative of the user's loss by the outputs
    counts: Tensor | None = (
        None  # [samples, outputs], False where the loss ignores an output; None: it has no positions
    )


class Halves(NamedTuple):
    """One pass's gradient of a layer's weight as D^T H."""

    D: Tensor
    H: Tensor
    fused: bool  # autograd does not form this gradient: it is not in the weight's ``grad``


class RowStack:
    """Rows of several maps as groups of one tensor, with zeros where a map has fewer; once for the same rows."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[Sequence[Tensor], Tensor]] = {}  # which keeps the parts' identities

    def __call__(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """parts: [1, ..., N, ...] with N at ``dim``."""
        key = (dim, *map(id, parts))
        if key not in self._made:
            self._made[key] = parts, self._stacked(parts, dim)
        return self._made[key][1]

    def _stacked(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        if all(part is parts[0] for part in parts):
            return parts[0].expand(len(parts), *parts[0].shape[1:])
        N = max(part.shape[dim] for part in parts)
        after = [0, 0] * (parts[0].ndim - 1 - dim)
        return torch.cat([F.pad(part, (*after, 0, N - part.shape[dim])) for part in parts])


def of_all_uses(uses: Sequence[LayerPass], statistics: Sequence[LayerStatistics]) -> LayerStatistics:
    """The statistics of a layer from those of every use of its weight, or of its maps, in one pass."""
    kinds: dict[int, list[LayerStatistics]] = {}
    has_head = any(use.transposed for use in uses)
    for use, of_use in zip(uses, statistics, strict=True):
        kinds.setdefault(use.transposed if has_head else use.part or 0, []).append(of_use)
    if has_head:
        return tied(*(summed(kinds[is_head]) if is_head in kinds else None for is_head in (False, True)))
    return stacked([summed(kinds[part]) for part in sorted(kinds)], uses[0].parts)


def merged(one: LayerStatistics, other: LayerStatistics) -> LayerStatistics:
    """The statistics of two passes, or of two uses, as one; their gradients are not joined yet."""
    return replace(
        one,
        A=other.A if one.A is None else one.A if other.A is None else one.A.merged(other.A),  # type: ignore[arg-type]
        B=other.B if one.B is None else one.B if other.B is None else one.B.merged(other.B),
        samples=one.samples + other.samples,
        rows=one.rows + other.rows,
        weight=1.0,
        halves=one.halves + other.halves,
        jacobians=one.jacobians + other.jacobians,
        rounding=max(one.rounding, other.rounding),
        product=None,
        unformed=None,
    )


def summed(uses: Sequence[LayerStatistics]) -> LayerStatistics:
    """The statistics of a layer whose weight is used several times in one pass.

    Uses that the output does not depend on have no signals, and do not count.
    """
    if len(uses) == 1:
        return uses[0]
    counted = [use for use in uses if use.B is not None] or uses
    total = reduce(merged, counted)
    total.samples = counted[0].samples
    if total.A is not None:
        total.A.count = counted[0].A.count if counted[0].A is not None else total.A.count
    if total.jacobians:
        inputs = torch.cat([j.inputs for j in total.jacobians], dim=2)
        signals = torch.cat([j.signals for j in total.jacobians], dim=3)
        total.jacobians = [total.jacobians[0]._replace(inputs=inputs, signals=signals)]
    return total


def stacked(parts: Sequence[LayerStatistics], groups: int) -> LayerStatistics:
    """The statistics of a layer whose weight stacks several maps, a group for each, from those of one pass."""
    if groups == 1:
        return parts[0]
    if len(parts) < groups:  # one of them was not seen
        return replace(parts[0], A=None, B=None, halves=[], jacobians=[])
    stack = RowStack()
    halves = zip(*(part.halves for part in parts), strict=True)
    jacobians = zip(*(part.jacobians for part in parts), strict=True)
    return replace(
        parts[0],
        A=_stacked_sums([part.A for part in parts], stack),
        B=_stacked_sums([part.B for part in parts], stack),
        rows=_stacked_counts([part.rows for part in parts]),
        rounding=max(part.rounding for part in parts),
        halves=[one[0]._replace(D=stack([x.D for x in one]), H=stack([x.H for x in one])) for one in halves],
        jacobians=[
            one[0]._replace(inputs=stack([x.inputs for x in one], 2), signals=stack([x.signals for x in one], 3))
            for one in jacobians
        ],
    )


def _stacked_sums(parts: Sequence[Accumulator | Frequencies | None], stack: RowStack) -> Accumulator | None:
    """Sums of one size as groups; None: one of them is missing. Those over fewer rows are scaled to the same count."""
    sums = [part for part in parts if part is not None and not isinstance(part, Frequencies)]
    if len(sums) < len(parts):
        return None
    total = sums[0].empty()
    total.count = max(part.count for part in sums)
    scales = [total.count / part.count for part in sums]
    if all(part.matrix is None for part in sums):
        rows = [[x if c == 1 else x * c**0.5 for x in part.rows] for part, c in zip(sums, scales, strict=True)]
        total.rows = [stack(of_draw) for of_draw in zip(*rows, strict=True)]
    else:
        matrices = [part.as_matrix() for part in sums]
        total.matrix = stack([M if c == 1 else M * c for M, c in zip(matrices, scales, strict=True)])
    return total


def _stacked_counts(rows: Sequence[float | Tensor]) -> float | Tensor:
    """One number if all maps have as many rows, else one a group, [groups, 1, 1]."""
    if all(count is rows[0] or (not isinstance(count, Tensor) and count == rows[0]) for count in rows):
        return rows[0]
    return torch.stack([torch.as_tensor(count, dtype=torch.float64) for count in rows])[:, None, None]


def tied(embedding: LayerStatistics | None, head: LayerStatistics | None) -> LayerStatistics:
    """The statistics of a weight that an embedding and a head use, as those of the embedding; None: it did not run."""
    assert head is not None
    A_h, B_h = head.A, head.B
    if embedding is None or not isinstance(embedding.A, Frequencies) or embedding.B is None:
        return replace(head, A=B_h, B=None if isinstance(A_h, Frequencies) else A_h, halves=[])
    if A_h is None or B_h is None or isinstance(A_h, Frequencies):
        return embedding
    frequencies, total_B, samples = embedding.A, embedding.B, embedding.A.count
    a_h, b_h, b_e = (sums.as_matrix() / sums.count for sums in (A_h, B_h, embedding.B))
    a_e = frequencies.sums / samples
    trace_a_h, trace_b_h, trace_b_e = (_trace(M) for M in (a_h, b_h, b_e))
    trace_a_e = a_e.sum(-1)[:, None, None].clamp_min(torch.finfo(a_e.dtype).tiny)
    whole = trace_a_e * trace_b_e + trace_a_h * trace_b_h
    ratio = (trace_a_e / whole).where(whole > 0, 0.0)
    A, B = B_h.empty(), total_B.empty()
    A.form = B.form = MATRIX
    A.matrix, A.count = samples * ratio * (trace_a_h * b_h + trace_b_e * torch.diag_embed(a_e)), samples
    B.matrix, B.count = total_B.count * (b_e + a_h * (trace_b_h / trace_a_e)), total_B.count
    return replace(embedding, A=A, B=B, halves=[])


def _trace(M: Tensor) -> Tensor:
    """[groups, 1, 1]."""
    return M.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
