"""One step in the making: all that it may change, beside the state, committed whole or not at all.

Staged are: what factors remember, operators, peaks of traces, positions, precision, the averages of gradients, and the
moments of a fallback or graft. They are read from the committed state, so that a second attempt (a failed inverse that
is rescued, a gradient that somebody changed) begins where the first one did. Weights and the buffers of momentum on the
update are written after the decision, by ``update.write``, which has nothing left to decide.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mukron.curvature import LayerStatistics
from mukron.layers import WEIGHT
from mukron.linalg import Factor, FactorizationError, LowRank, SampleSpace, products_of, rounding
from mukron.optim.direction import (
    at_least_rounding,
    block_gradient,
    dense,
    plain_gradient,
    prepare,
    whole_gradient,
)
from mukron.optim.guards import norms, read
from mukron.optim.table import LayerEntry
from mukron.optim.update import Move

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

Blocks = dict[str, dict[str, Factor]]
SAME, SAME_IF_COARSE = 30, 8  # roundings, within which a gradient is D^T H; coarse: in TF32 or half precision
SQUARES = {"M": 2, "m": 2, "S": 2, "D": 2, "Z": 1}  # kept statistics, by the power of the gradient that they are
LEAST, MOST = 1e-18, 1e8  # a trace and a gradient beyond these are measured in another unit
ILL_CONDITIONED = 0.005  # rounding times condition number, from which on a layer is preconditioned in float64
ILL_CONDITIONED_PRODUCT = 5.0  # the same, of both sides' condition numbers, for rows applied to a dense gradient


class Transaction:
    """A step in the making.

    Attributes:
        statistics: What the passes brought, by layer.
        active: Layers that have a gradient.
        ready: Those of them that can be preconditioned; a layer without curvature yet waits for the next step.
        uses_products: Gradients may be taken as D^T H.
        double: Layers that are preconditioned in float64, since their damping is too small for float32.
        altered: Layers whose gradient is not D^T H of this batch: somebody changed it.
        offsets: By layer, how far the gradient is from D^T H.
        applied_dense: Layers whose gradient was preconditioned as a matrix.
    """

    def __init__(self, optimizer: SecondOrder, statistics: dict[str, LayerStatistics]) -> None:
        self.optimizer, self.statistics = optimizer, statistics
        self.active = [layer for layer in optimizer.layers.values() if self._has_gradient(layer)]
        self.ready: list[LayerEntry] = []
        self.uses_products = optimizer.uses_products
        self.double = set(optimizer.capture.double)
        self.altered: set[str] = set()
        self.offsets: dict[str, Tensor] = {}
        self.applied_dense: set[str] = set()
        self.rescues: list[tuple[str, str, str]] = []  # layer, factor, how
        self.imprecise: list[str] = []  # layers whose factors were summed in float32 though float64 was needed
        self.rescue = False  # look at every inverse, and go to some lengths for it
        self.operators_failed = False
        self._factors: dict[tuple[str, str], tuple[Mapping[str, Factor], dict[str, Tensor]]] = {}
        self._traces: dict[tuple[str, str, str], Tensor] = {}  # by layer, block and factor
        self._sizes: dict[tuple[str, str], list[Tensor]] = {}  # of squared gradients, by layer and block
        self._units: dict[str, dict[str, float]] = {}  # by layer, those that this step changes
        self._numbers: list[Tensor] = []  # finite if inverses came out well
        self._conditions: dict[str, dict[str, Tensor]] = {}
        self._staged: dict[Parameter, dict[str, Any]] = {}

    # State.

    def state_of(self, parameter: Parameter) -> dict[str, Any]:
        """The committed state of a parameter."""
        state: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return state

    def stage(self, parameter: Parameter, **values: Any) -> None:
        self._staged.setdefault(parameter, {}).update(values)

    def value(self, layer: LayerEntry, name: str) -> Any:
        """What this step uses of a layer's state, "operators" or "positions": what it staged, or the last one."""
        staged = self._staged.get(layer.anchor, {})
        return staged[name] if name in staged else self.state_of(layer.anchor)[name]

    def unit(self, layer: LayerEntry, block: str) -> float:
        """What a block's gradient is divided by before it is squared, where its squares would underflow or overflow."""
        units: dict[str, float] = self._units.get(layer.name) or self.state_of(layer.anchor).get("units", {})
        return units.get(block, 1.0)

    def squared_gradients(self, layer: LayerEntry) -> dict[str, Move]:
        """The gradients of a layer by block, each divided by its unit, for methods that square them."""
        scaled = {}
        for block, G in self.gradients(layer).items():
            self._sizes[layer.name, block] = list(torch._foreach_norm(tensors_of(G), math.inf))
            scaled[block] = times(G, 1 / self.unit(layer, block))
        return scaled

    def commit(self) -> None:
        for parameter, values in self._staged.items():
            self.optimizer.state[parameter].update(values)
        for (name, block), (factors, rho) in self._factors.items():
            for watcher in self.optimizer.watchers:
                watcher(name, block, factors, rho)
        for name, factor, how in self.rescues:
            self.optimizer.count_rescue(name, factor, how)
        for name in self.imprecise:
            warnings.warn(
                f'layer "{name}": its damping is so small beside its factors that float32 sums of them may put this '
                "step off by more than 1 percent; raise the damping (later steps sum in float64)",
                RuntimeWarning,
                stacklevel=5,
            )

    # Capture -> factors -> memory -> damping.

    def _has_gradient(self, layer: LayerEntry) -> bool:
        for entry in layer.blocks.values():
            if entry.parameter.grad is not None:
                return True
        statistics = self.statistics.get(layer.name)
        return statistics is not None and statistics.gradient(fused=True) is not None

    def measure(self) -> None:
        """This batch's factors of all layers for which this step wants fresh ones, and their damping."""
        optimizer = self.optimizer
        due = optimizer.steps % optimizer.options.factor_every == 0
        self._staged, self._factors, self._traces, self._conditions = {}, {}, {}, {}
        self._sizes, self.rescues = {}, []
        for layer in self.active:
            statistics = self.statistics.get(layer.name)
            new = "operators" not in self.state_of(layer.anchor)
            heard = statistics is not None and statistics.samples > 0
            if not due and not (heard and new and optimizer.capture.due):
                continue  # a layer that was not there at the last refresh is listened to next time
            if not statistics and not self._moves(layer):
                continue  # a gradient of zeros, for a layer that did not run
            with products_of(layer.layer.tf32):
                blocks = optimizer.measure(layer, statistics, self)
                self._remember(layer, statistics, blocks, new)
        self.ready = [layer for layer in self.active if self._is_ready(layer, due)]

    def gradients(self, layer: LayerEntry) -> dict[str, Move]:
        """The gradients of a layer by block, for methods that measure those."""
        whole = {block: whole_gradient(self, layer, block, entry) for block, entry in layer.blocks.items()}
        return {block: G for block, G in whole.items() if G is not None}

    def _moves(self, layer: LayerEntry) -> bool:
        grads = [entry for entry in layer.blocks.values() if entry.parameter.grad is not None]
        return any(bool(plain_gradient(entry).any()) for entry in grads)

    def _is_ready(self, layer: LayerEntry, due: bool) -> bool:
        measured = "operators" in self._staged.get(layer.anchor, {})
        return measured if due else measured or "operators" in self.state_of(layer.anchor)

    def _remember(self, layer: LayerEntry, statistics: LayerStatistics | None, blocks: Blocks, new: bool) -> None:
        optimizer, memory = self.optimizer, self.optimizer.options.memory
        state = self.state_of(layer.anchor)
        kept, peaks = copied(state.get("memory", {})), copied(state.get("peaks", {}))
        if layer.name in self._units:
            self._convert(layer, kept, peaks)
        refreshes = new or optimizer.steps % optimizer.options.inverse_every == 0
        for block, measured in blocks.items():
            factors: Mapping[str, Factor] = measured
            if memory.keeps or any(factor.tracked for factor in measured.values()):
                of_block = kept.setdefault(block, {})
                factors = {name: memory.update(of_block.setdefault(name, {}), X) for name, X in measured.items()}
            highest = peaks.setdefault(block, {})
            traces = [factor.trace() for factor in factors.values()]
            self._traces.update({(layer.name, block, name): X for name, X in zip(factors, traces, strict=True)})
            known = [highest.get(name, trace).to(trace.dtype) for name, trace in zip(factors, traces, strict=True)]
            highest.update(zip(factors, torch._foreach_maximum(known, traces), strict=True))
            if refreshes:
                sides = replace(layer.sides.get(block, layer.sides[WEIGHT]), peaks=highest)
                self._factors[layer.name, block] = factors, self._damping(layer, block, factors, sides)
        positions = {} if statistics is None else {"positions": statistics.positions}
        operators = dict(state.get("operators", {}))
        self.stage(layer.anchor, memory=kept, peaks=peaks, operators=operators, **positions)

    def _convert(self, layer: LayerEntry, kept: dict[str, Any], peaks: dict[str, Any]) -> None:
        """Statistics that were kept in other units of the gradient, in the new ones."""
        before = self.state_of(layer.anchor).get("units", {})
        for block, unit in self._units[layer.name].items():
            ratio = before.get(block, 1.0) / unit
            for name, side in kept.get(block, {}).items():
                side.update({key: side[key] * ratio**power for key, power in SQUARES.items() if key in side})
                if name in peaks.get(block, {}):
                    peaks[block][name] = peaks[block][name] * ratio**2
        self.stage(layer.anchor, units={**before, **self._units[layer.name]})

    def _damping(self, layer: LayerEntry, block: str, factors: Mapping[str, Factor], sides: Any) -> dict[str, Tensor]:
        try:
            return self.optimizer.rule_of(layer, block)(factors, sides)
        except FactorizationError:  # of the largest eigenvalue: the step will find no inverse either
            return {name: torch.full_like(factor.trace(), torch.nan) for name, factor in factors.items()}

    # Factors and damping -> operators.

    def prepare(self) -> None:
        """Operators of all blocks that want new ones."""
        optimizer, exchange = self.optimizer, self.optimizer.exchange
        self.operators_failed = False
        wanted = [key for key in self._factors if exchange is None or exchange.owns(key[0])]
        blocks = [self._factors[key] for key in wanted]
        damping, conditions = at_least_rounding(blocks)
        damped = [(factors, rho) for (factors, _), rho in zip(blocks, damping, strict=True)]
        powers = [optimizer.powers(block) for _, block in wanted]
        prepared, self._numbers = prepare(damped, powers, optimizer.options.solver, self.rescue)
        for (name, block), result, condition in zip(wanted, prepared, conditions, strict=True):
            staged = self._staged[optimizer.layers[name].anchor]["operators"]
            if not isinstance(result, FactorizationError):
                staged[block] = optimizer.finish(self._factors[name, block][0], result[0])
                self.rescues += [(name, factor, how) for factor, how in result[1].items()]
                bounds = {factor: kappa if kappa.numel() == 1 else kappa.amax() for factor, kappa in condition.items()}
                self._conditions.setdefault(name, {}).update(bounds)
            elif not self.rescue:
                self.operators_failed = True
            elif block in staged:
                self.rescues.append((name, "", "kept the last inverse"))
            else:
                raise RuntimeError(f'layer "{name}": {result}; raise the damping') from result
        if exchange is not None:
            for name, shared in exchange.share({name: self._operators_of(name) for name, _ in self._factors}).items():
                self._staged[optimizer.layers[name].anchor]["operators"].update(shared)

    def with_statistics(self, layer: LayerEntry, statistics: LayerStatistics) -> Tensor:
        """The direction that a layer's weight would have with other statistics; nothing of this step is changed."""
        other = Transaction(self.optimizer, {layer.name: statistics})
        other.active, other.double, other.altered, other.rescue = [layer], set(self.double), set(self.altered), True
        other.measure()
        other.prepare()
        return other.direction(layer)

    def direction(self, layer: LayerEntry) -> Tensor:
        entry = layer.blocks[WEIGHT]
        raw = whole_gradient(self, layer, WEIGHT, entry)
        assert raw is not None
        G = block_gradient(self, layer, WEIGHT, entry, raw)
        return dense(self.optimizer.precondition(layer, WEIGHT, G, self))

    def _operators_of(self, name: str) -> dict[str, Any]:
        return dict(self._staged[self.optimizer.layers[name].anchor]["operators"])

    # The decision.

    def decide(self, moves: Mapping[str, Move]) -> bool | None:
        """Read all numbers at once: the step counts (True), is skipped (False), or must be tried again (None)."""
        optimizer = self.optimizer
        grads = [entry.parameter.grad for entry in optimizer.entries.values() if entry.parameter.grad is not None]
        lengths = norms([grad.coalesce().values() if grad.is_sparse else grad for grad in grads])
        parts = [tensors_of(move) for move in moves.values()]
        conditions = [kappa for of_layer in self._conditions.values() for kappa in of_layer.values()]
        numbers = read(
            [
                lengths,
                list(self._traces.values()),
                [size for sizes in self._sizes.values() for size in sizes],
                self._numbers,
                norms([part for of_move in parts for part in of_move]),
                list(self.offsets.values()),
                conditions,
            ]
        )
        if optimizer.exchange is not None:
            numbers = [optimizer.exchange.agree(group) for group in numbers]
        gradients, traces, sizes, inverted, directions, offsets, bounds = numbers
        if not all(map(math.isfinite, gradients)):
            return False
        if self._sizes and self._changes_units(sizes, traces):
            self._measure_again(frozenset())
            return None
        if not all(map(math.isfinite, traces)):
            return False
        if self.operators_failed or not all(map(math.isfinite, inverted)):
            if self.rescue:
                return False
            self.rescue = True
            self._measure_again(frozenset())
            return None
        altered = self._altered(offsets)
        ill = self._ill_conditioned(bounds)
        self.offsets, self.applied_dense = {}, set()
        if ill:
            self._measure_again(ill)
            return None
        return None if altered else self._fits(moves, directions)

    def _fits(self, moves: Mapping[str, Move], lengths: list[float]) -> bool:
        """Whether every parameter can move so far: lengths times learning rates are numbers that it can hold."""
        values = iter(lengths)
        for name, move in moves.items():
            length = math.prod([next(values) for _ in tensors_of(move)]) * self.optimizer.rate(name)
            if not length <= torch.finfo(self.optimizer.entries[name].parameter.dtype).max:
                return False
        return True

    def _changes_units(self, sizes: list[float], traces: list[float]) -> bool:
        """Choose units for gradients whose squares underflow or overflow; whether there were any."""
        trace_of = dict(zip(((layer, block) for layer, block, _ in self._per_group()), traces, strict=True))
        values, changed = iter(sizes), False
        for (name, block), parts in self._sizes.items():
            layer, length = self.optimizer.layers[name], math.prod([next(values) for _ in parts])
            if not 0 < length < math.inf or (name, block) not in trace_of:
                continue
            unit = self.unit(layer, block)
            if LEAST < trace_of[name, block] < math.inf and length < MOST * unit:
                continue
            new = 16.0 ** round(math.log(length, 16))
            if new != unit and self.optimizer.rule_of(layer, block).relative:
                self._units.setdefault(name, {})[block] = new
                changed = True
        return changed

    def _per_group(self) -> list[tuple[str, str, str]]:
        return [key for key, trace in self._traces.items() for _ in range(trace.numel())]

    def _measure_again(self, ill: frozenset[str]) -> None:
        """Set up the next attempt: with a look at each inverse, or with layers in float64 whose damping is small."""
        for name in ill:
            statistics = self.statistics.get(name)
            if statistics is not None:
                if any(X is not None and getattr(X, "matrix", None) is not None for X in (statistics.A, statistics.B)):
                    self.imprecise.append(name)
                self.statistics[name] = statistics.double()
        self.double |= ill
        self.measure()
        self.prepare()

    def _altered(self, offsets: list[float]) -> bool:
        """Whether gradients turned out not to be D^T H, within the rounding of the products they are made of."""
        before = len(self.altered)
        for name, off in zip(self.offsets, offsets, strict=True):
            layer, statistics = self.optimizer.layers[name], self.statistics[name]
            coarse = max(statistics.rounding, rounding(layer.anchor.dtype, layer.anchor.device, layer.layer.tf32))
            if not off < (SAME * coarse if coarse < 1e-6 else SAME_IF_COARSE * coarse):
                self.altered.add(name)
        return len(self.altered) > before

    def _ill_conditioned(self, bounds: list[float]) -> frozenset[str]:
        """Layers to be preconditioned in float64 that were not; the state remembers it for the steps to come."""
        values, ill = iter(bounds), set()
        for name, of_layer in self._conditions.items():
            layer, kappas = self.optimizer.layers[name], [next(values) for _ in of_layer]
            if layer.anchor.dtype != torch.float64 and self.optimizer.inverts:
                eps = torch.finfo(torch.float32).eps
                dense = self.optimizer.options.inverse_every > 1 or name in self.applied_dense
                both = math.prod(kappas) if dense and self._in_sample_space(layer) else 0.0
                if eps * max(kappas) > ILL_CONDITIONED or eps * both > ILL_CONDITIONED_PRODUCT:
                    ill.add(name)
                self.stage(layer.anchor, double=name in ill)
        return frozenset(ill - self.double)

    def _in_sample_space(self, layer: LayerEntry) -> bool:
        operators = self.value(layer, "operators").values()
        return any(isinstance(operator, SampleSpace) for block in operators for operator in block.values())


def ill_conditioned(optimizer: SecondOrder, layer: LayerEntry) -> bool:
    """Whether the damping rule alone says that a layer's first step needs float64."""
    rule, growth = optimizer.rule_of(layer, WEIGHT), layer.sides[WEIGHT].growth
    sizes = {"A": layer.layer.d_in, "B": layer.layer.d_out}
    bounds = [
        rule.condition(sizes[name], growth.get(name, 1.0))
        for name in optimizer.powers(WEIGHT)
        if name in sizes and not (name == "A" and layer.layer.one_hot)
    ]
    kappas = [bound for bound in bounds if bound is not None]
    return torch.finfo(torch.float32).eps * max(kappas, default=0.0) > ILL_CONDITIONED


def times(G: Move, factor: float) -> Move:
    if factor == 1:
        return G
    return LowRank(G.D * factor, G.H) if isinstance(G, LowRank) else G * factor


def tensors_of(move: Move) -> tuple[Tensor, ...]:
    return (move,) if isinstance(move, Tensor) else (move.D, move.H)


def copied(value: Any) -> Any:
    """Dictionaries all the way down, with the same tensors in them."""
    return {key: copied(part) for key, part in value.items()} if isinstance(value, dict) else value
