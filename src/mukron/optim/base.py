"""The one step that all methods share.

Read downwards:  capture -> factors -> damping -> prepare -> apply -> clip and graft -> momentum and decay -> write.

A method says which factors it measures (``measure``) and, where that is not the plain product of both sides, how they
are applied (``precondition``). Everything else is here.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from mukron.curvature import Batch, Capture, Gathered, Halves, Listening, Memory, as_precise, probe
from mukron.damping import Rule
from mukron.linalg import Factor, FactorizationError, LowRank, Operator
from mukron.optim.fallback import FALLBACKS, adam_direction
from mukron.optim.numbers import all_finite, norms, proportion
from mukron.optim.slots import BIAS, WEIGHT, Slot, find_slots
from mukron.params import Parametrization
from mukron.params.inventory import inventory, unwrap
from mukron.precond import Layer, Preparation, Prepared, apply, prepare
from mukron.stages import stage
from mukron.table import Table
from mukron.theory import Method

if TYPE_CHECKING:
    from mukron.optim.spec import MethodSpec

SUSPICIOUS = 0.05  # of a gradient that does not come from its layer's own pass
FORMAT = 2  # of saved states
PATIENCE = 10  # skipped steps in a row before the user is told
TIED_TO_THE_MODEL = (
    "_capture",
    "_group_of",
    "_slot_of",
    "slots",
    "others",
    "_names",
    "_scale",
    "generator",
    "_gathered",
    "_operators",
    "_watchers",
)
Blocks = dict[str, dict[str, Factor]]
Watcher = Callable[[str, str, Mapping[str, Factor], Mapping[str, Tensor]], None]
Move = Tensor | LowRank


@dataclass(frozen=True)
class Settings:
    """What is the same for all parameter groups."""

    memory: Memory = field(default_factory=Batch)
    factor_every: int = 1
    inverse_every: int = 1
    solver: str = "cholesky"
    kl_clip: float | None = None
    graft: str | None = None
    fallback: str = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    exclude: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("factor_every", "inverse_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} counts steps: at least 1, got {getattr(self, name)}")
        if self.inverse_every % self.factor_every:
            raise ValueError(
                f"inverse_every={self.inverse_every} must be a multiple of factor_every={self.factor_every}: an "
                "inverse is made when its factors are fresh"
            )
        if self.fallback not in FALLBACKS:
            raise ValueError(f"unknown fallback {self.fallback!r}; known: {', '.join(FALLBACKS)}")
        if self.graft not in (None, "sgd", "adam"):
            raise ValueError(f"unknown graft {self.graft!r}; known: 'sgd', 'adam'")
        if self.kl_clip is not None and not self.kl_clip > 0:
            raise ValueError(f"kl_clip must be positive, got {self.kl_clip}")


@dataclass
class Staged:
    """What a step would change in the state of one layer."""

    slot: Slot
    state: dict[str, Any]
    inverting: dict[str, tuple[Mapping[str, Factor], dict[str, Tensor] | FactorizationError]] = field(
        default_factory=dict
    )  # by block: factors and their damping
    rungs: list[tuple[str, str]] = field(default_factory=list)  # by factor: what it took to invert it

    def take(self, block: str, found: Prepared | FactorizationError) -> None:
        """New operators of a block, or what it means that there are none."""
        operators = self.state["operators"]
        if not isinstance(found, FactorizationError):
            prepared, rungs = found
            operators[block] = {name: operator.state() for name, operator in prepared.items()}
            self.rungs += rungs.items()
        elif block in operators:
            self.rungs.append(("", "kept the last inverse"))
        else:
            raise RuntimeError(f'layer "{self.slot.name}": {found}; raise the damping') from found


class SecondOrder(Optimizer):
    """Base of K-FAC, FOOF, Shampoo and Gauss-Newton: a true ``torch.optim.Optimizer``."""

    spec: ClassVar[MethodSpec]  # of which ``register`` makes the two below
    method: ClassVar[Method]
    rule: ClassVar[type[Rule]]  # what a bare number means as damping

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor = 0.1,
        *,
        damping: float | Rule = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        maximize: bool = False,
        fallback_lr: float | None = None,
        params: Iterable[Any] | None = None,
        listening: Listening,
        settings: Settings,
    ) -> None:
        _check_model(model)
        self.model, self.listening, self.settings = model, listening, settings
        self.parametrization = None if parametrization is None else parametrization.bind(model)
        self.steps, self.skipped, self._skipped_in_a_row = 0, 0, 0
        self._gathered: dict[str, Gathered] = {}  # of the step that is being made
        self._watchers: list[Watcher] = []
        self.rungs: Counter[str] = Counter()  # "layer: rung of the ladder" -> how often
        self._ready = False
        self._capture: Capture | None = None
        defaults = {
            **{"lr": lr, "damping": damping, "momentum": momentum, "nesterov": nesterov},
            **{"weight_decay": weight_decay, "decoupled": decoupled, "maximize": maximize, "fallback_lr": fallback_lr},
        }
        super().__init__(list(model.parameters()) if params is None else params, defaults)
        device = self.param_groups[0]["params"][0].device
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        self._ready = True
        self._listen()
        if not self.slots:
            raise ValueError(
                "there is nothing to precondition: no Linear, Conv or Embedding layer among the parameters given"
                + (f" that is not in exclude={settings.exclude}" if settings.exclude else "")
            )
        self._warn_of_nngp()

    # What a method says for itself.

    def measure(self, slot: Slot, gathered: Gathered | None, gradients: Mapping[str, Tensor]) -> Blocks:
        """This batch's factors of a layer, by block and factor name."""
        raise NotImplementedError

    def precondition(self, slot: Slot, block: str, G: Move, operators: Mapping[str, Mapping[str, Operator]]) -> Move:
        return apply(operators[block], G)

    def prepare(self, layers: Sequence[Layer], rescue: bool = True) -> Preparation:
        """The operators of many layers at once."""
        powers = {factor.name: e for factor, e in self.method.factors}
        return prepare(layers, powers, self.settings.solver, rescue)

    # Groups, and the layers they own.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        damping = param_group.get("damping", self.defaults["damping"])
        rule = damping if isinstance(damping, Rule) else self.rule(float(damping))  # type: ignore[call-arg]
        param_group = {**param_group, "damping": rule.rho, "damping_rule": rule.plain()}
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])
        if self._ready:
            self._listen()

    def _listen(self) -> None:
        owned = {id(parameter): group for group in self.param_groups for parameter in group["params"]}
        self._group_of = owned
        found = find_slots(self.model, owned, self.settings.exclude, self.parametrization, self.method)
        self.slots = {slot.name: slot for slot in found}
        self._slot_of = {id(p): slot for slot in self.slots.values() for p in slot.parameters.values()}
        taken = set(self._slot_of)
        self.others = [p for group in self.param_groups for p in group["params"] if id(p) not in taken]
        self._names = {id(entry.parameter): name for name, entry in inventory(self.model).items()}
        plan, fallback, graft = self.parametrization, self.settings.fallback, self.settings.graft
        own = plan.scales(graft or self.method) if plan else {}
        theirs = plan.scales(fallback) if plan else {}
        self._scale = {
            key: (own if key in taken else theirs)[name].lr if plan and name in theirs else 1.0
            for key, name in self._names.items()
        }
        self._operators: dict[str, tuple[Mapping[str, Any], dict[str, dict[str, Operator]]]] = {}  # with their state
        if self._capture is not None:
            self._capture.close()
        layouts = {name: slot.layout for name, slot in self.slots.items()} if self.listening.anything else {}
        self._capture = Capture(unwrap(self.model), layouts, self.listening, self.generator)
        self.capture.due = self.steps % self.settings.factor_every == 0

    @property
    def capture(self) -> Capture:
        assert self._capture is not None
        return self._capture

    def close(self) -> None:
        """Take the hooks off the model. The optimizer can no longer step."""
        self.capture.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes in here are not listened to."""
        before, self.capture.paused = self.capture.paused, True
        try:
            yield
        finally:
            self.capture.paused = before

    def plan(self) -> Table:
        """What each layer costs, as its last refreshed step found it: factor sizes, form, memory, work of a step."""
        rows = []
        for slot in self.slots.values():
            stored = self.state[slot.anchor].get("operators", {}) if slot.anchor in self.state else {}
            sides = {name: Operator.from_state(state) for block in stored.values() for name, state in block.items()}
            forms = ", ".join(f"{name}: {operator.form}" for name, operator in sides.items())
            size = sum(operator.memory for operator in sides.values())
            work = sum(
                operator.work(slot.layout.d_out, slot.layout.d_in, name in ("A", "R"))
                for name, operator in sides.items()
            )
            factors = f"{slot.layout.d_out} x {slot.layout.d_in}"
            groups = "" if slot.layout.groups == 1 else f" ({slot.layout.groups} groups)"
            after = (
                (forms, f"{size / 2**20:.3g} MiB", f"{work / 1e6:.3g} M") if sides else ("after the first step", "", "")
            )
            rows.append((slot.name, factors + groups, *after))
        others = [name for key, name in self._names.items() if key in self._group_of and key not in self._slot_of]
        notes = [
            "matrix: d x d, made of all rows; sample space: N rows, no d x d matrix; work: multiplications to apply it"
        ]
        if others:
            notes.append(f"by the fallback rule ({self.settings.fallback}): {', '.join(others)}")
        title = (
            f"{type(self).__name__}: {self.skipped} steps skipped, {sum(self.rungs.values())} factorizations rescued"
        )
        return Table(title, ("layer", "out x in", "form", "memory", "work"), tuple(rows), tuple(notes))

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Have ``watcher(layer, block, factors, damping)`` called whenever inverses are made; returns how to stop."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients that are thrown away take their statistics with them."""
        self.capture.reset()
        super().zero_grad(set_to_none)

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gathered = self.capture.gather()
        active = [slot for slot in self.slots.values() if self._has_gradient(slot)]
        self._check_uses(active)
        with stage("mukron::factors"):
            fresh = self._measure(active)
            staged = {}
            for slot in as_precise([(self.slots[name].layout, self.slots[name]) for name in fresh]):
                staged[slot.name] = self._stage(slot, fresh[slot.name])
        directions = self._attempt(active, staged, self._numbers(fresh))
        wanting = False
        if directions is None:
            self._skip()
        else:
            wanting = any(not self._is_ready(slot, staged) for slot in active)
            with stage("mukron::write"):
                self._write(directions)
            self.steps, self._skipped_in_a_row = self.steps + 1, 0
        self._gathered = {}
        self.capture.reset()
        self.capture.due = self.steps % self.settings.factor_every == 0 or wanting
        return loss

    def _attempt(
        self, active: list[Slot], staged: Mapping[str, Staged], numbers: list[Tensor]
    ) -> dict[Parameter, Move] | None:
        """What to subtract from every parameter; None if something is not finite.

        numbers: of gradients and statistics. If one is not finite, nothing is changed.

        All is launched as if nothing could go wrong, and the device is asked once, at the end. Only if an inverse did
        not come out well are they made again, with a look at each.
        """
        ready = [slot for slot in active if self._is_ready(slot, staged)]
        directions: dict[Parameter, Move] = {}
        finite = False
        for rescue in (False, True):
            with stage("mukron::invert"):
                made = self._invert(staged, rescue)
            if made is not None:
                with stage("mukron::apply"):
                    directions = self._directions(ready, staged)
            moves = norms([part for move in directions.values() for part in _parts(move)])
            sound, inverted, finite = all_finite(numbers, made or [], moves)
            if not sound:
                return None
            if inverted and made is not None:
                break
        self._commit(staged)
        return directions if finite else None

    def _skip(self) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        self._operators.clear()  # those that were tried, perhaps
        if self._skipped_in_a_row == PATIENCE:
            warnings.warn(
                f"{PATIENCE} steps in a row were skipped, since gradients or curvature were not finite; the run has "
                "diverged: lower the learning rate or raise the damping",
                RuntimeWarning,
                stacklevel=5,
            )

    def _halves(self, slot: Slot) -> list[Halves]:
        """Of the weight's gradient, where nobody else forms it."""
        gathered = self._gathered.get(slot.name)
        return [] if gathered is None else [each for each in gathered.halves if each.fused]

    def _has_gradient(self, slot: Slot) -> bool:
        return any(p.grad is not None for p in slot.parameters.values()) or bool(self._halves(slot))

    def _numbers(self, fresh: Mapping[str, Blocks]) -> list[Tensor]:
        """Finite if gradients and statistics are: one that is not must never enter a factor or a weight."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        traces = [factor.trace() for blocks in fresh.values() for block in blocks.values() for factor in block.values()]
        sizes = norms([grad.coalesce().values() if grad.is_sparse else grad for grad in grads])
        return sizes + traces

    def _check_uses(self, active: list[Slot]) -> None:
        """Once: whether each weight's gradient is that of its layer's own forward pass, up to a factor.

        A weight that is also used behind its layer's back (``F.linear(h, embedding.weight)``) shows in this alone.
        """
        if not self.capture.checks_uses:
            return
        self.capture.checks_uses = False
        for slot in active:
            weight = slot.parameters.get(WEIGHT)
            if weight is None or weight.grad is None or weight.grad.is_sparse or not self.capture.passes:
                continue
            G = slot.matrix(WEIGHT, weight.grad)
            G = G.float() if G.dtype in (torch.float16, torch.bfloat16) else G
            ours, actual = self.capture.along(slot.name), G @ probe(G.shape[-1], G.dtype, G.device)
            if not bool(actual.isfinite().all()):
                self.capture.checks_uses = True  # nothing is seen by this; the next step will tell
                return
            if ours is None or not bool(actual.any()):
                continue
            if bool(proportion(ours.to(actual.dtype), actual)[1] > SUSPICIOUS):
                warnings.warn(
                    f'the gradient of layer "{slot.name}" is not that of its own forward pass: its weight is used '
                    "elsewhere too, or the gradient was changed before the step. Its curvature describes the layer's "
                    f'own use alone; exclude=("{slot.name}",) leaves it to the fallback rule',
                    UserWarning,
                    stacklevel=5,
                )
            elif self.capture.is_fused(slot.name):  # it has served, and makes room
                gathered = self._gathered[slot.name]
                gathered.halves = [half._replace(fused=True) for half in gathered.halves]
                weight.grad = None

    def _measure(self, active: list[Slot]) -> dict[str, Blocks]:
        """This batch's factors, of the layers for which this step wants fresh ones."""
        due = self.steps % self.settings.factor_every == 0
        fresh = {}
        for slot in active:
            gathered = self._gathered.get(slot.name)
            heard = gathered is not None and gathered.samples > 0
            if not due and not (heard and self._is_new(slot) and self.capture.due):
                continue  # a layer that was not there at the last refresh is listened to next time
            gradients = {
                block: slot.matrix(block, self._gradient(parameter))
                for block, parameter in slot.parameters.items()
                if parameter.grad is not None
            }
            if not self._halves(slot) and gathered is None and not any(bool(G.any()) for G in gradients.values()):
                continue  # a gradient of zeros, for a layer that did not run
            fresh[slot.name] = self.measure(slot, gathered, gradients)
        return fresh

    def _is_new(self, slot: Slot) -> bool:
        return "operators" not in self.state[slot.anchor]

    def _is_ready(self, slot: Slot, staged: Mapping[str, Staged]) -> bool:
        """Whether it can be preconditioned; otherwise it must sit this step out."""
        due = self.steps % self.settings.factor_every == 0
        return slot.name in staged if due else slot.name in staged or not self._is_new(slot)

    def _stage(self, slot: Slot, blocks: Blocks) -> Staged:
        """What this batch's factors change in the layer's state, beside it: it counts once the step does."""
        settings, state, new = self.settings, self.state[slot.anchor], self._is_new(slot)
        if slot.name in self._gathered:
            state["positions"] = self._gathered[slot.name].positions
        memory, peaks = _copied(state.get("memory", {})), _copied(state.get("peaks", {}))
        staged = Staged(slot, {"memory": memory, "peaks": peaks})
        for block, factors in blocks.items():
            kept = memory.setdefault(block, {})
            updated = {
                name: settings.memory.update(kept.setdefault(name, {}), factor) for name, factor in factors.items()
            }
            highest = peaks.setdefault(block, {})
            traces = [factor.trace() for factor in updated.values()]
            known = [highest.get(name, trace) for name, trace in zip(updated, traces, strict=True)]
            highest.update(zip(updated, torch._foreach_maximum(known, traces), strict=True))
            if new or self.steps % settings.inverse_every == 0:
                staged.inverting[block] = updated, self._damping(slot, block, updated, highest)
        return staged

    def _damping(
        self, slot: Slot, block: str, factors: Mapping[str, Factor], peaks: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | FactorizationError:
        try:
            return self.rule_of(slot, block)(factors, replace(slot.sides_of(block), peaks=peaks))
        except FactorizationError as error:  # of the largest eigenvalue
            return error

    def _invert(self, staged: Mapping[str, Staged], rescue: bool) -> list[Tensor] | None:
        """Operators of all blocks that want new ones, and numbers that are finite if these came out well.

        rescue: look at each, and go to some lengths for it. Without it None says that one failed for certain.
        """
        wanted = [(each, block, *found) for each in staged.values() for block, found in each.inverting.items()]
        layers = [(factors, rho) for _, _, factors, rho in wanted if not isinstance(rho, FactorizationError)]
        prepared, numbers = self.prepare(layers, rescue)
        remaining = iter(prepared)
        for each in staged.values():
            each.state["operators"] = dict(self.state[each.slot.anchor].get("operators", {}))
        for each, block, _, rho in wanted:
            found = rho if isinstance(rho, FactorizationError) else next(remaining)
            if isinstance(found, FactorizationError) and not rescue:
                return None
            each.take(block, found)
        return numbers

    def _commit(self, staged: Mapping[str, Staged]) -> None:
        for each in staged.values():
            name = each.slot.name
            for block, (factors, rho) in each.inverting.items():
                if not isinstance(rho, FactorizationError):
                    for watcher in self._watchers:
                        watcher(name, block, factors, rho)
            self.state[each.slot.anchor].update(each.state)
            for side, rung in each.rungs:
                if not any(key.startswith(f"{name} ") for key in self.rungs):
                    said = f", factor {side}: factorized with" if side else ": its factors could not be inverted,"
                    warnings.warn(f'layer "{name}"{said} {rung}', RuntimeWarning, stacklevel=6)
                self.rungs[f"{name} {side}: {rung}"] += 1

    def rule_of(self, slot: Slot, block: str) -> Rule:
        """The damping rule of a layer, with the number that its group has now."""
        group = self._group_of[id(slot.parameters.get(block, slot.anchor))]
        damping = group["damping"]
        if isinstance(damping, Rule):
            return damping
        return _rule(tuple({**group["damping_rule"], "rho": float(damping)}.items()))

    def _gradient(self, parameter: Parameter) -> Tensor:
        """The gradient to descend, in the precision of the curvature; coupled weight decay is part of it."""
        group = self._group_of[id(parameter)]
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ValueError(
                f'parameter "{self._names[id(parameter)]}" has a sparse gradient; build it with sparse=False'
            )
        G = parameter.grad
        G = G.float() if G.dtype in (torch.float16, torch.bfloat16) else G
        if group["maximize"]:
            G = -G
        if group["weight_decay"] and not group["decoupled"]:
            G = G + group["weight_decay"] * parameter.to(G.dtype)
        return G

    def _directions(self, active: list[Slot], staged: Mapping[str, Staged]) -> dict[Parameter, Move]:
        """What to subtract from every parameter that has a gradient, before its learning rate."""
        directions: dict[Parameter, Move] = {}
        products = []
        for slot in as_precise([(slot.layout, slot) for slot in active]):
            stored = (staged[slot.name].state if slot.name in staged else self.state[slot.anchor])["operators"]
            operators = self._restored(slot, stored)
            for block, parameter in slot.parameters.items():
                G = self._gradient_of(slot, block, parameter)
                if G is None:
                    continue
                move = self.precondition(slot, block, G, operators)
                if isinstance(move, LowRank) and self._can_wait(parameter):
                    directions[parameter] = move
                    continue
                matrix = _matrix(move)
                if self.settings.graft is not None:
                    matrix = self._graft(parameter, _matrix(G), matrix, slot, block)
                directions[parameter] = slot.values(block, matrix)
                if self.settings.kl_clip is not None:
                    products.append((self.rate(parameter) ** 2, (matrix * _matrix(G)).sum()))
        if products:
            # nu = min(1, sqrt(kappa / sum of eta^2 <direction, gradient>))  (Grosse and Martens 2016)
            total = sum((rate * product for rate, product in products), torch.zeros_like(products[0][1]))
            assert self.settings.kl_clip is not None
            nu = (self.settings.kl_clip / total.clamp_min(1e-30)).sqrt().clamp_max(1.0)
            directions = {parameter: nu * move for parameter, move in directions.items() if isinstance(move, Tensor)}
        for parameter in self.others:
            if parameter.grad is not None:
                directions[parameter] = self._fallback(parameter)
        return directions

    def _restored(self, slot: Slot, stored: Mapping[str, Any]) -> dict[str, dict[str, Operator]]:
        """Operators from their state; the same ones while that is the same."""
        if slot.name not in self._operators or self._operators[slot.name][0] is not stored:
            operators = {
                block: {name: Operator.from_state(state) for name, state in sides.items()}
                for block, sides in stored.items()
            }
            self._operators[slot.name] = stored, operators
        return self._operators[slot.name][1]

    def _gradient_of(self, slot: Slot, block: str, parameter: Parameter) -> Move | None:
        """The gradient to descend as a matrix, or as it arose where nobody else forms it; None: there is none."""
        G = None if parameter.grad is None else slot.matrix(block, self._gradient(parameter))
        halves = self._halves(slot) if block == WEIGHT else []
        if not halves:
            return G
        group = self._group_of[id(parameter)]
        D, H = joined([half.D for half in halves]), joined([half.H for half in halves])
        own = LowRank(-D if group["maximize"] else D, H)
        if G is not None:  # a penalty in the loss reaches the weight beside its layer
            return G + own.matrix()
        if group["weight_decay"] and not group["decoupled"]:
            return own.matrix().add(slot.matrix(block, parameter.to(D.dtype)), alpha=group["weight_decay"])
        return own

    def _can_wait(self, parameter: Parameter) -> bool:
        """Whether D^T H may be added straight to where it goes, without ever being a matrix of its own."""
        group, settings = self._group_of[id(parameter)], self.settings
        plain = settings.graft is None and settings.kl_clip is None and not group["nesterov"]
        return plain and parameter.is_contiguous() and parameter.dtype in (torch.float32, torch.float64)

    def _graft(self, parameter: Parameter, G: Tensor, matrix: Tensor, slot: Slot, block: str) -> Tensor:
        """The preconditioned direction at the length of another method's step."""
        step = G if self.settings.graft == "sgd" else self._adam(parameter, slot.values(block, G))
        length: Tensor = step.norm() / matrix.norm().clamp_min(1e-30)
        return matrix * length

    def _fallback(self, parameter: Parameter) -> Tensor:
        G = self._gradient(parameter)
        return G if self.settings.fallback == "sgd" else self._adam(parameter, G)

    def _adam(self, parameter: Parameter, G: Tensor) -> Tensor:
        return adam_direction(self.state[parameter], G, self.settings.betas, self.settings.eps)

    def rate(self, parameter: Parameter) -> float:
        """The learning rate of one parameter: the group's, times the parametrization's multiplier."""
        return self.base_rate(parameter) * self._scale[id(parameter)]

    def base_rate(self, parameter: Parameter) -> float:
        """The group's learning rate, as the width does not change it."""
        group = self._group_of[id(parameter)]
        own = id(parameter) in self._slot_of or group["fallback_lr"] is None
        return float(group["lr"] if own else group["fallback_lr"])

    def _write(self, directions: Mapping[Parameter, Move]) -> None:
        """Momentum, weight decay, and the update itself, for whole groups at once."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p in directions]
            if not parameters:
                continue
            if group["weight_decay"] and group["decoupled"]:
                for parameter in parameters:
                    parameter.mul_(1 - self.base_rate(parameter) * group["weight_decay"])
            moves = self._with_momentum(parameters, directions, group)
            alike = defaultdict(list)  # one fused update for all parameters of one learning rate
            for parameter in parameters:
                move = moves[parameter]
                if isinstance(move, LowRank):
                    self._add(parameter, parameter, move, alpha=-self.rate(parameter))
                else:
                    alike[self.rate(parameter)].append((parameter, move.to(parameter.dtype)))
            for rate, pairs in alike.items():
                torch._foreach_add_([p for p, _ in pairs], [move for _, move in pairs], alpha=-rate)

    def _with_momentum(
        self, parameters: list[Parameter], directions: Mapping[Parameter, Move], group: Mapping[str, Any]
    ) -> dict[Parameter, Move]:
        """buffer <- momentum buffer + move;  Nesterov looks one step ahead along it. Adam's moves have their own."""
        momentum = group["momentum"]
        moves = {parameter: directions[parameter] for parameter in parameters}
        if not momentum:
            return moves
        adam = self.settings.fallback == "adamw"
        dense: list[tuple[Parameter, Tensor, Tensor]] = []  # with the buffer and the move
        for parameter, move in moves.items():
            if adam and id(parameter) not in self._slot_of:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                like = parameter if isinstance(move, LowRank) else move
                state["momentum_buffer"] = torch.zeros_like(like, memory_format=torch.contiguous_format)
            buffer: Tensor = state["momentum_buffer"]
            if isinstance(move, LowRank):
                self._add(parameter, buffer, move, beta=momentum)
                moves[parameter] = buffer
            else:
                dense.append((parameter, buffer, move))
        if dense:
            buffers, added = [buffer for _, buffer, _ in dense], [move for _, _, move in dense]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, added)
            ahead = torch._foreach_add(added, buffers, alpha=momentum) if group["nesterov"] else buffers
            moves.update(zip((parameter for parameter, _, _ in dense), ahead, strict=True))
        return moves

    def _add(self, parameter: Parameter, target: Tensor, move: LowRank, beta: float = 1.0, alpha: float = 1.0) -> None:
        """target <- beta target + alpha D^T H, in place."""
        view = self._slot_of[id(parameter)].matrix(WEIGHT, target)
        view.baddbmm_(move.D.mT, move.H, beta=beta, alpha=alpha)

    # Saving, loading, copying.

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue bit for bit."""
        own = {
            "format": FORMAT,
            "method": type(self).__name__,
            "steps": self.steps,
            "skipped": self.skipped,
            "rungs": dict(self.rungs),
            "generator": self.generator.get_state(),
            "parametrization": None if self.parametrization is None else self.parametrization.to_dict(),
        }
        return {**super().state_dict(), "mukron": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if "mukron" not in state_dict:
            raise ValueError(f"this state was not saved by a mukron optimizer; found keys {sorted(state_dict)}")
        own = state_dict["mukron"]
        if own["method"] != type(self).__name__:
            raise ValueError(f"this state was saved by {own['method']}, not by {type(self).__name__}")
        if own.get("format") != FORMAT:
            raise ValueError(
                f"this state has format {own.get('format', 1)}, and this version of mukron reads {FORMAT}: go on "
                "with the version that saved it"
            )
        if (own["parametrization"] is None) != (self.parametrization is None):
            raise ValueError("one of the saved state and this optimizer has a Parametrization, the other has none")
        if self.parametrization is not None:
            self.parametrization.check(own["parametrization"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        # torch would cast every state to its parameter's dtype; ours keep their own
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            if index in state_dict["state"]:
                self.state[parameter] = _moved(state_dict["state"][index], parameter.device)
        self.steps, self.skipped, self.rungs = own["steps"], own["skipped"], Counter(own["rungs"])
        _restore(self.generator, own["generator"])
        self._listen()

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this very model: hooks, and tables keyed by its tensors' identity."""
        kept = {name: value for name, value in self.__dict__.items() if name not in TIED_TO_THE_MODEL}
        return {**kept, **super().__getstate__(), "generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "model" not in state:  # torch's load_state_dict passes groups and states alone
            super().__setstate__(state)
            return
        generator = state.pop("generator")
        super().__setstate__(state)
        self._capture, self._gathered, self._watchers = None, {}, []
        self.generator = torch.Generator(self.param_groups[0]["params"][0].device)
        self.generator.set_state(generator)
        if self.parametrization is not None:
            self.parametrization = self.parametrization.bind(self.model)
        self._listen()

    # Warnings.

    def _warn_of_nngp(self) -> None:
        """Methods for which a zero output layer is a trap say so."""


@lru_cache(maxsize=64)
def _rule(plain: tuple[tuple[str, Any], ...]) -> Rule:
    return Rule.from_plain(dict(plain))


def joined(rows: Sequence[Tensor]) -> Tensor:
    """The rows of several passes, [groups, rows, d], as one."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=1)


def _matrix(move: Move) -> Tensor:
    return move.matrix() if isinstance(move, LowRank) else move


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(map(repr, known))}")


def _check_model(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError("DataParallel runs copies of the layers that the optimizer does not see; use one device")
    if isinstance(model, nn.parallel.DistributedDataParallel) and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "DistributedDataParallel over several processes is not supported: each would precondition by its own batch "
            "alone, and their weights would drift apart"
        )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"the model's parameters are on several devices, {sorted(map(str, devices))}; move it to one")


def _check_group(group: Mapping[str, Any]) -> None:
    for name in ("lr", "weight_decay", "fallback_lr"):
        if group[name] is not None and not float(group[name]) >= 0:
            raise ValueError(f"{name} must not be negative, got {group[name]}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {group['momentum']}")
    if group["nesterov"] and not group["momentum"]:
        raise ValueError("nesterov=True needs momentum > 0")


def _parts(move: Move) -> tuple[Tensor, ...]:
    return (move.D, move.H) if isinstance(move, LowRank) else (move,)


def _copied(value: Any) -> Any:
    """Dictionaries all the way down, with the same tensors in them."""
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, dict) else value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return value


def _restore(generator: torch.Generator, state: Tensor) -> None:
    """Generators of different devices keep different states: then the draws go on from a seed made of the saved one."""
    try:
        generator.set_state(state.cpu())
    except RuntimeError:
        generator.manual_seed(int(state.cpu().to(torch.int64).mul(torch.arange(1, state.numel() + 1)).sum()))


__all__ = ["BIAS", "WEIGHT", "Blocks", "Move", "SecondOrder", "Settings", "joined", "one_of"]
