"""How the curvature of each layer travels between ranks: what the cost model asks, measured on the first batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from mukron.curvature import MATRIX, ROWS, Ahead, CaptureOptions, Drawn, Exact, Lane, Pass, Ranks, as_rows, keeps_halves
from mukron.curvature.passes import LayerPass
from mukron.layers import BIAS, WEIGHT
from mukron.optim.communication import BY_FACTORS, Communication, LayerTraffic, Speed
from mukron.optim.options import Spectral, Trust
from mukron.optim.table import LayerEntry

if TYPE_CHECKING:
    from mukron.optim.exchange import Owners
    from mukron.optim.optimizer import SecondOrder

BUCKET = 25 << 20  # bytes of a message in a backward pass, as DistributedDataParallel's
MESSAGE, SIDE, TIMED = 1 << 20, 512, 3  # numbers of a message and the side of a matrix that are timed, and how often


def cost_of(layer: LayerEntry) -> float:
    """About how many multiplications a layer's inverses and its move take: cubes of its sides, and both products."""
    matrix = layer.layer
    return cost_of_shape(
        matrix.d_out, 1 if matrix.one_hot or list(layer.blocks) == [BIAS] else matrix.d_in, matrix.groups
    )


def cost_of_shape(d_out: float, d_in: float, groups: int) -> float:
    """The same, of a weight; d_in is 1 where inputs have no matrix."""
    d_out, d_in = float(d_out), float(d_in)
    return groups * (d_out**3 + d_in**3 + d_out * d_in * (d_out + d_in))


class Seen(NamedTuple):
    """What this rank has of a batch.

    Attributes:
        rows: Samples times positions, by layer; maps that a weight stacks have rows of their own.
        samples: Of the batch.
        outputs: Numbers of the network's output for a sample.
        partial: Layers whose rows are not those of all samples, with their number in a pass and that of its samples.
        whole: If there are such layers, those that ran for all samples in every pass.
    """

    rows: dict[str, int]
    samples: int = 0
    outputs: int = 1
    partial: tuple[tuple[str, int, int], ...] = ()
    whole: frozenset[str] = frozenset()


def seen_in(passes: Sequence[Pass]) -> Seen:
    """What the passes show, before anything is made of them."""
    total: dict[str, int] = {}
    for one in passes:
        of_maps: dict[str, dict[int, int]] = {}
        for use in one.layers.values():
            known = of_maps.setdefault(use.name, {})
            known[use.kind] = known.get(use.kind, 0) + _rows_of(use, one.samples)
        for name, counts in of_maps.items():
            total[name] = total.get(name, 0) + max(counts.values())
    outputs = [one.errors.shape[1] for one in passes if one.errors is not None]
    partial = {
        use.name: (use.name, of.inputs.shape[1] * of.inputs.shape[2], one.samples)
        for one in passes
        for use in one.layers.values()
        for of in use.statistics.jacobians
        if of.inputs.shape[1] != one.samples
    }
    runs = [frozenset(use.name for use in one.layers.values()) for one in passes] if partial else [frozenset[str]()]
    whole = frozenset[str].intersection(*runs).difference(partial)
    samples = sum(one.samples for one in passes)
    return Seen(total, samples, max(outputs, default=1), tuple(partial.values()), whole)


def _rows_of(use: LayerPass, samples: int) -> int:
    """Samples times positions of a layer in a pass; those of an embedding are its indices."""
    return use.count or int(torch.as_tensor(use.statistics.rows)) or samples


def forms_of(
    d_in: int, d_out: int, rows: Sequence[int], capture: CaptureOptions, averages: bool, one_hot: bool
) -> tuple[bool, bool]:
    """Whether a layer's factors are held as rows, and whether D is sent with H: its gradient is then D^T H.

    rows: of a batch, by rank. averages: ranks average gradients in the step. one_hot: the layer is an embedding, whose
    factor A is a diagonal; its B is held as rows where that is asked for.
    """
    if capture.jacobian:
        return not one_hot, False
    by_rows = capture.form == ROWS
    if capture.form == "auto" and not one_hot:
        by_rows = as_rows(sum(rows), d_in, d_out) or (capture.signals and as_rows(sum(rows), d_out, d_in))
    kept = keeps_halves(max(rows), d_in, d_out, capture.form, capture.signals) or capture.fused
    return by_rows, kept or (averages and max(rows) < d_in)


def stays_low_rank(momentum: Mapping[str, Any], trust: Trust | None) -> bool:
    """Whether a gradient D^T H is still that once it is a move: neither averaged, nor of another length entry by entry.

    momentum: entries of a parameter group.
    """
    averaged = momentum["momentum"] and momentum["momentum_on"] == "gradient"
    return not (averaged or momentum["nesterov"]) and (trust is None or isinstance(trust, Spectral))


def traffic_for(exchange: Owners, entry: LayerEntry, seen: Sequence[Seen]) -> LayerTraffic:
    """What the cost model asks of a layer.

    seen: of the first batch, by rank.
    """
    rows, outputs = [of.rows.get(entry.name, 0) for of in seen], max(of.outputs for of in seen)
    optimizer, layer = exchange.optimizer, entry.layer
    options, capture = optimizer.options, optimizer.capture_options
    d_in, d_out, fisher = layer.d_in, layer.d_out, capture.fisher
    draws = fisher.draws if isinstance(fisher, Drawn) else outputs if isinstance(fisher, Exact) else 1
    signals = outputs if capture.jacobian else draws if capture.signals else 0
    averages, tied = exchange.gradients.averages, any(not other.one_hot for other in entry.others.values())
    by_rows, products = forms_of(d_in, d_out, rows, capture, averages, layer.one_hot)
    weight = entry.blocks.get(WEIGHT)
    return LayerTraffic(
        d_in,
        d_out,
        layer.groups,
        tuple(rows),
        signals=signals,
        tokens=layer.one_hot and not tied,
        inputs=capture.inputs or capture.jacobian,
        products=products and optimizer.uses_products and not (layer.one_hot or weight is None),
        own_signals=capture.empirical,
        low_rank=stays_low_rank(optimizer.param_groups[0], options.trust),
        errors=tuple(outputs * of.samples for of in seen) if capture.jacobian else (),
        by_rows=by_rows,
        factor_every=options.factor_every,
        inverse_every=options.inverse_every,
        averages=averages,
        shards=_numbers_here(exchange, entry),
        biases=layer.groups * d_out * (BIAS in entry.blocks),
        element=max(4, entry.anchor.element_size()),
    )


def hold_as_exchanged(optimizer: SecondOrder) -> None:
    """Let the coming passes hold statistics in the forms in which they travel, once these are chosen."""
    if optimizer.capture_options.measures:
        ways = {name: way for name, way in optimizer.together.schemes.items() if name in optimizer.layers}
        optimizer.capture.forms = {name: MATRIX if way.name == BY_FACTORS else ROWS for name, way in ways.items()}
        optimizer.capture.products = frozenset(name for name, way in ways.items() if way.products)


def ahead_of(optimizer: SecondOrder, ranks: Ranks) -> Ahead | None:
    """What sends statistics in backward passes; None: all of them wait for the step."""
    known, capture = optimizer.together.ahead, optimizer.capture_options
    copies = ranks.wire.type != ranks.device.type  # to the CPU, which would hold the backward pass up
    if copies or not (capture.measures and optimizer.options.communication.overlap and Lane.serves(ranks)):
        return None
    return known if known is not None and known.ranks.group is ranks.group else Ahead(ranks, capture.empirical)


def parts_in(traffic: Mapping[str, LayerTraffic]) -> list[frozenset[str]]:
    """The layers of each message of a backward pass: all of them, then some at a time, the last layers first."""
    parts, size = [frozenset(traffic)], 0
    layers = list[str]()
    for name, of in reversed(list(traffic.items())):
        layers.append(name)
        size += max(of.rows) * of.d_out * of.groups * of.element
        if size > BUCKET:
            parts.append(frozenset(layers))
            layers, size = [], 0
    return [*parts, frozenset(layers)] if layers else parts


def _numbers_here(exchange: Owners, entry: LayerEntry) -> tuple[int, ...] | None:
    """Numbers of a layer's trained weight that each rank has; None: neither the weight nor the bias is spread."""
    if not any(of.name in exchange.shards for of in entry.blocks.values()):
        return None
    weight = entry.blocks.get(WEIGHT)
    if weight is None or weight.name not in exchange.shards:
        return (0,) * exchange.size  # the bias alone is spread
    return exchange.shards[weight.name].numbers


def speed_of(ranks: Ranks, communication: Communication) -> Speed:
    """How fast numbers arrive and are multiplied; as measured here, to a power of two, the same on every rank."""
    if not communication.measured:
        return Speed() if communication.bandwidth is None else Speed(communication.bandwidth)
    message = torch.zeros(MESSAGE, device=ranks.wire)
    source = distributed.get_global_rank(ranks.group, 0)
    matrix = torch.ones(SIDE, SIDE, device=ranks.device)
    sent = _seconds(lambda: distributed.broadcast(message, source, group=ranks.group), ranks.device)
    multiplied = _seconds(lambda: matrix @ matrix, ranks.device)
    found = ranks.objects((message.numel() * message.element_size() / sent, SIDE**3 / multiplied))
    bandwidth, multiplications = (2.0 ** round(math.log2(min(of))) for of in zip(*found, strict=True))
    return Speed(bandwidth, multiplications)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(TIMED):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)
