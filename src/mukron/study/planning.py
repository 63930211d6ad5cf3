"""From settings tuned at a narrow width to a wide network: its settings, what a step of it costs, and the code.

Nothing as large as the wide network is built here: its plan is made on the meta device, and its step is measured in a
process of its own, once it is known to fit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mukron.damping import Constant, Heuristic
from mukron.data import Dataset
from mukron.models import get_model
from mukron.params import Parametrization, base_shapes, build_without_memory, parametrize
from mukron.params.storage import Data, stamp
from mukron.study.cost import MeasuringError, Sizes, StepCost, available_memory, bytes_, measured, sizes_of
from mukron.study.errors import StudyError
from mukron.study.script import script
from mukron.table import Table
from mukron.theory import SP, get_method
from mukron.train import RunConfig, base_width_of, dataset_of, factory_of

KIND, VERSION = "plan", 1
BREAK_MUP = (Heuristic, Constant)
RULES = {  # what a damping number says
    "Rescaled": "that many times a factor's trace over its size at the base width",
    "MaxEigenvalue": "that many times a factor's largest eigenvalue",
    "Fixed": "its numbers for the two sides, times the 'rho x' columns",
    "Heuristic": "its root, balanced between A and B by their mean eigenvalues",
    "Constant": "that number itself, in every layer",
}


@dataclass(frozen=True)
class Setting:
    """One parameter of the wide network."""

    name: str
    role: str
    shape: tuple[int, ...]
    std: float | None  # of its initial values; 0: all equal
    lr: float  # its own: the tuned one times its multiplier
    damping: Mapping[str, float]  # by factor: how much more of it than at the base width


@dataclass(frozen=True)
class WidePlan:
    """The transferred settings of a wide network. Print ``layers()`` and ``cost()``, paste ``code()``."""

    tuned: RunConfig
    config: RunConfig  # the wide run
    parametrization: Parametrization
    network_options: Mapping[str, Any]  # keyword arguments of the network beside its width
    batch: int
    sizes: Sizes
    steps: tuple[StepCost, ...]  # the method's own and, beside it, SGD's; none if not measured
    not_measured: str = ""  # why

    @property
    def settings(self) -> tuple[Setting, ...]:
        config, options = self.config, self.config.method_options
        fallback = options.get("fallback", "sgd")
        fallback_lr = config.lr if options.get("fallback_lr") is None else options["fallback_lr"]
        own, others = self.parametrization.scales(config.method), self.parametrization.scales(fallback)
        rates = self.parametrization.scales(options.get("graft") or config.method)
        settings = []
        for name, plan in self.parametrization.parameters.items():
            excluded = any(name.startswith(f"{layer}.") for layer in options.get("exclude", ()))
            left = config.spec.layerwise and (plan.fallback or excluded)  # to the fallback rule
            lr = fallback_lr * others[name].lr if left else config.lr * rates[name].lr
            damping = {} if left else dict(own[name].damping)
            settings.append(Setting(name, plan.role.value, plan.shape, plan.std, lr, damping))
        return tuple(settings)

    def layers(self) -> Table:
        """For every parameter: role, shape, initial std, learning rate, and how its damping has grown."""
        config, method = self.config, get_method(self.config.method)
        factors = [factor.name for factor in method.damped]
        rows = tuple(
            (
                *(each.name, each.role, " x ".join(map(str, each.shape)) or "1"),
                "as drawn" if each.std is None else f"{each.std:.4g}" if each.std else "constant",
                f"{each.lr:.4g}",
                *(f"{each.damping[name]:.4g}" if name in each.damping else "-" for name in factors),
            )
            for each in self.settings
        )
        columns = ("parameter", "role", "shape", "initial std", "learning rate", *(f"rho_{name} x" for name in factors))
        title = f"{method.title}, {config.scheme}, width {config.width:g}, settings of base width {config.base_width:g}"
        return Table(title, columns, rows, tuple(_meaning(config)))

    def cost(self) -> Table:
        """Time and peak memory of a step beside SGD's; where it was not measured, what memory it takes by count."""
        sizes, where = self.sizes, f"width {self.config.width:g}, batch {self.batch}, {self.config.device}"
        held = bytes_(sizes.weights + sizes.gradients + sizes.moments)
        count = f"{sizes.parameters:,} parameters; weights, gradients and moments take {held}."
        if self.steps:
            columns = ("method", "time", "x SGD", "peak memory", "x SGD")
            rows = tuple(each.row(self.steps[-1]) for each in self.steps)
            return Table(f"A step, {where}", columns, rows, (count, self._how_measured()))
        parts = {**asdict(sizes), "total": sizes.total}
        counted = tuple((name, bytes_(size)) for name, size in parts.items() if name != "parameters")
        why = f"Counted, not measured, and without its time: {self.not_measured}."
        return Table(f"Memory of a step, {where}", ("what", "memory"), counted, (count, why))

    def _how_measured(self) -> str:
        every = self.config.method_options.get("inverse_every", 1)
        over = f"mean over the {every} steps from one inverse to the next" if every > 1 else "median"
        plain = ", without torch.compile" if self.config.compile else ""
        return f"Measured here, each method in a process of its own: forward, backward and step, {over}{plain}."

    @property
    def by_layer(self) -> Table | None:
        """What each layer costs, as the optimizer's ``plan()`` has it after a step; None if it has not made one."""
        return self.steps[0].layers if self.steps else None

    def code(self) -> str:
        """A Python script that trains the wide network with these settings, on a ``loader`` of your own."""
        return script(self.config, self.network_options)

    def to_dict(self) -> Data:
        content = {
            "tuned": self.tuned.to_dict(),
            "config": self.config.to_dict(),
            "layers": [asdict(each) for each in self.settings],
            "batch": self.batch,
            "bytes": {**asdict(self.sizes), "total": self.sizes.total},
            "steps": [asdict(each) for each in self.steps],
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
    """What a run that was tuned at its width becomes at another one.

    tuned: the best run of a study, ``StudyRecord.best()``; learning rates count from its base width.
    steps: how many steps to measure at that width, on the run's device; 0 measures none. Where memory would not do, or
        it takes minutes, nothing is measured either, and the plan says so.
    """
    if tuned.scheme == SP.name:
        raise StudyError(
            "these settings were tuned under SP (scheme 'sp'), where the best learning rate and damping move with the "
            "width: they do not transfer. Tune with scheme 'mup'"
        )
    base = base_width_of(tuned)
    damping = tuned.spec.damping if tuned.damping is None else tuned.damping
    config = tuned.replace(width=width, base_width=base, damping=damping)
    dataset = dataset_of(config, dataset, None if data_dir is None else Path(data_dir))
    batch = min(config.batch or len(dataset.train), len(dataset.train))
    factory = factory_of(config, dataset)
    network = build_without_memory(factory, config.width)
    shapes = base_shapes(factory, base, roles=dict(config.roles))
    parametrization = parametrize(network, shapes, config.scheme, output_exponent=config.output_exponent)
    sizes = sizes_of(config, network, dataset, batch)
    options = dict(config.model_options)
    if ":" not in config.model:
        options = {**get_model(config.model).options(dataset.input_shape, dataset.classes), **options}
    plan = WidePlan(tuned, config, parametrization, options, batch, sizes, ())
    if not steps:
        return replace(plan, not_measured="it was not asked for")
    free = available_memory(config.device)
    if sizes.total > free:
        why = f"it takes about {bytes_(sizes.total)}, and {bytes_(free)} are free here; plan it on a larger machine"
        return replace(plan, not_measured=why)
    try:
        return replace(plan, steps=measured(config, dataset, batch, steps))
    except MeasuringError as error:
        return replace(plan, not_measured=str(error))


def _meaning(config: RunConfig) -> list[str]:
    """What a user should know of the numbers in the table of layers."""
    notes = []
    if config.damping is not None:
        moves = isinstance(config.damping, BREAK_MUP)
        notes.append(f"damping {config.damping.text()} at every width: {RULES[type(config.damping).__name__]}.")
        notes.append(
            "'rho x' columns: how many times that of the base width a layer's damping should be, which this rule "
            + ("does not keep to." if moves else "sees to.")
        )
        if moves:
            own = config.spec.damping
            assert own is not None
            notes.append(
                "WARNING: with this rule the best settings move with the width, muP or not; tune with --damping "
                + own.text().partition(":")[0]
            )
    if config.weight_decay:
        notes.append(f"weight decay {config.weight_decay:g} shrinks every layer alike at every width.")
    return notes
