"""The one step that all methods share, as a ``torch.optim.Optimizer``.

Read downwards:  capture -> factors -> damping -> prepare -> direction -> decide -> commit and write.

A method says which factors it measures (``measure``) and, where that is not the plain product of both sides, how they
are applied (``precondition``). Everything else is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mukron.curvature import Capture, CaptureOptions, Joint, LayerStatistics, along, gather
from mukron.damping import Adaptive, Rule
from mukron.linalg import Factor
from mukron.optim.changes import Changes, changes_of, check_changes
from mukron.optim.direction import apply, base_rate, directions
from mukron.optim.docs import describe, refuse_unknown
from mukron.optim.exchange import Exchange, Together
from mukron.optim.groups import completed_group
from mukron.optim.guards import (
    check_arguments,
    check_dtypes,
    check_group,
    check_layers,
    check_uses,
    checked_params,
    tell,
    tell_skips,
)
from mukron.optim.momentum import Momentum, momentum_entries
from mukron.optim.options import StepOptions
from mukron.optim.plan import plan_table
from mukron.optim.precision import check_precision
from mukron.optim.processes import (
    averages_itself,
    check_alike,
    check_processes,
    exchange_of,
    ranks_of,
    warn_of_no_group,
)
from mukron.optim.reduction import ReductionRatio
from mukron.optim.saving import complete_state, device_of, initializes_state, load_state, reserve, unpickle
from mukron.optim.schemes import hold_as_exchanged, seen_in
from mukron.optim.table import LayerEntry, ParameterEntry, build_tables, entry_of
from mukron.optim.transaction import Blocks, Transaction, wants
from mukron.optim.unseen import refuse_partial
from mukron.optim.update import Move, times, updates_of, write
from mukron.params import Parametrization
from mukron.params.inventory import unwrap
from mukron.params.parametrization import warn_if_not_scaled
from mukron.params.sharded import refuse_sharded
from mukron.stages import stage
from mukron.theory import Method

if TYPE_CHECKING:
    from mukron.optim.spec import MethodSpec

TIED_TO_THE_MODEL = ("_capture", "_changes", "entries", "layers", "generator", "watchers", "exchange")
Watcher = Callable[[str, str, Mapping[str, Factor], Mapping[str, Tensor]], None]


@describe
class SecondOrder(Optimizer):
    """Base of K-FAC, FOOF, Shampoo and Gauss-Newton.

    A method derives from it, and defines ``measure`` and, if it needs to, ``precondition``.

    Args:
        damping: A number, which means the method's own rule, or any rule of ``mukron.damping``.

    Example:
        >>> from mukron.optim import FOOF
        >>> issubclass(FOOF, SecondOrder), FOOF.rule.__name__
        (True, 'Rescaled')
    """

    spec: ClassVar[MethodSpec]  # the method's record, of which ``register`` makes the two below
    method: ClassVar[Method]
    rule: ClassVar[type[Rule]]  # what a bare number means as damping
    useless: ClassVar[Mapping[str, str]] = {}  # arguments of related methods, and why this one has none of them
    uses_products: ClassVar[bool] = False  # gradients may come as D^T H of the batch that the factors were made of
    by_block: ClassVar[bool] = False  # weights and biases have operators of their own
    momentum_kind: ClassVar[type[Momentum] | None] = None  # what a number as momentum means, whatever the trust
    in_stacks: ClassVar[bool] = False  # layers of one shape, here and at the base width, are preconditioned as one
    inverts: ClassVar[bool] = False  # operators are inverses, not roots: small damping needs float64
    _step_supports_amp_scaling = property(averages_itself)  # a GradScaler then steps on all processes, or on none
    entries: dict[str, ParameterEntry]  # by name
    layers: dict[str, LayerEntry]
    _changes: Changes | None = None

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        refuse_unknown(cls, options, cls.useless)
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None,
        lr: float | Tensor | None,
        *,
        damping: float | Rule | Adaptive | None = None,
        momentum: float | Momentum | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        maximize: bool = False,
        fallback_lr: float | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
        options: StepOptions | None = None,
        capture_options: CaptureOptions | None = None,
    ) -> None:
        options = StepOptions() if options is None else options
        capture_options = CaptureOptions(inputs=False, signals=False) if capture_options is None else capture_options
        lr = self.spec.usual_lr({"trust": options.trust}) if lr is None else lr
        check_arguments(type(self).__name__, model, parametrization, lr)
        self.model, self.options, self.capture_options = model, options.named(model), capture_options
        self.parametrization = None if parametrization is None else parametrization.bind(model)
        warn_if_not_scaled(parametrization, model, stacklevel=4)
        self.powers = {number: self.powers_of(number) for number in range(1, 1 + max(2, len(self.method.factors)))}
        self.together, self.exchange = Together(process_group), cast("Exchange | None", None)
        self.steps, self.skipped, self._skipped_in_a_row, self._skip_cause, self._ready = 0, 0, 0, "", False
        self.watchers, self.rescues = list[Watcher](), Counter[str]()  # rescues: "layer factor: how" -> how often
        self.told, self.waiting = set[str](), False  # layers that were looked at; whether one waits for its factors
        self.found_reduction: str | None = None  # of the loss, from the derivative that the first step saw; "": none
        self.found_class_dim = capture_options.class_dim  # of an output with positions
        self._capture: Capture | None = None
        groups = momentum_entries(momentum, nesterov, self.momentum_kind, options.trust is not None)
        groups |= {"lr": lr, "fallback_lr": fallback_lr, "damping": damping, "maximize": maximize}
        groups |= {"weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(checked_params(model, params), groups)
        self.register_state_dict_post_hook(complete_state)  # type: ignore[arg-type]  # first, so that hooks of the user's own see it all
        self.generator, self._ready = torch.Generator(device_of(self)).manual_seed(options.seed), True
        _listen(self)
        check_layers(self)
        check_dtypes(self)
        check_processes(self)
        self.warn()

    # What a method says for itself.
    def measure(self, layer: LayerEntry, statistics: LayerStatistics | None, step: Transaction) -> Blocks:
        """Measure a layer's factors on this batch, by block and factor name; none for a method without curvature.

        Args:
            layer: The layer and its blocks.
            statistics: What this batch's passes gave for the layer; None: nothing.
            step: The step that is being taken; it holds the state as it will be.
        """
        raise NotImplementedError

    def precondition(self, layer: LayerEntry, block: str, G: Move, step: Transaction) -> Move:
        """Compute the direction for the gradient of a block.

        Args:
            layer: The layer and its blocks.
            block: The weight or the bias.
            G: The gradient of the block.
            step: The step that is being taken; it holds the state as it will be.
        """
        return apply(step.value(layer, "operators")[block], G)

    def warn(self) -> None:
        """What a user should know of the model before the first step."""

    def check_tables(self) -> None:
        """Refuse layers that the method can do nothing with."""

    def notes(self) -> list[str]:
        """What ``plan`` says below its table of the method's choices."""
        return []

    def powers_of(self, number: int) -> dict[str, Fraction]:
        """By factor, the power of it that the gradient of a block is divided by.

        Args:
            number: How many factors the block has.
        """
        return {statistic.name: e for statistic, e in self.method.factors}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in any optimizer of torch; its layers are preconditioned from the next step on.

        Args:
            param_group: Parameters and the options that differ from the defaults.
        """
        try:
            before = len(self.param_groups)
            super().add_param_group(completed_group(self, param_group))
            check_group(self.param_groups[-1])
            if self._ready:
                _listen(self)
        except BaseException:
            del self.param_groups[before:]
            raise

    @property
    def capture(self) -> Capture:
        """The hooks on the model and what they have measured since the last step."""
        assert self._capture is not None
        return self._capture

    def rule_of(self, layer: LayerEntry, block: str) -> Rule:
        """The damping rule of a layer, with the number that its group has now.

        Args:
            layer: The layer and its blocks.
            block: The weight or the bias.
        """
        return Rule.of_group((layer.blocks.get(block) or next(iter(layer.blocks.values()))).group)

    def rate(self, name: str) -> float:
        """The learning rate of a parameter: its group's, times the parametrization's multiplier.

        Args:
            name: The parameter's name in the model.
        """
        entry = entry_of(self.entries, name)
        return base_rate(entry) * entry.scale

    # The step.
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, or skip it and change nothing if a number is not finite.

        Args:
            closure: Computes the loss and its gradients, and returns the loss; needed by damping that adapts alone.
        """
        if self.together.owned is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self.exchange = exchange_of(self)
        if (initial := not self.steps + self.skipped and initializes_state(self, closure)) and self.exchange is None:
            return None
        ratio = ReductionRatio(self, closure) if any(group.get("adaptive") for group in self.param_groups) else None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        try:
            if self.exchange is not None and check_alike(self, initial):
                return None
            step, moves = _attempt(self, ratio, loss)
        except BaseException:
            self.capture.forget()
            raise
        if moves is None:
            self.skipped, self._skipped_in_a_row = self.skipped + 1, self._skipped_in_a_row + 1
            tell_skips(self, step)
            return loss
        step.commit()
        self.steps, self._skipped_in_a_row, self.waiting = self.steps + 1, 0, step.waiting
        coming = wants(self)
        with stage("mukron::write"):
            write(updates_of(self, moves, step.rates))
        self.capture.commit(*coming)
        if self.watchers or step.rescues or step.imprecise or step.shortened or step.remarks:
            tell(self, step)
        return loss

    # What a user may call beside ``step``.
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the statistics of their passes go with them.

        Args:
            set_to_none: True: gradients become None. False: they become zero.
        """
        self.capture.forget()
        super().zero_grad(set_to_none)

    def close(self) -> None:
        """Take the hooks off the model. The optimizer can no longer step."""
        self.capture.close()
        self._changes = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes inside are not measured, and leave no trace in the optimizer."""
        before, self.capture.paused = self.capture.paused, True
        try:
            yield
        finally:
            self.capture.paused = before

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call a function whenever inverses are made; returns a function that ends this.

        Args:
            watcher: Called as ``watcher(layer, block, factors, damping)``.
        """
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)

    plan = plan_table

    # Saving, loading, copying.
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, bit for bit; refuses one that does not fit and then changes nothing.

        Args:
            state_dict: What ``state_dict`` returned.
        """
        load_state(self, state_dict)
        _listen(self)

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this very model: hooks, and tables of its tensors."""
        kept = {name: value for name, value in self.__dict__.items() if name not in TIED_TO_THE_MODEL}
        return {**kept, **super().__getstate__(), "generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        generator = state.pop("generator", None)
        super().__setstate__(state)
        if generator is not None:  # torch's load_state_dict passes groups and states alone
            unpickle(self, generator)
            _listen(self)


def _listen(optimizer: SecondOrder) -> None:
    """Build the tables of parameters and layers anew, put hooks on those layers, and give parameters their state."""
    options, measured = optimizer.options, optimizer.capture_options
    rates = (options.trust and options.trust.rates) or optimizer.method
    optimizer.entries, optimizer.layers = build_tables(
        optimizer.model, optimizer.param_groups, options, optimizer.parametrization, optimizer.method,
        (rates, options.fallback.name), measured.measures or measured.fused,
    )  # fmt: skip
    refuse_sharded(optimizer.model, replicas=False)
    optimizer.check_tables()
    if optimizer._capture is not None:
        optimizer._capture.close()
    entries = optimizer.layers if measured.measures or measured.fused else {}
    heard = {name: entry.layer for name, entry in entries.items()}
    others = {other: (name, layer) for name, of in entries.items() for other, layer in of.others.items()}
    optimizer._capture = Capture(unwrap(optimizer.model), heard, measured, optimizer.generator, others)
    optimizer._capture.class_dim = optimizer.found_class_dim
    optimizer._capture.ranks = partial(ranks_of, optimizer.model, optimizer.together.group)
    optimizer.exchange, optimizer._changes = None, changes_of(optimizer)
    if ranks_of(optimizer.model, optimizer.together.group) is not None:
        hold_as_exchanged(optimizer)
    optimizer._capture.due, optimizer._capture.double = wants(optimizer)
    reserve(optimizer)


def _attempt(
    optimizer: SecondOrder, ratio: ReductionRatio | None, loss: Any
) -> tuple[Transaction, dict[str, Move] | None]:
    """The step and what it moves every parameter by; None: it must be skipped. Nothing is changed yet.

    All is launched as if nothing could go wrong, and the device is read once, at the end. Only then, if an inverse
    did not come out well or a gradient is not what it was taken for, is a part of it done again.
    """
    if optimizer.capture.gradients and all(noted.parameter.grad is None for noted in optimizer.capture.gradients):
        optimizer.capture.forget()  # they were thrown away, and nothing came after them
    if optimizer._changes is not None:
        check_changes(optimizer, optimizer._changes)
    if not optimizer.steps + optimizer.skipped and optimizer.exchange is None:
        warn_of_no_group()
    passes, exchange = optimizer.capture.passes, optimizer.exchange
    if exchange is None and optimizer.capture_options.jacobian:
        refuse_partial(optimizer, [seen_in(passes)])
    joint = Joint(gather(passes), passes, partial(along, passes)) if exchange is None else exchange.gather(passes)
    step = Transaction(optimizer, joint)
    step.applied = {} if ratio is not None and ratio.groups else None
    asks = optimizer.capture.asks_reduction and all(one.checked for one in step.passes)
    if optimizer.capture.checks_uses or asks:
        check_uses(optimizer, step)
    made, counts = False, None
    while counts is None:
        if exchange is not None:
            moves, counts = exchange.agree(step, made)
        else:
            if not made:
                with stage("mukron::factors"):
                    step.measure()
                with stage("mukron::invert"):
                    step.prepare()
            with stage("mukron::apply"):
                moves = {} if step.operators_failed else directions(optimizer, step)
            counts = step.decide(moves)
        made = True
    if counts and not step.double <= optimizer.told:
        check_precision(optimizer, step)
    if counts and step.nu != 1:
        clipped = {name for name in moves if optimizer.entries[name].preconditioned}
        moves = {name: times(move, step.nu if name in clipped else 1.0) for name, move in moves.items()}
    if counts and ratio is not None and ratio.groups:
        ratio.adapt(step, moves, loss)
    if counts and exchange is not None:
        moves = exchange.share(step, moves)
    return step, moves if counts else None
