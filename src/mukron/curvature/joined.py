"""What a step is made of: the passes of one process, or those of all ranks as one batch.

A rank's passes are to the joined batch what micro-batches are to a batch: ``stacking.merged`` puts both together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from mukron.curvature.ahead import Ahead, Told
from mukron.curvature.forms import AUTO
from mukron.curvature.passes import Accumulator, Kinds, LayerStatistics, Pass, Samples, of_layers
from mukron.curvature.ranks import Ranks
from mukron.curvature.records import PassRecord
from mukron.curvature.sending import Outgoing, whole
from mukron.curvature.stacking import Stacking, merged
from mukron.curvature.uses import along


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
        ahead: What is on its way already.
    """

    passes: Sequence[Pass]
    kinds: Kinds
    samples: Samples
    uses: dict[str, Stacking]
    owner: Mapping[str, int]
    empirical: bool = False
    measured: bool = True
    unformed: frozenset[str] = frozenset()
    form: str = AUTO
    gradients: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    ahead: Ahead | None = None


def _along(passes: Sequence[Pass], names: Sequence[str]) -> dict[str, Tensor]:
    if not any(one.checked for one in passes):
        return {}
    return {name: product for name in names if (product := along(passes, name)) is not None}


@dataclass
class _Sent:
    """What one rank sends to another: of all its passes, and the statistics of the layers that the other one owns."""

    samples: Samples
    uses: dict[str, Stacking]
    passes: list[PassRecord]
    ran: list[frozenset[str]]  # layers, by pass
    along: dict[str, Tensor]
    kinds: Kinds
    gradients: Mapping[str, Tensor]
    told: Told | None  # sizes of this step


def joined(delivery: Delivery, ranks: Ranks) -> tuple[Joint, list[Mapping[str, Tensor]]]:
    """Of the passes of all ranks, with the statistics of the layers that this one owns; and gradients, by rank."""
    share, passes = 1 / ranks.size, delivery.passes  # share: of a rank's loss in the mean over ranks
    records = [_scaled_record(one.record(), share) for one in passes]
    products = {name: product * share for name, product in _along(passes, list(delivery.owner)).items()}
    ran = [frozenset(use.name for use in one.layers.values()) for one in passes]
    ahead, outgoing = delivery.ahead, Outgoing(ranks.size, ranks.rank)
    outgoing = outgoing if ahead is None else ahead.outgoing
    kinds = delivery.kinds if delivery.measured else {}
    to_ranks = outgoing.by_rank(kinds, delivery.owner, delivery.empirical)
    told = [None] * ranks.size if ahead is None else ahead.told(to_ranks, len(passes))
    gradients = [delivery.gradients.get(rank, {}) for rank in range(ranks.size)]
    parcels = [
        _Sent(delivery.samples, delivery.uses, records, ran, products, *of_rank)
        for of_rank in zip(to_ranks, gradients, told, strict=True)
    ]
    sent = ranks.delivered(parcels, ahead)
    if ahead is not None:
        ahead.agree([one.told for one in sent if one.told is not None])
    everywhere = _merged(sent, delivery.form, delivery.unformed)
    elsewhere = {name: _samples_elsewhere(sent, name) for name in everywhere}
    counts = {name: sum(one.samples.get(name, 0) for one in sent) + more for name, more in elsewhere.items()}
    for name, of in everywhere.items():
        for statistics in of.values():
            _count_elsewhere(statistics, elsewhere[name])
    stacked = {name: use for one in sent for name, use in one.uses.items()}
    joint = Joint(
        of_layers(everywhere, counts, stacked),
        [record for one in sent for record in one.passes],
        {name: _sum_along(sent, name) for one in sent for name in one.along}.get,
    )
    return joint, [one.gradients for one in sent]


def _count_elsewhere(statistics: LayerStatistics, samples: float | Tensor) -> None:
    """Count samples of the batch for which other ranks have no rows of a layer."""
    if statistics.measured:
        statistics.samples = statistics.samples + samples
    counted = [statistics.A]
    if statistics.by_samples:
        statistics.rows = statistics.rows + samples
        counted.append(statistics.B)
    for sums in counted:
        if sums is not None:
            sums.counts += (samples,)


def _merged(sent: Sequence[_Sent], form: str, unformed: frozenset[str]) -> Kinds:
    """The statistics of all ranks, by layer and kind of use; the gradients of some layers are D^T H of them alone."""
    everywhere: Kinds = {}
    for name in dict.fromkeys(name for one in sent for name in one.kinds):
        found = sorted({kind for one in sent for kind in one.kinds.get(name, {})})
        everywhere[name] = {
            kind: reduce(merged, [whole(one.kinds[name][kind]) for one in sent if kind in one.kinds.get(name, {})])
            for kind in found
        }
    _drop_incomplete(everywhere, sent)
    for name, of in everywhere.items():
        for statistics in of.values():
            if name in unformed:
                statistics.halves = [half._replace(fused=True) for half in statistics.halves]
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


def _samples_elsewhere(sent: Sequence[_Sent], name: str) -> float | Tensor:
    """Samples of ranks on which a layer did not run in a pass in which it ran on others: they are of the same batch."""
    total: float | Tensor = 0
    for number in range(max(len(one.passes) for one in sent)):
        present = [one for one in sent if number < len(one.passes)]
        if any(name in one.ran[number] for one in present):
            total = total + sum(one.passes[number].used_samples for one in present if name not in one.ran[number])
    return total
