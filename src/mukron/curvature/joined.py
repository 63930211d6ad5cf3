"""What a step is made of: the passes of one process, or those of all ranks as one batch.

A rank's passes are to the joined batch what micro-batches are to a batch: ``stacking.merged`` puts both together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mukron.curvature.forms import AUTO
from mukron.curvature.passes import Accumulator, Kinds, LayerStatistics, Pass, of_layers
from mukron.curvature.ranks import Ranks, aligned
from mukron.curvature.records import PassRecord
from mukron.curvature.stacking import Stacking, merged
from mukron.curvature.uses import along

EVERY_RANK = -1  # the "owner" of a layer whose rows go to all ranks


@dataclass
class Joint:
    """All that the passes of a step have brought.

    Attributes:
        statistics: By layer.
        passes: What is used of each pass beside those.
        along: What the gradient of a layer, by its own passes, does to the probe v, D^T (H v), where that is checked.
        gradients: By parameter, those that the step takes in place of ``grad``; None: D^T H of the statistics.
        moving: Parameters that have a gradient on some rank; None: those that have one here.
    """

    statistics: dict[str, LayerStatistics]
    passes: Sequence[Pass | PassRecord]
    along: Callable[[str], Tensor | None]
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    moving: frozenset[str] | None = None


@dataclass
class Delivery:
    """What ranks send each other of a step.

    Attributes:
        passes: Of this rank.
        kinds, samples, uses: What they measured, as ``by_kind`` returns it.
        owner: By layer, the rank that its statistics go to, or ``EVERY_RANK``.
        empirical: Signals are derivatives of the user's loss.
        measured: False leaves the statistics out.
        unformed: Layers whose gradient is D^T H of all ranks, in place of what autograd formed.
        form: How statistics are held once they are all there.
        gradients: What goes with them to each rank: gradients, or parts of some, by parameter.
    """

    passes: Sequence[Pass]
    kinds: Kinds
    samples: dict[str, int]
    uses: dict[str, Stacking]
    owner: Mapping[str, int]
    empirical: bool = False
    measured: bool = True
    unformed: frozenset[str] = frozenset()
    form: str = AUTO
    gradients: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


def _along(passes: Sequence[Pass], names: Sequence[str]) -> dict[str, Tensor]:
    if not any(one.checked for one in passes):
        return {}
    return {name: product for name in names if (product := along(passes, name)) is not None}


@dataclass
class _Sent:
    """What one rank sends to another: of all its passes, and the statistics of the layers that the other one owns."""

    samples: dict[str, int]
    uses: dict[str, Stacking]
    passes: list[PassRecord]
    ran: list[frozenset[str]]  # layers, by pass
    along: dict[str, Tensor]
    kinds: Kinds
    gradients: Mapping[str, Tensor]


def joined(delivery: Delivery, ranks: Ranks) -> tuple[Joint, list[Mapping[str, Tensor]]]:
    """Of the passes of all ranks, with the statistics of the layers that this one owns; and gradients, by rank."""
    share, passes = 1 / ranks.size, delivery.passes  # share: of a rank's loss in the mean over ranks
    records = [_scaled_record(one.record(), share) for one in passes]
    products = {name: product * share for name, product in _along(passes, list(delivery.owner)).items()}
    ran = [frozenset(use.name for use in one.layers.values()) for one in passes]
    to_ranks: list[Kinds] = [{} for _ in range(ranks.size)]
    for name, of in delivery.kinds.items() if delivery.measured else ():
        owner = delivery.owner[name]
        for kind, part in of.items():
            changed = _Changed(share, delivery.empirical, name in delivery.unformed, owner == EVERY_RANK)
            scaled = changed.statistics(part)
            for rank in range(ranks.size) if owner == EVERY_RANK else (owner,):
                stays = rank == ranks.rank and owner != EVERY_RANK
                to_ranks[rank].setdefault(name, {})[kind] = scaled if stays else _packed(scaled)
    sent = ranks.delivered(
        [
            _Sent(delivery.samples, delivery.uses, records, ran, products, of_rank, delivery.gradients.get(rank, {}))
            for rank, of_rank in enumerate(to_ranks)
        ]
    )
    everywhere = _merged(sent, delivery.form)
    elsewhere = {name: _samples_elsewhere(sent, name) for name in everywhere}
    counts = {name: sum(one.samples.get(name, 0) for one in sent) + more for name, more in elsewhere.items()}
    for name, of in everywhere.items():
        for statistics in of.values():
            statistics.samples += elsewhere[name] if statistics.samples else 0
            if statistics.A is not None:
                statistics.A.count += elsewhere[name]
    stacked = {name: use for one in sent for name, use in one.uses.items()}
    joint = Joint(
        of_layers(everywhere, counts, stacked),
        [record for one in sent for record in one.passes],
        {name: _sum_along(sent, name) for one in sent for name in one.along}.get,
    )
    return joint, [one.gradients for one in sent]


def _merged(sent: Sequence[_Sent], form: str) -> Kinds:
    """The statistics of all ranks, by layer and kind of use."""
    everywhere: Kinds = {}
    for name in dict.fromkeys(name for one in sent for name in one.kinds):
        found = sorted({kind for one in sent for kind in one.kinds.get(name, {})})
        everywhere[name] = {
            kind: reduce(merged, [_unpacked(one.kinds[name][kind]) for one in sent if kind in one.kinds.get(name, {})])
            for kind in found
        }
    _drop_incomplete(everywhere, sent)
    for of in everywhere.values():
        for statistics in of.values():
            for sums in (statistics.A, statistics.B):
                if isinstance(sums, Accumulator):
                    sums.form = form
                    sums.settle()
    return everywhere


def _sum_along(sent: Sequence[_Sent], name: str) -> Tensor | None:
    """Over all ranks, if each that ran the layer has its part."""
    if any(name in one.samples and name not in one.along for one in sent):
        return None
    return torch.stack([one.along[name] for one in sent if name in one.along]).sum(0)


@dataclass
class _Changed:
    """Statistics as they are sent: with derivatives of the mean over all ranks of their losses.

    Attributes:
        share: Of a rank's loss in that mean.
        empirical: Signals are such derivatives.
        unformed: The gradient is D^T H, whatever autograd formed.
        alike: Tensors lie in memory alike on the rank that has them and where they arrive: all compute the same bits.
    """

    share: float
    empirical: bool
    unformed: bool
    alike: bool
    made: dict[Any, Tensor] = field(default_factory=dict)  # what is one tensor is sent once

    def statistics(self, of: LayerStatistics) -> LayerStatistics:
        jacobians = [one._replace(errors=one.errors * self.share) for one in of.jacobians]
        halves = [
            half._replace(D=self.tensor(half.D, self.share), H=self.tensor(half.H), fused=half.fused or self.unformed)
            for half in of.halves
        ]
        return replace(of, A=self.sums(of.A), B=self.sums(of.B, self.empirical), halves=halves, jacobians=jacobians)

    def sums(self, of: Any, derivatives: bool = False) -> Any:
        if not isinstance(of, Accumulator):
            return of
        share, total = self.share if derivatives else 1.0, of.empty()
        total.count, total.rows = of.count, [self.tensor(rows, share) for rows in of.rows]
        total.matrix = None if of.matrix is None else of.matrix if share == 1 else of.matrix * share**2
        return total

    def tensor(self, X: Tensor, share: float = 1.0) -> Tensor:
        key = (X.data_ptr(), X.shape, X.stride(), share)
        if key not in self.made:
            scaled = X if share == 1 else X * share
            self.made[key] = aligned(scaled.contiguous()) if self.alike else scaled
        return self.made[key]


def _packed(statistics: LayerStatistics) -> LayerStatistics:
    """For a message: of a matrix the upper triangle, which says all of it."""
    return replace(statistics, A=_packed_sums(statistics.A), B=_packed_sums(statistics.B))


def _packed_sums(sums: Any) -> Any:
    if not isinstance(sums, Accumulator) or sums.matrix is None:
        return sums
    small = sums.empty()
    small.rows, small.count, small.matrix = sums.rows, sums.count, sums.matrix[:, _upper(sums.matrix)]
    return small


def _unpacked(statistics: LayerStatistics) -> LayerStatistics:
    """What ``_packed`` was made of."""
    for sums in (statistics.A, statistics.B):
        if isinstance(sums, Accumulator) and sums.matrix is not None and sums.matrix.ndim == 2:
            M = sums.matrix.new_zeros(len(sums.matrix), sums.d, sums.d)
            M[:, _upper(M)] = sums.matrix
            sums.matrix = M + M.triu(1).mT
    return statistics


def _upper(M: Tensor) -> Tensor:
    """Which entries of a matrix are on its diagonal or above."""
    return torch.ones(M.shape[-2:], dtype=torch.bool, device=M.device).triu()


def _scaled_record(record: PassRecord, share: float) -> PassRecord:
    if record.weighed is None:
        return record
    scales = record.weighed.new_tensor([share, 1, share, 1, 1])  # as ``scale.weigh`` orders its sums
    return replace(record, weighed=record.weighed * scales)


def _drop_incomplete(kinds: Kinds, sent: Sequence[_Sent]) -> None:
    """A gradient is D^T H of all ranks only if each that ran the layer has its part."""
    for name, of in kinds.items():
        for kind, statistics in of.items():
            ran = [one.kinds[name][kind] for one in sent if kind in one.kinds.get(name, {})]
            if not all(part.halves for part in ran):
                statistics.halves = []


def _samples_elsewhere(sent: Sequence[_Sent], name: str) -> int:
    """Samples of ranks on which a layer did not run in a pass in which it ran on others: they are of the same batch."""
    total = 0
    for number in range(max(len(one.passes) for one in sent)):
        present = [one for one in sent if number < len(one.passes)]
        if any(name in one.ran[number] for one in present):
            total += sum(one.passes[number].samples for one in present if name not in one.ran[number])
    return total
