"""One step in the making: all that it may change, beside the state, committed whole or not at all.

Staged are: what factors remember, operators, peaks of traces, positions, precision, units, the averages of gradients,
the moments of a fallback or graft, new buffers of momentum, the number of damping that adapts, and what was found of
the loss and of uses of weights. They are made from the committed state, so that a second attempt (a failed inverse that
is rescued, a gradient that somebody changed) begins where the first one did. Weights and the buffers of momentum on the
update are written after the decision, by ``update.write``, which has nothing left to decide and nothing to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mukron.curvature import Joint, local
from mukron.damping import Rule
from mukron.layers import WEIGHT
from mukron.linalg import Factor, FactorizationError, LowRank, at_least_rounding, prepare, products_of, rounding
from mukron.memory import Window
from mukron.optim import precision
from mukron.optim.again import measure_again
from mukron.optim.options import KLClip, Spectral
from mukron.optim.precision import EPS
from mukron.optim.table import LayerEntry, ParameterEntry
from mukron.optim.units import changes_units, convert
from mukron.optim.unseen import has_values
from mukron.optim.update import Move

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

Blocks = dict[str, dict[str, Factor]]
HALF_PRECISION = (torch.float16, torch.bfloat16)
SAME, SAME_IF_COARSE = 30, 8  # roundings, within which a gradient is D^T H; coarse: in TF32 or half precision
FAR_BEYOND_TRUST = 1e-4  # of a move's length, to which Spectral(1) shortens it: its curvature is negligible


class Transaction:
    """A step in the making.

    Attributes:
        statistics: What the passes brought, by layer.
        passes: What is used of each pass beside that.
        along: By layer, what its gradient by its own passes does to the probe, while uses of weights are checked.
        gradients: By parameter, those that are taken in place of ``grad``, where ranks have brought them together.
        moving: Layers that have a gradient.
        active: Those of them that this rank owns.
        ready, waiting: Those of them that can be preconditioned; whether one without curvature waits for the next step.
        gradient_sizes: The sums of the sizes of the entries of this rank's gradients, in the order of parameters.
        gain, nu: The sum of eta^2 s <move, gradient>, which ``KLClip`` bounds; what it multiplies all moves by.
        stale: Blocks whose operators were made by an earlier step.
        rates: Learning rates by parameter, of those that have a direction.
        double: Layers that are preconditioned in float64, since their damping is too small for float32.
        altered: Layers whose gradient is not D^T H of this batch: somebody changed it.
        offsets: By layer, what shows how far the gradient is from D^T H: their difference along v, both, D and H.
        applied_dense: Layers whose gradient was preconditioned as a matrix.
        factors: By layer and block, those of which this step makes operators, with their damping.
        traces: Of factors, by layer, block and factor.
        sizes, units: Of gradients that are squared, by layer and block; units where this step changes them.
        scratch: What a method keeps from ``measure`` to ``precondition``.
        shortenings: By layer and block, the factor that its trust multiplies the move by.
        shortened: Layers whose fresh curvature gave a move that far exceeds their trust.
        imprecise, remarks: Layers whose sums needed float64; what the user is told if the step counts.
        applied: Gradient, what was preconditioned, and the result before trust, by layer and block; None: not kept.
        rescue: Look at every inverse, and go to some lengths for it.
    """

    def __init__(self, optimizer: SecondOrder, joint: Joint) -> None:
        self.optimizer, exchange, statistics = optimizer, optimizer.exchange, joint.statistics
        self.statistics, self.passes = statistics, joint.passes
        self.along, self.gradients = joint.along, joint.gradients
        self.moving = [layer for layer in optimizer.layers.values() if has_gradient(layer, joint)]
        self.active = [layer for layer in self.moving if exchange is None or exchange.owns(layer.name)]
        self.ready, self.stale, self.waiting = list[LayerEntry](), set[tuple[str, str]](), False
        self.double, self.altered, self.applied_dense = set(optimizer.capture.double), set[str](), set[str]()
        self.offsets, self.traces = dict[str, tuple[Tensor, ...]](), dict[tuple[str, str, str], Tensor]()
        self.sizes, self.shortenings = dict[tuple[str, str], list[Tensor]](), dict[tuple[str, str], Tensor]()
        self.rates, self.units = dict[str, float](), dict[str, dict[str, float]]()
        self.scratch: dict[Any, Any] = {}
        self.applied: dict[tuple[str, str], tuple[Move, Move, Move]] | None = None
        self.rescue, self.operators_failed, self.gradient_sizes = False, False, list[float]()
        self.gain, self.nu = torch.zeros((), dtype=torch.float64, device=optimizer.generator.device), 1.0
        self.remarks, self.shortened, self.imprecise = list[str](), list[str](), list[str]()
        self.rescues: list[tuple[str, str, str]] = []  # layer, factor, how
        self.found_reduction, capture = optimizer.found_reduction, optimizer.capture
        self.asks_reduction, self.checks_uses = capture.asks_reduction, capture.checks_uses
        self.factors: dict[tuple[str, str], tuple[Mapping[str, Factor], dict[str, Tensor]]] = {}
        self._inverted, self._conditions = list[Tensor](), dict[str, dict[str, Tensor]]()  # finite if all came out well
        self._staged: dict[Parameter, dict[str, Any]] = {}
        self._staged_of_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def gradient(self, entry: ParameterEntry) -> Tensor | None:
        """A parameter's gradient, of the joined batch of all ranks; None: it has none, or it is D^T H."""
        return self.gradients.get(entry.name, entry.parameter.grad)

    # State.

    def state_of(self, parameter: Parameter) -> dict[str, Any]:
        """The committed state of a parameter."""
        state: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return state

    def stage(self, parameter: Parameter, **values: Any) -> None:
        self._staged.setdefault(parameter, {}).update(values)

    def staged(self, parameter: Parameter, name: str) -> Any:
        """A value of a parameter's state as this step leaves it."""
        return self._staged.get(parameter, {}).get(name, self.state_of(parameter).get(name))

    def stage_of_group(self, group: dict[str, Any], **values: Any) -> None:
        self._staged_of_groups.append((group, values))

    def value(self, layer: LayerEntry, name: str) -> Any:
        """What this step uses of a layer's state, "operators" or "positions": what it staged, or the last one."""
        return self.staged(layer.anchor, name)

    def commit(self) -> None:
        """Write what was staged into the state."""
        self.optimizer.found_reduction, capture = self.found_reduction, self.optimizer.capture
        capture.asks_reduction, capture.checks_uses = self.asks_reduction, self.checks_uses
        found = [one.class_dim for one in self.passes if one.class_dim is not None]
        self.optimizer.found_class_dim = capture.class_dim = found[0] if found else capture.class_dim
        for parameter, values in self._staged.items():
            self.optimizer.state[parameter].update(values)
        for group, values in self._staged_of_groups:
            group.update(values)

    # Capture -> factors -> memory -> damping.

    def measure(self) -> None:
        """This batch's factors of all layers for which this step wants fresh ones, and their damping."""
        optimizer = self.optimizer
        due, inverting = measures(optimizer), is_due(optimizer, optimizer.options.inverse_every)
        self._staged, self.factors, self.traces, self._conditions, self.sizes, self.rescues = {}, {}, {}, {}, {}, []
        for layer in self.active:
            self._measure_layer(layer, due, inverting)
        self.ready = [layer for layer in self.active if is_ready(self, layer, due)]
        self.waiting = len(self.ready) < len(self.active)
        used = self.ready if optimizer.steps >= optimizer.options.start else []
        self.stale = {
            (layer.name, block) for layer in used for block in self.value(layer, "operators")
        } - self.factors.keys()

    def _measure_layer(self, layer: LayerEntry, due: bool, inverting: bool) -> None:
        optimizer, memory, statistics = self.optimizer, self.optimizer.options.memory, self.statistics.get(layer.name)
        state = self.state_of(layer.anchor)
        new = "operators" not in state
        if not due and not (new and optimizer.capture.due and statistics is not None and statistics.measured):
            return  # a layer that was not there at the last refresh is measured in the next step
        if statistics is None and optimizer.method.damped and not has_values(self, layer):
            return  # a gradient of zeros, for a layer that did not run
        kept, peaks = copied(state.get("memory", {})), copied(state.get("peaks", {}))
        if layer.name in self.units:
            convert(self, layer, kept, peaks)
        with products_of(True) if layer.layer.tf32 else nullcontext():
            blocks = optimizer.measure(layer, statistics, self)
            for block, batch in blocks.items():
                factors = batch
                if memory.keeps or any(factor.tracked for factor in batch.values()):
                    of_block = kept.setdefault(block, {})
                    factors = {name: memory.update(of_block.setdefault(name, {}), X) for name, X in batch.items()}
                traces = {name: factor.trace() for name, factor in factors.items()}
                self.traces.update({(layer.name, block, name): trace for name, trace in traces.items()})
                highest = peaks.setdefault(block, {})
                for name, trace in traces.items():
                    highest[name] = torch.maximum(highest[name].to(trace.dtype), trace) if name in highest else trace
                stale = block not in state.get("operators", {}) or block in self.units.get(layer.name, {})
                if factors and (stale or inverting):
                    sides = replace(layer.sides.get(block, layer.sides[WEIGHT]), peaks=highest)
                    entry = layer.blocks.get(block) or next(iter(layer.blocks.values()))
                    try:
                        rho = Rule.of_group(entry.group)(factors, sides)
                    except FactorizationError:  # of the largest eigenvalue: there will be no inverse either
                        rho = {name: torch.full_like(trace, torch.nan) for name, trace in traces.items()}
                    self.factors[layer.name, block] = factors, rho
        values = {"memory": kept, "peaks": peaks, "operators": dict(state.get("operators", {}))}
        if statistics is not None and statistics.positions is not None:
            values |= {"rows": statistics.rows, "positions": statistics.positions * statistics.weight}  # A of ones
        self.stage(layer.anchor, **values)

    # Factors and damping -> operators.

    def prepare(self) -> None:
        """Operators of all blocks that want new ones; those that all ranks make are made by themselves.

        Inverses that are made at once may round in another way than one alone, and ranks have other layers beside.
        """
        self.operators_failed, self._inverted, exchange = False, [], self.optimizer.exchange
        everywhere = [place for place in self.factors if exchange is not None and exchange.everywhere(place[0])]
        for wanted in (everywhere, [place for place in self.factors if place not in everywhere]):
            if wanted:
                self._prepare(wanted)

    def _prepare(self, wanted: Sequence[tuple[str, str]]) -> None:
        optimizer, blocks = self.optimizer, [self.factors[place] for place in wanted]
        damping, conditions = at_least_rounding(blocks)
        damped = [(factors, rho) for (factors, _), rho in zip(blocks, damping, strict=True)]
        powers = [optimizer.powers[len(factors)] for factors, _ in damped]
        prepared, inverted = prepare(damped, powers, optimizer.options.solver, self.rescue)
        self._inverted += inverted
        for (name, block), result, condition in zip(wanted, prepared, conditions, strict=True):
            staged = self._staged[optimizer.layers[name].anchor]["operators"]
            if not isinstance(result, FactorizationError):
                staged[block] = result[0]
                self.rescues += [(name, factor, how) for factor, how in result[1].items()]
                bounds = {factor: kappa if kappa.numel() == 1 else kappa.amax() for factor, kappa in condition.items()}
                self._conditions.setdefault(name, {}).update(bounds)
            elif not self.rescue:
                self.operators_failed = True
            elif block in staged:
                self.rescues.append((name, "", "kept the last inverse"))
                self.stale.add((name, block))
            else:
                raise RuntimeError(f'layer "{name}": {result}; raise the damping') from result

    # The decision.

    def decide(self, moves: Mapping[str, Move], gain: float | None = None) -> bool | None:
        """Read all numbers at once: the step counts (True), is skipped (False), or must be tried again (None).

        gain: that of the moves of all ranks; None: this one's own.
        """
        optimizer, trust = self.optimizer, self.optimizer.options.trust
        grads = [entry.parameter.grad for entry in optimizer.entries.values() if entry.parameter.grad is not None]
        grads = grads if optimizer.exchange is None else [local(grad) for grad in grads]
        products = [part for of_layer in self.offsets.values() for part in of_layer]
        parts = {name: (move.D, move.H) if isinstance(move, LowRank) else (move,) for name, move in moves.items()}
        groups = [
            norms([grad.coalesce().values() if grad.is_sparse else grad for grad in grads]),
            list(self.traces.values()),
            [size for sizes in self.sizes.values() for size in sizes],
            self._inverted,
            norms([*products, *(part for of_move in parts.values() for part in of_move)]),
            [kappa for of_layer in self._conditions.values() for kappa in of_layer.values()],
            list(self.shortenings.values()),
            [] if optimizer.exchange is None else norms(grads, order=1),
            [self.gain] if isinstance(trust, KLClip) else [],
        ]
        gradients, traces, sizes, inverted, lengths, bounds, shortenings, self.gradient_sizes, gains = read(groups)
        if isinstance(trust, KLClip):
            self.nu = trust.factor(gains[0] if gain is None else gain)
        if not all(map(math.isfinite, gradients)):
            return False
        if self.sizes and changes_units(self, sizes, traces):
            measure_again(self)
            return None
        if not all(map(math.isfinite, traces)):
            return False
        if self.operators_failed or not all(map(math.isfinite, inverted)):
            self.rescue = True
            measure_again(self)
            return None
        altered = _altered(self, lengths[: len(products)])
        ill = _ill_conditioned(self, bounds)
        self.offsets, self.applied_dense = {}, set()
        if ill:
            measure_again(self, ill)
        if altered or ill:
            return None
        self.shortened = far_beyond_trust(self, shortenings)
        return fits(self, parts, lengths[len(products) :])


def _altered(step: Transaction, lengths: list[float]) -> bool:
    """Whether gradients turned out not to be D^T H, within rounding: that of |D| |H|, which may have cancelled."""
    before, values = len(step.altered), iter(lengths)
    for name in step.offsets:
        missing, actual, ours, d, h = (next(values) for _ in range(5))
        part = missing / actual if actual > 0 else 0.0
        off = part * ours / (d * h) if d * h > 0 else part
        layer, weight = step.optimizer.layers[name].layer, step.optimizer.layers[name].anchor
        product = rounding(weight.dtype, weight.device, layer.tf32) if weight.is_cuda else torch.finfo(weight.dtype).eps
        coarse = max(step.statistics[name].rounding, product)
        if not off < (SAME * coarse if coarse < 1e-6 else SAME_IF_COARSE * coarse):
            step.altered.add(name)
    return len(step.altered) > before


def _ill_conditioned(step: Transaction, bounds: list[float]) -> frozenset[str]:
    """Layers to be preconditioned in float64 that were not; the state remembers it for the steps to come."""
    values, ill = iter(bounds), set()
    for name, of_layer in step._conditions.items():
        layer, kappas = step.optimizer.layers[name], [next(values) for _ in of_layer]
        if layer.anchor.dtype != torch.float64 and step.optimizer.inverts:
            dense = step.optimizer.options.inverse_every > 1 or name in step.applied_dense
            limit = precision.ILL_CONDITIONED_DENSE if dense else precision.ILL_CONDITIONED
            limit = precision.ILL_CONDITIONED_WINDOW if isinstance(step.optimizer.options.memory, Window) else limit
            if EPS * max(kappas) > limit or (dense and EPS * math.prod(kappas) > precision.ILL_CONDITIONED_PRODUCT):
                ill.add(name)
            step.stage(layer.anchor, double=name in ill)
    return frozenset(ill - step.double)


def is_ready(step: Transaction, layer: LayerEntry, due: bool) -> bool:
    """Whether there are operators for a layer: made by this step if it makes any, else of an earlier one."""
    known = step.value(layer, "operators") is not None
    return "operators" in step._staged.get(layer.anchor, {}) if due else known


def fits(step: Transaction, parts: Mapping[str, tuple[Tensor, ...]], lengths: Sequence[float]) -> bool:
    """Whether every parameter can move so far: lengths times learning rates are numbers that it can hold.

    What the end of the step would refuse is refused here, where nothing is changed yet.
    """
    values = iter(lengths)
    for name, of_move in parts.items():
        entry = step.optimizer.entries[name]
        group, weight, layer = entry.group, entry.parameter, entry.layer
        for setting in ("weight_decay", "momentum"):
            if not isinstance(group[setting], (int, float, Tensor)):
                raise TypeError(f"{setting} must be a number, got {group[setting]!r:.80}")
        shape = (weight if entry.preconditioned or step.optimizer.exchange is None else local(weight)).shape
        if len(of_move) == 1 and of_move[0].shape != shape:
            raise RuntimeError(f'"{name}" has shape {list(shape)}, but its move has {list(of_move[0].shape)}')
        length = math.prod([next(values) for _ in of_move]) * (step.nu if entry.preconditioned else 1.0)
        if not length * step.rates[name] <= torch.finfo(weight.dtype).max:
            return False
        rows = of_move[0].shape[-2] if len(of_move) == 2 else 1  # |D| |H| is more than |D^T H|
        far = length * FAR_BEYOND_TRUST > entry.natural * rows**0.5 and (layer, WEIGHT) in step.factors
        if far and layer not in step.shortened and step.optimizer.options.trust is not None:
            step.shortened.append(layer)  # with KLClip; a bound on each layer leaves none
    return True


def far_beyond_trust(step: Transaction, shortenings: Sequence[float]) -> list[str]:
    """Layers that fresh inverses would move by more than 1 / FAR_BEYOND_TRUST times (d_out / d_in)^1/2."""
    trust, values, fresh = step.optimizer.options.trust, iter(shortenings), {name for name, _ in step.factors}
    limit = FAR_BEYOND_TRUST * (min(trust.size, 1.0) if isinstance(trust, Spectral) else 1.0)
    least = [(name, min(islice(values, factor.numel()))) for (name, _), factor in step.shortenings.items()]
    return [*dict.fromkeys(name for name, factor in least if factor < limit and name in fresh)]


def has_gradient(layer: LayerEntry, joint: Joint) -> bool:
    """Whether the step moves a layer."""
    for entry in layer.blocks.values():
        if entry.name in joint.moving if joint.moving is not None else entry.parameter.grad is not None:
            return True
    statistics = joint.statistics.get(layer.name)
    return statistics is not None and statistics.unformed is not None


def measures(optimizer: SecondOrder) -> bool:
    """Whether the coming step measures factors: at their interval, and at each of the first steps."""
    return is_due(optimizer, optimizer.options.factor_every)


def is_due(optimizer: SecondOrder, every: int) -> bool:
    """Whether the coming step is one of the first, or falls on an interval that is counted from ``start``."""
    options, step = optimizer.options, optimizer.steps
    return step < max(options.refresh_warmup, 1) or (step - options.start) % every == 0


def wants(optimizer: SecondOrder) -> tuple[bool, frozenset[str]]:
    """Whether the coming step wants fresh factors, and layers in float64."""
    double = set()
    for name, layer in optimizer.layers.items() if optimizer.inverts else ():
        state = optimizer.state.get(layer.anchor, {})
        if state["double"] if "double" in state else precision.ill_conditioned(optimizer, layer):
            double.add(name)
    return optimizer.waiting or measures(optimizer), frozenset(double)


def norms(tensors: Sequence[Tensor], order: int = 2) -> list[Tensor]:
    """Of each, in float32 at least: a half-precision norm overflows where its entries do not."""
    precise = [tensor.float() if tensor.dtype in HALF_PRECISION else tensor for tensor in tensors]
    result = list(precise)
    for dtype in {tensor.dtype for tensor in precise}:
        places = [place for place, tensor in enumerate(precise) if tensor.dtype == dtype]
        for place, norm in zip(places, torch._foreach_norm([precise[place] for place in places], order), strict=True):
            result[place] = norm
    return result


def read(groups: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """The numbers of each group, with one look at the device."""
    alike: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for number in (number for group in groups for number in group):
        alike.setdefault((number.dtype, number.ndim), []).append(number)
    if not alike:
        return [[] for _ in groups]
    parts = [torch.cat(same) if ndim else torch.stack(same) for (_, ndim), same in alike.items()]
    if len({part.dtype for part in parts}) > 1:
        parts = [part.double() for part in parts]
    values = iter(torch.cat(parts).tolist())
    of = {kind: iter([*islice(values, len(part))]) for kind, part in zip(alike, parts, strict=True)}
    return [[value for n in group for value in islice(of[n.dtype, n.ndim], n.numel())] for group in groups]


def copied(value: Any) -> Any:
    """Dictionaries all the way down, with the same tensors in them."""
    return {key: copied(part) for key, part in value.items()} if isinstance(value, dict) else value
