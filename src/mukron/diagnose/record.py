"""The record of a coordinate check: what was measured at several widths and seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from mukron.notebook import Shown
from mukron.params import Parametrization
from mukron.table import Table
from mukron.theory import method_title
from mukron.typed import MaybeMissing, read_as

UNSEEN = "unseen"  # a quantity: what could not be looked at
HEAD = "head"  # a quantity: embeddings whose weight the output is a product with
SOURCE, FED = (
    "source of ",
    "fed by ",
)  # quantities: what a module's attention logits come from, and what its output goes into
OUTPUT = "output"
FROZEN, UNUSED, LEFT_OUT = "frozen", "unused", "not in the optimizer"


class Measurement(NamedTuple):
    """One measured number.

    Attributes:
        width: The width of the network.
        seed: The seed of the run.
        step: The number of steps after which it was measured.
        quantity: What was measured, such as ``"features"``.
        layer: The layer, parameter or curvature factor (``"fc1.A"``) that it belongs to.
        value: The number.

    Example:
        >>> from mukron.diagnose import Measurement
        >>> Measurement(64, 0, 1, "features", "fc1", 0.5).value
        0.5
    """

    width: float
    seed: int
    step: int
    quantity: str
    layer: str
    value: MaybeMissing


@dataclass(frozen=True)
class TrainingSetup:
    """A network with its optimizer, ready to train.

    Attributes:
        model: The network.
        plan: Its parametrization; None if it has none.
        optimizer: The optimizer of its parameters.
        forward: The function from inputs to outputs, if it is not the model itself (under autocast, or compiled).
        clip_norm: The norm to which gradients are clipped; None to leave them as they are.

    Example:
        >>> import torch
        >>> from mukron.diagnose import TrainingSetup
        >>> model = torch.nn.Linear(2, 1)
        >>> setup = TrainingSetup(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> setup.clip_norm is None
        True
    """

    model: nn.Module
    plan: Parametrization | None
    optimizer: Optimizer
    forward: Callable[[Any], Any] | None = None
    clip_norm: float | None = None


@dataclass(frozen=True, repr=False)
class Record(Shown):
    """What was measured in a coordinate check, and the exponents that theory predicts.

    Attributes:
        rows: The measurements.
        widths: The widths, in ascending order.
        steps: The number of steps of every run.
        method: The name of the method in ``mukron.theory``; empty if it is not known there.
        scheme: The name of the parametrization.
        damping: The damping rule; empty if there is none.
        roles: The roles by parameter and by layer.
        predicted: The exponents that theory predicts, by ``"quantity/layer"``.
        idle: The parameters and layers that are not trained, each with the reason: frozen, unused, or not
            in the optimizer.
        planned: Whether the optimizer uses the parametrization.
        setting: An addition to the title.
        about: The configuration and the versions of packages.
        broken: The runs that failed, such as ``"width 512, seed 0"``, each with the reason.
        tied: The parameters that are another one, by name: ``{"head.weight": "tokens.weight"}``.

    Example:
        >>> from mukron.diagnose import Measurement, Record
        >>> rows = tuple(Measurement(width, 0, 1, "features", "fc1", 0.5) for width in (64, 128))
        >>> record = Record(rows, (64, 128), 1, method="sgd", scheme="mup", damping="", roles={}, predicted={})
        >>> record.layers("features")
        ['fc1']
        >>> len(record.select("features", "fc1"))
        2
    """

    rows: tuple[Measurement, ...]
    widths: tuple[float, ...]
    steps: int
    method: str
    scheme: str
    damping: str
    roles: Mapping[str, str]
    predicted: Mapping[str, float]
    idle: Mapping[str, str] = field(default_factory=dict)
    planned: bool = True
    setting: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What was checked: method, scheme, damping, widths and steps."""
        method = method_title(self.method) if self.method else "this optimizer"
        damping = f", damping {self.damping}" if self.damping else ""
        steps = f"{self.steps} step" + ("s" if self.steps > 1 else "")
        setting = f", {self.setting}" if self.setting else ""
        return f"{method}, {self.scheme}{damping}{setting}, widths {self.widths[0]:g} to {self.widths[-1]:g}, {steps}"

    def layers(self, quantity: str) -> list[str]:
        """List the layers of a quantity in the order of the forward pass.

        Args:
            quantity: The quantity, such as ``"features"``.

        Returns:
            The names of layers, parameters or curvature factors.
        """
        return list(dict.fromkeys(row.layer for row in self.rows if row.quantity == quantity))

    def select(self, quantity: str, layer: str, step: int | None = None) -> list[Measurement]:
        """Select the measurements of a quantity and a layer.

        Args:
            quantity: The quantity, such as ``"features"``.
            layer: The layer, parameter or curvature factor.
            step: The number of steps; by default the last.

        Returns:
            The measurements, one for each width and seed.
        """
        step = self.steps if step is None else step
        return [row for row in self.rows if (row.quantity, row.layer, row.step) == (quantity, layer, step)]

    def joined(self, other: Record) -> Record:
        """Return this record with the measurements of another one, of the same network with other seeds.

        Args:
            other: The other record.

        Returns:
            The record of all runs.
        """
        return replace(self, rows=self.rows + other.rows, broken={**self.broken, **other.broken})

    def _summary(self) -> list[str]:
        runs = {(row.width, row.seed) for row in self.rows}
        seeds = len({seed for _, seed in runs})
        broken = f", {len(self.broken)} broke" if self.broken else ""
        quantities = dict.fromkeys(row.quantity.partition(" of ")[0].partition(" by ")[0] for row in self.rows)
        return [
            f"Measurements. {self.title}",
            f"{len(self.rows):,} numbers of {len(runs)} runs ({len(self.widths)} widths, {seeds} seeds){broken}",
            f"quantities: {', '.join(quantities)}; rows has the numbers, select(quantity, layer) some of them",
        ]

    def _tables(self) -> list[Table]:
        numbers = Counter(row.quantity for row in self.rows)
        steps: dict[str, set[int]] = {}
        for row in self.rows:
            steps.setdefault(row.quantity, set()).add(row.step)
        rows = tuple(
            (quantity, f"{len(self.layers(quantity))}", _range(steps[quantity]), f"{count:,}")
            for quantity, count in numbers.items()
        )
        return [Table("Measurements", ("quantity", "layers", "steps", "numbers"), rows)]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data for JSON."""
        return {**asdict(self), "widths": list(self.widths), "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Restore a record from plain data.

        Args:
            data: What ``to_dict`` returned.

        Returns:
            The record.
        """
        record: Record = read_as(cls, data, "record")
        if unknown := {row.width for row in record.rows}.difference(width for width in record.widths if width > 0):
            raise ValueError(f"record: expected widths above 0, as in {record.widths}, found {min(unknown)}")
        return record


def _range(steps: set[int]) -> str:
    first, last = min(steps), max(steps)
    return f"{first}" if first == last else f"{first} to {last}"
