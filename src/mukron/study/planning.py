"""From settings tuned at a narrow width to a wide network: its settings, the cost of a step, and the code.

The wide network is not built in this process: it is planned on the meta device, and if its memory suffices, its step is
measured in another process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from mukron.data import Dataset
from mukron.notebook import Shown
from mukron.optim.options import StepOptions, Trust, usual_fallback_lr
from mukron.optim.plan import DAMPING_RULES
from mukron.params import Parametrization, base_shapes, build_without_memory, parametrize
from mukron.params.merging import ParameterRow, merged
from mukron.params.storage import Data, stamp
from mukron.study.cost import (
    MeasuringError,
    StepCost,
    TrainingMemory,
    available_memory,
    measured,
    training_memory,
)
from mukron.study.errors import StudyError
from mukron.study.script import CLASSES, MASKED, POSITIONS, kind_of_targets, script
from mukron.table import Table, bytes_
from mukron.theory import SP, get_method, method_title
from mukron.train import RunConfig, base_width_of, batch_of, dataset_of, device_of, factory_of
from mukron.train.build import class_dim_of, network_of
from mukron.train.factories import network_options
from mukron.train.outputs import given_class_dim
from mukron.train.randomness import own_random_numbers
from mukron.trust import law_of

KIND, VERSION = "plan", 1


@dataclass(frozen=True)
class ParameterSettings:
    """The settings of one parameter of the wide network."""

    name: str
    role: str
    shape: tuple[int, ...]
    std: float | None  # of its initial values; 0: all are equal; None: they are left as drawn
    lr: float  # the tuned learning rate times its multiplier
    damping: Mapping[str, float]  # by factor: the damping as a multiple of that at the base width


@dataclass(frozen=True, repr=False)
class WidePlan(Shown):
    """The transferred settings of a wide network. Print ``layers()`` and ``cost()``, paste ``code()``."""

    tuned: RunConfig
    config: RunConfig  # the wide run
    parametrization: Parametrization
    network_options: Mapping[str, Any]  # keyword arguments of the network, apart from its width
    batch: int
    memory: TrainingMemory
    steps: tuple[StepCost, ...]  # the method's and SGD's; none if not measured
    not_measured: str = ""  # why not
    samples: int = 0  # to train on
    targets: str = CLASSES  # what the data's targets are
    data_dir: str | None = None  # where data sets are kept
    class_dim: int | None = None  # of an output with positions, where that is known

    @property
    def settings(self) -> tuple[ParameterSettings, ...]:
        config, options, trust = self.config, self.config.method_options, _trust(self.config)
        method = config.spec.method
        usual = StepOptions.of(method, trust, fallback=options.get("fallback"), exclude=options.get("exclude"))
        fallback = usual.fallback
        fallback_lr = (
            options.get("fallback_lr")
            or usual_fallback_lr(method, usual, config.lr, config.spec.bounded_lr)
            or config.lr
        )
        scales, fallback_scales = self.parametrization.scales(config.method), self.parametrization.scales(fallback.name)
        rates = self.parametrization.scales((trust and trust.rates) or config.method)
        settings = []
        for name, plan in self.parametrization.parameters.items():
            falls_back = config.spec.layerwise and self.parametrization.falls_back(name, usual.exclude, method)
            lr = fallback_lr * fallback_scales[name].lr if falls_back else config.lr * rates[name].lr
            damping = {} if falls_back else dict(scales[name].damping)
            settings.append(ParameterSettings(name, plan.role.value, plan.shape, plan.std, lr, damping))
        return tuple(settings)

    def layers(self, *, whole: bool = False) -> Table:
        """Tabulate the role, shape, initial std, learning rate and damping multiple of every parameter.

        Args:
            whole: One row a parameter. Otherwise equal rows are one, as ``blocks.0-3.mlp.up.weight``.

        Returns:
            The table.
        """
        config, method = self.config, get_method(self.config.method)
        factors = [factor.name for factor in method.damped]
        rows = [
            ParameterRow(
                setting.name,
                (
                    *(setting.role, " x ".join(map(str, setting.shape)) or "1", f"{setting.lr:.4g}"),
                    *(f"{setting.damping[name]:.4g}" if name in setting.damping else "-" for name in factors),
                ),
                setting.std,
                prod(self.parametrization.parameters[setting.name].base_shape),
                digits=4 if whole else 3,
            )
            for setting in self.settings
        ]
        lines = tuple(
            (row.name, *row.cells[:2], row.std_text, *row.cells[2:]) for row in (rows if whole else merged(rows))
        )
        columns = ("parameter", "role", "shape", "initial std", "learning rate", *(f"rho_{name} x" for name in factors))
        sizes = f"width {config.width:g}, settings of base width {config.base_width:g}"
        title = f"{method_title(config.method)}, {config.scheme}, {sizes}"
        return Table(title, columns, lines, tuple(_meaning(config)))

    def cost(self) -> Table:
        """Tabulate time and peak memory of a step and of SGD's; where not measured, the counted memory."""
        memory, where = self.memory, f"width {self.config.width:g}, batch {self.batch}, {self.config.device}"
        held = bytes_(memory.weights + memory.gradients + memory.moments)
        count = f"{memory.parameters:,} parameters; weights, gradients and moments take {held}."
        if self.steps:
            columns = ("method", "time", "x SGD", "peak memory", "x SGD")
            rows = tuple(step.row(self.steps[-1]) for step in self.steps)
            return Table(f"A step, {where}", columns, rows, (count, self._how_measured()))
        parts = {**asdict(memory), "total": memory.total}
        counted = tuple((name, bytes_(size)) for name, size in parts.items() if name != "parameters")
        why = f"Counted, not measured, and without its time: {self.not_measured}."
        return Table(f"Memory of a step, {where}", ("what", "memory"), counted, (count, why))

    def _how_measured(self) -> str:
        every = self.config.spec.interval(self.config.method_options)
        over = f"mean over the {every} steps from one inverse to the next" if every > 1 else "median"
        plain = ", without torch.compile" if self.config.compile else ""
        return f"Measured here, each method in a process of its own: forward, backward and step, {over}{plain}."

    @property
    def by_layer(self) -> Table | None:
        """The cost of every layer, from the optimizer's ``plan()`` after a step; None if no step was measured."""
        return self.steps[0].layers if self.steps else None

    def code(self) -> str:
        """A Python script that trains the wide network with these settings."""
        batch = self.batch if self.batch < self.samples else None
        config = self.config.replace(batch=batch, class_dim=self.class_dim)
        return script(config, self.network_options, self.targets, self.data_dir)

    def _summary(self) -> list[str]:
        config, memory = self.config, bytes_(self.memory.total)
        damping = "" if config.damping is None else f", damping {config.damping.text()}"
        return [
            f"{config.model} on {config.data}, {method_title(config.method)}, {config.scheme}: width {config.width:g}",
            f"learning rate {config.lr:.4g}{damping} at base width {config.base_width:g}; multipliers are in layers()",
            f"{self.memory.parameters:,} parameters, about {memory} to train; cost() has more, code() trains it",
        ]

    def _tables(self) -> list[Table]:
        return [self.layers(), self.cost(), *([] if self.by_layer is None else [self.by_layer])]

    def to_dict(self) -> Data:
        content = {
            "tuned": self.tuned.to_dict(),
            "config": self.config.to_dict(),
            "layers": [asdict(setting) for setting in self.settings],
            "batch": self.batch,
            "bytes": {**asdict(self.memory), "total": self.memory.total},
            "steps": [asdict(step) for step in self.steps],
            "not_measured": self.not_measured,
            "code": self.code(),
        }
        return stamp(KIND, VERSION, content)


def plan_for(
    tuned: RunConfig,
    width: float,
    *,
    dataset: Dataset | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    steps: int = 3,
) -> WidePlan:
    """Plan a run at another width than that at which it was tuned.

    Args:
        tuned: The best run of a study, ``StudyRecord.best()``. Its learning rate holds at its base width.
        width: The width to plan for.
        dataset: The run's data, if it is loaded already.
        data_dir: Where data sets are kept.
        steps: How many steps to measure at that width, on the run's device. Nothing is measured with 0, and where
            memory would not suffice or a step takes minutes; the plan then says why.

    Returns:
        The plan.

    Raises:
        StudyError: The run was tuned under SP, where settings do not transfer.
        UntrustedError: A file names functions of the run.
    """
    tuned.trusted(False)
    if tuned.scheme == SP.name:
        raise StudyError(
            "these settings were tuned under SP (scheme 'sp'), where the best learning rate and damping move with the "
            "width: they do not transfer. Tune with scheme 'mup'"
        )
    base = base_width_of(tuned)
    damping = tuned.spec.damping if tuned.damping is None else tuned.damping
    config = tuned.replace(width=width, base_width=base, damping=damping)
    dataset = dataset_of(config, dataset, None if data_dir is None else Path(data_dir))
    batch = batch_of(config, dataset)
    factory = factory_of(config, dataset)
    network = build_without_memory(factory, config.width)
    shapes = base_shapes(factory, base, roles=dict(config.roles))
    parametrization = parametrize(network, shapes, **config.plan_options)
    memory = training_memory(config, network, dataset, batch)
    plan = WidePlan(
        *(tuned, config, parametrization, network_options(config, dataset), batch, memory, ()),
        samples=len(dataset.train),
        targets=kind_of_targets(dataset),
        data_dir=None if data_dir is None else os.fspath(data_dir),
        class_dim=_class_dim(config, dataset),
    )
    if not steps:
        return replace(plan, not_measured="it was not asked for")
    free = available_memory(config.device)
    if memory.total > free:
        why = f"it takes about {bytes_(memory.total)}, and {bytes_(free)} are free here; plan it on a larger machine"
        return replace(plan, not_measured=why)
    try:
        return replace(plan, steps=measured(config, dataset, batch, steps))
    except MeasuringError as error:
        return replace(plan, not_measured=str(error))


def _class_dim(config: RunConfig, dataset: Dataset) -> int | None:
    """Where the classes are: as the run says, or, for a loss of the user's own, as a narrow network's output shows."""
    known = given_class_dim(config)
    if known is not None or ":" not in config.loss or kind_of_targets(dataset) not in (POSITIONS, MASKED):
        return known
    narrow = config.replace(width=base_width_of(config), compile=False)
    with own_random_numbers(device_of(narrow)):
        model, _ = network_of(narrow, dataset)
        return class_dim_of(narrow, model, dataset)


def _trust(config: RunConfig) -> Trust | None:
    """Return the bound on a layer's move: the run's, or the method's own."""
    return Trust.of(config.spec.all_options(config.method_options).get("trust"))


def _meaning(config: RunConfig) -> list[str]:
    """Return notes on the numbers in the table of layers."""
    notes = [law_of(_trust(config), config.spec.method)] if config.spec.layerwise else []
    if config.damping is not None:
        moves = not config.damping.transfers
        notes.append(f"damping {config.damping.text()} at every width: {DAMPING_RULES[type(config.damping).__name__]}.")
        notes.append(
            "'rho x' columns: how many times that of the base width a layer's damping should be, which this rule "
            + ("does not keep to." if moves else "sees to.")
        )
        if moves:
            recommended = config.spec.damping
            assert recommended is not None
            notes.append(
                "WARNING: with this rule the best settings move with the width, muP or not; tune with --damping "
                + recommended.text().partition(":")[0]
            )
    if config.weight_decay:
        law = "every layer alike at every width" if config.decay == "constant" else f"by the law {config.decay}"
        notes.append(f"weight decay {config.weight_decay:g} shrinks {law}.")
    return notes
