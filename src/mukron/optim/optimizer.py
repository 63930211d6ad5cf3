"""The one step that all methods share, as a ``torch.optim.Optimizer``.

Read downwards:  capture -> factors -> damping -> prepare -> direction -> decide -> commit and write.

A method says which factors it measures (``measure``) and, where that is not the plain product of both sides, how they
are applied (``precondition``). Everything else is here.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mukron.curvature import Capture, CaptureOptions, LayerStatistics
from mukron.damping import Rule
from mukron.linalg import Factor, LowRank, Operator
from mukron.optim.direction import apply, directions
from mukron.optim.exchange import Exchange
from mukron.optim.guards import check_arguments, check_dtypes, check_group, check_model, check_precision, check_uses
from mukron.optim.options import AdamStep, GradientMomentum, HeavyBall, Momentum, StepOptions, refuse_unknown
from mukron.optim.plan import plan_table
from mukron.optim.saving import complete_state, load_state
from mukron.optim.table import LayerEntry, ParameterEntry, build_tables
from mukron.optim.transaction import Blocks, Transaction, ill_conditioned
from mukron.optim.update import Move, Update, write
from mukron.params import Parametrization
from mukron.params.inventory import unwrap
from mukron.stages import stage
from mukron.table import Table
from mukron.theory import Method

if TYPE_CHECKING:
    from mukron.optim.spec import MethodSpec

PATIENCE = 10  # skipped steps in a row before the user is told
TIED_TO_THE_MODEL = ("_capture", "entries", "layers", "generator", "watchers", "exchange")
Watcher = Callable[[str, str, Mapping[str, Factor], Mapping[str, Tensor]], None]


class SecondOrder(Optimizer):
    """Base of K-FAC, FOOF, Shampoo and Gauss-Newton.

    A method derives from it, and defines ``measure`` and, if it needs to, ``precondition``.
    """

    spec: ClassVar[MethodSpec]  # the method's record, of which ``register`` makes the two below
    method: ClassVar[Method]
    rule: ClassVar[type[Rule]]  # what a bare number means as damping
    useless: ClassVar[Mapping[str, str]] = {}  # arguments of related methods, and why this one has none of them
    uses_products: ClassVar[bool] = False  # gradients may come as D^T H of the batch that the factors were made of
    inverts: ClassVar[bool] = False  # operators are inverses, not roots: small damping needs float64

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        refuse_unknown(cls, options, cls.useless)
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None,
        lr: float | Tensor,
        *,
        damping: float | Rule | None = None,
        momentum: float | Momentum = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        maximize: bool = False,
        fallback_lr: float | None = None,
        params: Iterable[Any] | None = None,
        options: StepOptions | None = None,
        capture_options: CaptureOptions | None = None,
    ) -> None:
        options = StepOptions() if options is None else options
        if capture_options is None:
            capture_options = CaptureOptions(inputs=False, signals=False)
        check_model(model, type(self).__name__)
        check_arguments(type(self).__name__, parametrization, lr)
        self.model, self.options, self.capture_options = model, options, capture_options
        self.parametrization = None if parametrization is None else parametrization.bind(model)
        self.exchange: Exchange | None = None
        self.steps, self.skipped, self._skipped_in_a_row = 0, 0, 0
        self.watchers: list[Watcher] = []
        self.rescues: Counter[str] = Counter()  # "layer factor: how" -> how often
        self.told: set[str] = set()  # layers whose precision was looked at
        self._capture: Capture | None = None
        self._ready = False
        defaults = {"lr": lr, "damping": damping, "momentum": momentum, "nesterov": nesterov, "momentum_on": "update"}
        defaults |= {"weight_decay": weight_decay, "decoupled": decoupled, "maximize": maximize}
        defaults |= {"fallback_lr": fallback_lr}
        if isinstance(momentum, (HeavyBall, GradientMomentum)):
            defaults.update(_momentum(momentum))  # schedulers look for a number here
        params = list(model.parameters() if params is None else params)
        params = [{**p, "params": _listed(p["params"])} if isinstance(p, dict) else p for p in params]
        if not any(p["params"] if isinstance(p, dict) else True for p in params):
            raise ValueError("params is empty: there is nothing to train; leave it out to train the whole model")
        super().__init__(params, defaults)
        # first, so that hooks of the user's own see it all
        self.register_state_dict_post_hook(complete_state)  # type: ignore[arg-type]
        first = next(parameter for group in self.param_groups for parameter in group["params"])
        self.generator = torch.Generator(first.device).manual_seed(options.seed)
        self._ready = True
        self._listen()
        if not self.layers:
            raise ValueError(
                "there is nothing to precondition: no Linear, Conv or Embedding layer among the parameters given"
                + (f" that is not in exclude={options.exclude}" if options.exclude else "")
            )
        check_dtypes(self)
        self.warn()

    # What a method says for itself.

    def measure(self, layer: LayerEntry, statistics: LayerStatistics | None, step: Transaction) -> Blocks:
        """This batch's factors of a layer, by block and factor name; none for a method without curvature."""
        raise NotImplementedError

    def precondition(self, layer: LayerEntry, block: str, G: Move, step: Transaction) -> Move:
        """The direction for the gradient G of a block."""
        return apply(step.value(layer, "operators")[block], G)

    def finish(self, factors: Mapping[str, Factor], operators: dict[str, Operator]) -> dict[str, Operator]:
        """The operators of a block as they are kept."""
        return operators

    def warn(self) -> None:
        """What a user should know of the model before the first step."""

    def powers(self, block: str) -> dict[str, Fraction]:
        """By factor, the power of it that the gradient of a block is divided by."""
        return {statistic.name: e for statistic, e in self.method.factors}

    # Groups, and the layers they own.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = dict(param_group)
        rule = self._damping_rule(group.get("damping", self.defaults["damping"]))
        plain = {} if rule is None else rule.plain()
        group |= {"damping": None if rule is None else rule.rho, "damping_rule": plain}
        if isinstance(group.get("momentum"), (HeavyBall, GradientMomentum)):
            group.update(_momentum(group["momentum"]))
        group["reference_lr"] = float(group.get("lr", self.defaults["lr"]))
        super().add_param_group(group)
        try:
            check_group(self.param_groups[-1])
            if self._ready:
                self._listen()
        except ValueError:
            self.param_groups.pop()
            raise

    def _damping_rule(self, damping: float | Rule | None) -> Rule | None:
        """The rule that a group's damping means; None for a method without damping."""
        if damping is None:
            return self.spec.damping
        if self.spec.damping is None:
            raise ValueError(f"{type(self).__name__} has no damping, got damping={damping}")
        return damping if isinstance(damping, Rule) else self.rule(float(damping))  # type: ignore[call-arg]

    def _listen(self) -> None:
        """Build the tables of parameters and layers anew, and listen to those layers."""
        options, rates = self.options, self.method if self.options.graft is None else self.options.graft.name
        self.entries, self.layers = build_tables(
            self.model, self.param_groups, options.exclude, self.parametrization, self.method,
            (rates, options.fallback.name),
        )  # fmt: skip
        if self._capture is not None:
            self._capture.close()
        heard = {name: entry.layer for name, entry in self.layers.items()} if self.capture_options.anything else {}
        self._capture = Capture(unwrap(self.model), heard, self.capture_options, self.generator)
        self._set_due(wanting=False)

    def _set_due(self, wanting: bool) -> None:
        """Tell the capture what the coming step wants. wanting: a layer waits for its first factors."""
        self.capture.due = self.steps % self.options.factor_every == 0 or wanting
        double = [name for name, layer in self.layers.items() if self._needs_double(layer)] if self.inverts else ()
        self.capture.double = frozenset(double)

    def _needs_double(self, layer: LayerEntry) -> bool:
        state = self.state.get(layer.anchor, {})
        if "double" in state:
            return bool(state["double"])
        return layer.anchor.dtype != torch.float64 and ill_conditioned(self, layer)

    @property
    def capture(self) -> Capture:
        assert self._capture is not None
        return self._capture

    def rule_of(self, layer: LayerEntry, block: str) -> Rule:
        """The damping rule of a layer, with the number that its group has now."""
        entry = layer.blocks.get(block) or next(iter(layer.blocks.values()))
        damping = entry.group["damping"]
        if isinstance(damping, Rule):
            return damping
        return _rule(tuple({**entry.group["damping_rule"], "rho": float(damping)}.items()))

    def rate(self, name: str) -> float:
        """The learning rate of a parameter: its group's, times the parametrization's multiplier."""
        return self.entries[name].base_rate * self.entries[name].scale

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, or skip it and change nothing if a number is not finite.

        Args:
            closure: Computes the loss and its gradients; optional.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            step, moves = self._attempt()
        except BaseException:
            self.capture.forget()
            raise
        if moves is None:
            self._skip()
        else:
            step.commit()
            with stage("mukron::write"):
                write([self._update(name, move) for name, move in moves.items()])
            self.steps, self._skipped_in_a_row = self.steps + 1, 0
            self.capture.commit()
        self._set_due(wanting=moves is not None and len(step.ready) < len(step.active))
        return loss

    def _attempt(self) -> tuple[Transaction, dict[str, Move] | None]:
        """The step and what it moves every parameter by; None: it must be skipped. Nothing is changed yet.

        All is launched as if nothing could go wrong, and the device is read once, at the end. Only then, if an inverse
        did not come out well or a gradient is not what it was taken for, is a part of it done again.
        """
        statistics = self.capture.gather()
        step = Transaction(self, statistics if self.exchange is None else self.exchange.gather(statistics))
        if self.capture.checks_uses:
            check_uses(self, step)
        with stage("mukron::factors"):
            step.measure()
        with stage("mukron::invert"):
            step.prepare()
        counts = None
        while counts is None:
            with stage("mukron::apply"):
                moves = {} if step.operators_failed else directions(self, step)
            counts = step.decide(moves)
        if counts and not step.double <= self.told:
            check_precision(self, step, moves)
        return step, moves if counts else None

    def _update(self, name: str, move: Move) -> Update:
        """What a parameter's move becomes: its learning rate, decay, and momentum if that is on the update."""
        entry, group = self.entries[name], self.entries[name].group
        weight: Tensor = entry.parameter
        rate, momentum = entry.base_rate, group["momentum"]
        adam = not entry.preconditioned and isinstance(self.options.fallback, AdamStep)
        on_update = momentum and group["momentum_on"] == "update" and not adam
        buffer = self._buffer(entry, move) if on_update else None
        if isinstance(move, LowRank):
            layer = self.layers[name.rpartition(".")[0]].layer
            weight, buffer = layer.matrix(weight), None if buffer is None else layer.matrix(buffer)
        decay = rate * group["weight_decay"] if group["decoupled"] else 0.0
        return Update(weight, move, rate * entry.scale, decay, buffer, momentum, group["nesterov"])

    def _buffer(self, entry: ParameterEntry, move: Move) -> Tensor:
        state = self.state[entry.parameter]
        if "momentum_buffer" not in state:
            dtype = entry.parameter.dtype if isinstance(move, LowRank) else _at_least_float32(entry.parameter.dtype)
            like = torch.zeros_like(entry.parameter, dtype=dtype, memory_format=torch.contiguous_format)
            state["momentum_buffer"] = like
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def adds_products(self, entry: ParameterEntry, move: LowRank) -> bool:
        """Whether D^T H may be added straight to its weight or buffer, without being formed."""
        plain = self.options.graft is None and self.options.kl_clip is None and not entry.group["nesterov"]
        return plain and entry.parameter.is_contiguous() and entry.parameter.dtype == move.D.dtype

    def _skip(self) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        self.capture.forget()
        if self._skipped_in_a_row == PATIENCE:
            warnings.warn(
                f"{PATIENCE} steps in a row were skipped, since gradients or curvature were not finite; the run has "
                "diverged: lower the learning rate or raise the damping",
                RuntimeWarning,
                stacklevel=4,
            )

    def count_rescue(self, layer: str, factor: str, how: str) -> None:
        """Count a factorization that was rescued, and tell it once a layer."""
        if not any(key.startswith(f"{layer} ") for key in self.rescues):
            what = f", factor {factor}: factorized with" if factor else ": its factors could not be inverted,"
            warnings.warn(f'layer "{layer}"{what} {how}', RuntimeWarning, stacklevel=6)
        self.rescues[f"{layer} {factor}: {how}"] += 1

    # What a user may call beside ``step``.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the statistics of their passes go with them."""
        self.capture.forget()
        super().zero_grad(set_to_none)

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

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Have ``watcher(layer, block, factors, damping)`` called whenever inverses are made; returns how to stop."""
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)

    def plan(self) -> Table:
        """What each layer costs, as its last refreshed step found it: factor sizes, form, memory, work of a step."""
        return plan_table(self)

    # Saving, loading, copying.

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, bit for bit; refuses one that does not fit and then changes nothing."""
        load_state(self, state_dict)
        self._listen()

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this very model: hooks, and tables of its tensors."""
        kept = {name: value for name, value in self.__dict__.items() if name not in TIED_TO_THE_MODEL}
        return {**kept, **super().__getstate__(), "generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "model" not in state:  # torch's load_state_dict passes groups and states alone
            super().__setstate__(state)
            return
        generator = state.pop("generator")
        super().__setstate__(state)
        self._capture, self.watchers, self.exchange = None, [], None
        first = next(parameter for group in self.param_groups for parameter in group["params"])
        self.generator = torch.Generator(first.device)
        self.generator.set_state(generator)
        if self.parametrization is not None:
            self.parametrization = self.parametrization.bind(self.model)
        self._listen()


def _listed(params: Any) -> Any:
    return params if isinstance(params, Tensor) else list(params)


def _momentum(momentum: Momentum) -> dict[str, Any]:
    """As entries of a parameter group."""
    if isinstance(momentum, HeavyBall):
        return {"momentum": momentum.beta, "nesterov": momentum.nesterov, "momentum_on": "update"}
    return {"momentum": momentum.beta, "nesterov": False, "momentum_on": "gradient"}


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@lru_cache(maxsize=64)
def _rule(plain: tuple[tuple[str, Any], ...]) -> Rule:
    return Rule.from_plain(dict(plain))
