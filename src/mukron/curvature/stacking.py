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

The trace of A is that of A_e. Without a head A and B are those of the embedding; without an embedding they are those
of the head, the trace of A being its number of positions, which is that of an embedding's A_e.

Passes are summed before anything else: the two uses need not run in the same ones, nor all maps have the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mukron.curvature.forms import MATRIX
from mukron.curvature.frequencies import Frequencies
from mukron.linalg import total_count

if TYPE_CHECKING:
    from mukron.curvature.passes import Accumulator, LayerPass, LayerStatistics


TIED_HEAD = -1  # the kind of use that a head makes of an embedding's weight; others have the number of their map


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


class Stacking(NamedTuple):
    """How a weight is used, where it is not by one layer as one map.

    Attributes:
        tied: It is that of an embedding and of a head.
        parts: The number of maps that it stacks.
    """

    tied: bool
    parts: int


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


def of_all_kinds(kinds: Mapping[int, LayerStatistics], use: Stacking, samples: float | Tensor) -> LayerStatistics:
    """The statistics of a layer from those of each kind of use of its weight, or of each of its maps, in all passes.

    use: what the weight stacks or ties; samples: those of all passes in which it is used.
    """
    if use.tied:
        return tied(kinds.get(0), kinds.get(TIED_HEAD), samples)
    return stacked([kinds[part] for part in sorted(kinds)], use.parts)


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


def summed(uses: Sequence[LayerPass], statistics: Sequence[LayerStatistics]) -> LayerStatistics:
    """The statistics of a layer whose weight is used in one pass, once or several times in the same way.

    Uses that the output does not depend on have no signals, and do not count. Where none are measured (FOOF), those
    are left out that the loss's own derivatives do not arrive at.
    """
    if len(uses) == 1:
        return statistics[0]
    seen = [found for found in statistics if found.B is not None or found.jacobians]
    reached = [found for use, found in zip(uses, statistics, strict=True) if use.reached]
    counted = seen or reached or statistics
    total = reduce(merged, counted)
    total.samples = counted[0].samples
    if total.A is not None:
        total.A.counts = counted[0].A.counts if counted[0].A is not None else total.A.counts
    if total.jacobians:
        inputs = torch.cat([j.inputs for j in total.jacobians], dim=2)
        signals = torch.cat([j.signals for j in total.jacobians], dim=3)
        total.jacobians = [total.jacobians[0]._replace(inputs=inputs, signals=signals)]
    return total


def stacked(parts: Sequence[LayerStatistics], groups: int) -> LayerStatistics:
    """The statistics of a layer whose weight stacks several maps, a group for each.

    Gradients are known as D^T H only if they are so for all maps: those with fewer rows may keep D and H alone.
    """
    if len(parts) < groups:  # one of them was not seen
        return replace(parts[0], A=None, B=None, halves=[], jacobians=[])
    stack = RowStack()
    halves, jacobians = _aligned([part.halves for part in parts]), _aligned([part.jacobians for part in parts])
    return replace(
        parts[0],
        A=_stacked_sums([part.A for part in parts], stack),
        B=_stacked_sums([part.B for part in parts], stack),
        rows=_stacked_counts([_rows_of(part, parts[0].samples) for part in parts]),
        rounding=max(part.rounding for part in parts),
        halves=[one[0]._replace(D=stack([x.D for x in one]), H=stack([x.H for x in one])) for one in halves],
        jacobians=[
            one[0]._replace(inputs=stack([x.inputs for x in one], 2), signals=stack([x.signals for x in one], 3))
            for one in jacobians
        ],
    )


def _aligned(parts: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """What all maps have of each pass; nothing, if some have it of other passes than others."""
    return list(zip(*parts, strict=True)) if len({len(part) for part in parts}) == 1 else []


def _stacked_sums(parts: Sequence[Accumulator | Frequencies | None], stack: RowStack) -> Accumulator | None:
    """Sums of one size as groups; None: one of them is missing. Those over fewer rows are scaled to the same count."""
    sums = [part for part in parts if part is not None and not isinstance(part, Frequencies)]
    if len(sums) < len(parts):
        return None
    total = sums[0].empty()
    total.counts = sums[0].counts
    scales = [None if _alike(part.counts, total.counts) else _ratio(total.counts, part.counts) for part in sums]
    if all(part.matrix is None for part in sums):
        if len({len(part.rows) for part in sums}) > 1:
            for part in sums:
                part.joined()
        rows = [[x if c is None else x * c**0.5 for x in part.rows] for part, c in zip(sums, scales, strict=True)]
        total.rows = [stack(of_draw) for of_draw in zip(*rows, strict=True)]
    else:
        matrices = [part.as_matrix() for part in sums]
        total.parts = [stack([M if c is None else M * c for M, c in zip(matrices, scales, strict=True)])]
    return total


def _alike(counts: Sequence[float | Tensor], others: Sequence[float | Tensor]) -> bool:
    """Whether two maps ran for the same samples, without a look at the device."""
    return len(counts) == len(others) and all(
        a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b)
        for a, b in zip(counts, others, strict=True)
    )


def _ratio(counts: Sequence[float | Tensor], others: Sequence[float | Tensor]) -> float | Tensor:
    return total_count(counts) / total_count(others)


def _rows_of(part: LayerStatistics, samples: float | Tensor) -> float | Tensor:
    """Rows as if there had been that many samples: a map may have run in some of the passes alone."""
    return part.rows if _alike((part.samples,), (samples,)) else part.rows * _ratio((samples,), (part.samples,))


def _stacked_counts(rows: Sequence[float | Tensor]) -> float | Tensor:
    """One number if all maps have as many rows, else one a group, [groups, 1, 1]."""
    if all(count is rows[0] or (not isinstance(count, Tensor) and count == rows[0]) for count in rows):
        return rows[0]
    return torch.stack([torch.as_tensor(count, dtype=torch.float64) for count in rows])[:, None, None]


def tied(embedding: LayerStatistics | None, head: LayerStatistics | None, samples: float | Tensor) -> LayerStatistics:
    """The statistics of a weight that an embedding and a head use, as those of the embedding; None: it did not run.

    Both factors are matrices, whichever of the two uses ran: averages over steps are of one kind.

    samples: those of all passes in which either ran; A_e and A_h are sums over these.
    """
    statistics, e, h = embedding or head, _means(embedding, samples), _means(head, samples)
    assert statistics is not None
    if e is not None and h is not None:
        A, B = _partial_traces(*e, *h)
    elif e is not None:
        A, B = e
    elif h is not None and head is not None:
        A, B = _scaled_alike(*h, head.rows / head.samples)
    else:
        return replace(statistics, B=None, halves=[])
    like = next(use.B for use in (embedding, head) if use is not None and use.B is not None)
    sums = like.empty(), like.empty()
    for total, M, other in zip(sums, (A, B), (B, A), strict=True):
        total.d, total.other, total.form = M.shape[-1], other.shape[-1], MATRIX
        total.parts, total.counts = [M * samples], (samples,)
    return replace(statistics, A=sums[0], B=sums[1], samples=samples, halves=[])


def _means(use: LayerStatistics | None, samples: float | Tensor) -> tuple[Tensor, Tensor] | None:
    """The factors of one use as matrices; None: it did not run, or the output does not depend on it."""
    if use is None or use.A is None or use.B is None:
        return None
    sums = torch.diag_embed(use.A.sums) if isinstance(use.A, Frequencies) else use.A.as_matrix()
    return sums / total_count([samples]), use.B.as_matrix() / total_count(use.B.counts)


def _partial_traces(a_e: Tensor, b_e: Tensor, a_h: Tensor, b_h: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of both uses."""
    trace_a_e, trace_b_e, trace_a_h, trace_b_h = (_trace(M) for M in (a_e, b_e, a_h, b_h))
    trace_a_e = trace_a_e.clamp_min(torch.finfo(a_e.dtype).tiny)
    whole = trace_a_e * trace_b_e + trace_a_h * trace_b_h
    ratio = (trace_a_e / whole).where(whole > 0, 0.0)
    return ratio * (trace_a_h * b_h + trace_b_e * a_e), b_e + a_h * (trace_b_h / trace_a_e)


def _scaled_alike(a_h: Tensor, b_h: Tensor, positions: float | Tensor) -> tuple[Tensor, Tensor]:
    """A and B of a head alone, with the trace of A that an embedding would give it."""
    scale = _trace(b_h) / torch.as_tensor(positions).to(b_h)
    return (b_h / scale).where(scale > 0, 0.0), a_h * scale


def _trace(M: Tensor) -> Tensor:
    """[groups, 1, 1]."""
    return M.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
