"""What a step is made of: the passes of one process, or those of all ranks as one batch.

A rank's passes are to the joined batch what micro-batches are to a batch: ``stacking.merged`` puts both together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from mukron.curvature.passes import Kinds, LayerStatistics, Pass, by_kind, of_layers
from mukron.curvature.ranks import Ranks
from mukron.curvature.records import PassRecord
from mukron.curvature.stacking import Stacking, merged
from mukron.curvature.uses import along


@dataclass
class Joint:
    """All that the passes of a step have brought.

    Attributes:
        statistics: By layer.
        passes: What is used of each pass beside those.
        along: What the gradient of a layer, by its own passes, does to the probe v, D^T (H v), where that is checked.
    """

    statistics: dict[str, LayerStatistics]
    passes: Sequence[Pass | PassRecord]
    along: Callable[[str], Tensor | None]


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


def joined(
    passes: Sequence[Pass], owner: Mapping[str, int], ranks: Ranks, empirical: bool, measured: bool = True
) -> Joint:
    """Of the passes of all ranks, with the statistics of the layers that this one owns.

    owner: the rank of each layer. empirical: signals are derivatives of the user's loss. measured: False leaves the
    statistics out.
    """
    share = 1 / ranks.size  # of a rank's loss in the mean over ranks
    kinds, samples, uses = by_kind(list(passes))
    records = [_scaled_record(one.record(), share) for one in passes]
    products = {name: product * share for name, product in _along(passes, list(owner)).items()}
    ran = [frozenset(use.name for use in one.layers.values()) for one in passes]
    to_ranks: list[Kinds] = [{} for _ in range(ranks.size)]
    for name, of in kinds.items() if measured else ():
        to_ranks[owner[name]][name] = {kind: _scaled(part, share, empirical) for kind, part in of.items()}
    sent = ranks.delivered([_Sent(samples, uses, records, ran, products, of_rank) for of_rank in to_ranks])

    everywhere: Kinds = {}
    for name in dict.fromkeys(name for one in sent for name in one.kinds):
        found = sorted({kind for one in sent for kind in one.kinds.get(name, {})})
        everywhere[name] = {
            kind: reduce(merged, [one.kinds[name][kind] for one in sent if kind in one.kinds.get(name, {})])
            for kind in found
        }
    _drop_incomplete(everywhere, sent)
    elsewhere = {name: _samples_elsewhere(sent, name) for name in everywhere}
    counts = {name: sum(one.samples.get(name, 0) for one in sent) + more for name, more in elsewhere.items()}
    for name, of in everywhere.items():
        for statistics in of.values():
            statistics.samples += elsewhere[name] if statistics.samples else 0
            if statistics.A is not None:
                statistics.A.count += elsewhere[name]
    stacked = {name: use for one in sent for name, use in one.uses.items()}
    return Joint(
        of_layers(everywhere, counts, stacked),
        [record for one in sent for record in one.passes],
        {name: _sum_along(sent, name) for one in sent for name in one.along}.get,
    )


def _sum_along(sent: Sequence[_Sent], name: str) -> Tensor | None:
    """Over all ranks, if each that ran the layer has its part."""
    if any(name in one.samples and name not in one.along for one in sent):
        return None
    return torch.stack([one.along[name] for one in sent if name in one.along]).sum(0)


def _scaled(statistics: LayerStatistics, share: float, empirical: bool) -> LayerStatistics:
    """With derivatives of the mean over all ranks of their losses."""
    signals = statistics.B
    if empirical and signals is not None:
        scaled = signals.empty()
        scaled.count, scaled.rows = signals.count, [rows * share for rows in signals.rows]
        scaled.matrix = None if signals.matrix is None else signals.matrix * share**2
        signals = scaled
    halves = [half._replace(D=half.D * share) for half in statistics.halves]
    jacobians = [one._replace(errors=one.errors * share) for one in statistics.jacobians]
    return replace(statistics, B=signals, halves=halves, jacobians=jacobians)


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
