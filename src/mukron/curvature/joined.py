"""What a step is made of: the passes of one process, or those of all ranks as one batch.

A rank's passes are to the joined batch what micro-batches are to a batch: ``stacking.merged`` puts both together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from mukron.curvature.frequencies import Frequencies
from mukron.curvature.passes import (
    Accumulator,
    Kinds,
    LayerStatistics,
    Pass,
    by_kind,
    of_layers,
)
from mukron.curvature.ranks import Ranks
from mukron.curvature.records import PassRecord
from mukron.curvature.stacking import Stacking, merged
from mukron.curvature.uses import along

Key = tuple[str, int, str]  # a layer, a kind of use of its weight, and a factor


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
    """What one rank sends to the others; sums travel by themselves."""

    kinds: Kinds
    samples: dict[str, int]
    uses: dict[str, Stacking]
    passes: list[PassRecord]
    ran: list[frozenset[str]]  # layers, by pass
    along: dict[str, tuple[tuple[int, ...], torch.dtype]]
    sums: dict[Key, tuple[tuple[int, ...], torch.dtype]]


def joined(passes: Sequence[Pass], names: Sequence[str], ranks: Ranks, empirical: bool) -> Joint:
    """Of the passes of all ranks. empirical: signals are derivatives of the user's loss."""
    share = 1 / ranks.size  # of a rank's loss in the mean over ranks
    kinds, samples, uses = by_kind(list(passes))
    records = [_scaled_record(one.record(), share) for one in passes]
    ours = {name: product * share for name, product in _along(passes, names).items()}
    scaled: Kinds = {
        name: {kind: _scaled(statistics, share, empirical) for kind, statistics in of.items()}
        for name, of in kinds.items()
    }
    bare, sums = _without_sums(scaled)
    sizes = {key: (tuple(total.shape), total.dtype) for key, total in sums.items()}
    of_probe = {name: (tuple(product.shape), product.dtype) for name, product in ours.items()}
    ran = [frozenset(use.name for use in one.layers.values()) for one in passes]
    sent = ranks.structures(_Sent(bare, samples, uses, records, ran, of_probe, sizes))

    keys: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {}
    probed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for one in sent:
        keys, probed = keys | one.sums, probed | one.along
    probed = {
        name: size for name, size in probed.items() if all(name in one.along or name not in one.kinds for one in sent)
    }
    missing = [
        torch.zeros(shape, dtype=dtype, device=ranks.device) for shape, dtype in [*keys.values(), *probed.values()]
    ]
    present = [*(sums.get(key) for key in keys), *(ours.get(name) for name in probed)]
    totals = ranks.summed([zero if total is None else total for total, zero in zip(present, missing, strict=True)])
    total_sums, products = dict(zip(keys, totals, strict=False)), dict(zip(probed, totals[len(keys) :], strict=True))

    layers = list(dict.fromkeys(name for one in sent for name in one.kinds))
    everywhere: Kinds = {}
    for name in layers:
        found = sorted({kind for one in sent for kind in one.kinds.get(name, {})})
        everywhere[name] = {
            kind: reduce(merged, [one.kinds[name][kind] for one in sent if kind in one.kinds.get(name, {})])
            for kind in found
        }
    _put_back(everywhere, total_sums)
    _drop_incomplete(everywhere, sent)
    elsewhere = {name: _samples_elsewhere(sent, name) for name in layers}
    counts = {name: sum(one.samples.get(name, 0) for one in sent) + elsewhere[name] for name in layers}
    for name, of in everywhere.items():
        for statistics in of.values():
            statistics.samples += elsewhere[name] if statistics.samples else 0
            if statistics.A is not None:
                statistics.A.count += elsewhere[name]
    stacked = {name: use for one in sent for name, use in one.uses.items()}
    return Joint(
        of_layers(everywhere, counts, stacked), [record for one in sent for record in one.passes], products.get
    )


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


def _without_sums(kinds: Kinds) -> tuple[Kinds, dict[Key, Tensor]]:
    """The statistics without their matrices and frequencies, and these."""
    sums: dict[Key, Tensor] = {}

    def bare(of: Accumulator | Frequencies | None, key: Key) -> Accumulator | Frequencies | None:
        if isinstance(of, Frequencies):
            sums[key] = of.sums
            return of.empty()
        if of is None or of.matrix is None:
            return of
        sums[key] = of.matrix
        rest = of.empty()
        rest.count, rest.rows = of.count, list(of.rows)
        return rest

    result: Kinds = {}
    for name, kinds_of in kinds.items():
        for kind, one in kinds_of.items():
            A, B = bare(one.A, (name, kind, "A")), bare(one.B, (name, kind, "B"))
            assert B is None or isinstance(B, Accumulator)
            result.setdefault(name, {})[kind] = replace(one, A=A, B=B)
    return result, sums


def _put_back(kinds: Kinds, sums: dict[Key, Tensor]) -> None:
    for (name, kind, factor), total in sums.items():
        of = kinds[name][kind].A if factor == "A" else kinds[name][kind].B
        if isinstance(of, Frequencies):
            of.sums = total
        elif of is not None:
            of.add_matrix(total, 0)


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
