"""Units of gradients that are squared: squares of very small or very large gradients underflow or overflow.

A block's gradient is divided by its unit, a power of 16, before it is squared. Units are 1 until a gradient or its
squares leave the range below; what is kept in the old unit is then converted. Only damping rules that are relative to
the factor allow it, and for those a unit changes nothing else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mukron.linalg import LowRank
from mukron.optim.direction import whole_gradient
from mukron.optim.update import Move, times

if TYPE_CHECKING:
    from mukron.optim.table import LayerEntry
    from mukron.optim.transaction import Transaction

# A unit is wrong if the trace of squares is below LEAST_TRACE, or the gradient is above LARGEST_GRADIENT units.
LEAST_TRACE, LARGEST_GRADIENT = 1e-18, 1e8
SQUARES = {"M": 2, "m": 2, "S": 2, "D": 2, "Z": 1}  # kept statistics, by the power of the gradient that they are


def unit_of(step: Transaction, layer: LayerEntry, block: str) -> float:
    """What a block's gradient is divided by before it is squared."""
    units: dict[str, float] = step.units.get(layer.name) or step.state_of(layer.anchor).get("units", {})
    return units.get(block, 1.0)


def gradients_to_square(step: Transaction, layer: LayerEntry) -> dict[str, Move]:
    """The gradients of a layer by block, each divided by its unit."""
    scaled = {}
    for block, entry in layer.blocks.items():
        if (G := whole_gradient(step, layer, block, entry)) is None:
            continue
        parts = (G.D, G.H) if isinstance(G, LowRank) else (G,)
        step.sizes[layer.name, block] = list(torch._foreach_norm(parts, math.inf))
        scaled[block] = times(G, 1 / unit_of(step, layer, block))
    return scaled


def changes_units(step: Transaction, sizes: list[float], traces: list[float]) -> bool:
    """Choose units for gradients whose squares underflow or overflow; whether there were any."""
    keys = [key[:2] for key, trace in step.traces.items() for _ in range(trace.numel())]
    trace_of, values, changed = dict[tuple[str, str], float](), iter(sizes), False
    for key, trace in zip(keys, traces, strict=True):  # a block of a matrix may have no gradient
        trace_of[key] = trace_of[key] if trace_of.get(key, 0.0) > trace else trace
    for (name, block), parts in step.sizes.items():
        layer, size = step.optimizer.layers[name], math.prod([next(values) for _ in parts])
        if not 0 < size < math.inf or (name, block) not in trace_of:
            continue
        unit = unit_of(step, layer, block)
        if LEAST_TRACE < trace_of[name, block] < math.inf and size < LARGEST_GRADIENT * unit:
            continue
        new = 16.0 ** round(math.log(size, 16))
        if new != unit and step.optimizer.rule_of(layer, block).relative:
            step.units.setdefault(name, {})[block] = new
            changed = True
    return changed


def convert(step: Transaction, layer: LayerEntry, kept: dict[str, Any], peaks: dict[str, Any]) -> None:
    """Statistics that were kept in other units, in those that this step has chosen."""
    before = step.state_of(layer.anchor).get("units", {})
    for block, unit in step.units[layer.name].items():
        ratio = before.get(block, 1.0) / unit
        for name, side in kept.get(block, {}).items():
            side.update({key: side[key] * ratio**power for key, power in SQUARES.items() if key in side})
            if name in peaks.get(block, {}):
                peaks[block][name] = peaks[block][name] * ratio**2
    step.stage(layer.anchor, units={**before, **step.units[layer.name]})
