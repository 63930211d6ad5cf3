"""The coordinate check, for any network, any method and any batch: are features learned at every width?

result = coordinate_check(Net, lambda model, plan: KFAC(model, plan, lr=0.01), (x, y), base_width=64)
print(result)
result.assert_ok()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mukron import figures
from mukron.diagnose.drawing import against_width, over_steps
from mukron.diagnose.readings import DAMPING, FEATURES, TOLERANCE, UNCLEAR, UPDATE, Verdict, judge, table_of
from mukron.diagnose.record import OUTPUT, Record, Row, Started, batch_device, run
from mukron.exponents import fit_exponent
from mukron.params import Parametrization, base_shapes, parametrize
from mukron.params.storage import check_stamp, damaged, read_json, stamp, write_json
from mukron.table import Table
from mukron.theory import get_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND, VERSION = "check", 1
MEANING = (
    "features: change of a layer's output; own update: dW h, a parameter's part in it; both fitted by width^exponent"
)
DAMPING_MEANING = (
    "damping over the largest eigenvalue of a layer's curvature factor (A, R: of its input, B, L: of its output)",
    "drowns the factor: the step turns into one of first order; fades: damping loses its hold. Features decide.",
)
LARGE = 3.0  # of the output: a change that is no longer a first step
SPECTRA = {"largest": "-", "mean": "--", "damping": ":"}
NAMES = {"largest": "largest eigenvalue", "mean": "mean eigenvalue", "damping": "damping", "distance": "|dW| / |W|"}


@dataclass(frozen=True)
class Check:
    """What a check found: verdicts, tables, figures, and the record that they are read from."""

    record: Record
    tolerance: float = TOLERANCE

    @cached_property
    def features(self) -> list[Verdict]:
        """The change of every layer's features and of the output, and every parameter's own part in it."""
        return [*judge(self.record, FEATURES, self.tolerance), *judge(self.record, UPDATE, self.tolerance)]

    @cached_property
    def damping(self) -> list[Verdict]:
        """Damping over the factor's largest eigenvalue: in a valid second-order method it does not grow."""
        return judge(self.record, DAMPING, self.tolerance)

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.features if not verdict.ok]

    @property
    def ok(self) -> bool:
        """Whether every layer learns alike at every width. Damping alone does not decide: features do."""
        return not self.failures and not self.record.broken

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    @property
    def title(self) -> str:
        method = get_method(self.record.method).title if self.record.method else "this optimizer"
        widths = f"{self.record.widths[0]:g} to {self.record.widths[-1]:g}"
        damping = f", damping {self.record.damping}" if self.record.damping else ""
        steps = f"{self.record.steps} step" + ("s" if self.record.steps > 1 else "")
        setting = f", {self.record.setting}" if self.record.setting else ""
        return f"{method}, {self.record.scheme}{damping}{setting}, widths {widths}, {steps}"

    def assert_ok(self) -> None:
        """For tests: raises AssertionError with the verdict and the table."""
        if not self.ok:
            raise AssertionError(f"{self.verdict()}\n\n{self.table()}")

    def verdict(self) -> str:
        """In words."""
        if self.ok:
            return "OK: every layer learns alike at every width."
        broken = list(self.record.broken.items())
        said = [f"{len(broken)} of the runs broke ({broken[0][0]}: {broken[0][1]})."] if broken else []
        for word in dict.fromkeys(verdict.word for verdict in self.failures):
            named = [
                f"{verdict.layer} ({verdict.role + ', ' if verdict.role else ''}{verdict.reading})"
                for verdict in self.failures
                if verdict.word == word
            ]
            more = f" and {len(named) - 6} more" if len(named) > 6 else ""
            said.append(f"{word}: {', '.join(named[:6])}{more}.")
        return " ".join(["NOT OK.", *said, *self._remedies()])

    def _remedies(self) -> list[str]:
        words = {verdict.word for verdict in self.failures}
        remedies = []
        if not self.record.planned:
            remedies.append("The optimizer does not use the plan: give it plan.param_groups(...), or the plan itself.")
        if UNCLEAR in words:
            remedies.append("Unclear ones want more seeds, or wider networks: narrow ones bend the law.")
        starved = {verdict.layer.rpartition(".")[0] for verdict in self.failures if verdict.word == UPDATE.low}
        drowned = [
            verdict.layer
            for verdict in self.damping
            if verdict.word == DAMPING.high and verdict.layer.rpartition(".")[0] in starved
        ]
        if drowned:
            remedies.append(
                f"Damping outgrows its factor in {', '.join(drowned)}: muP needs a rule that keeps pace (rescaled)."
            )
        exploding = {verdict.layer.rpartition(".")[0] for verdict in self.failures if verdict.word == UPDATE.high}
        spread = [
            verdict.layer
            for verdict in self.damping
            if verdict.word == DAMPING.high and verdict.layer.endswith(".B") and verdict.layer[:-2] in exploding
        ]
        if spread and self.record.scheme == "mup":
            remedies.append(
                f"B is outgrown by its damping in {len(spread)} layers: with more rows (samples x positions) than "
                "channels these widths are too narrow for the law. Compare wider networks, or fewer samples."
            )
        if self.record.scheme != "mup" and words & {FEATURES.low, FEATURES.high}:
            remedies.append(f"The scheme is {self.record.scheme}; mup is the one that keeps all layers learning.")
        moved = max((row.value for row in self.record.select(FEATURES.quantity, OUTPUT)), default=0.0)
        if self.record.broken or moved > LARGE:
            far = f" (the output moved by {moved:.3g})" if moved > LARGE else ""
            remedies.append(f"A lower learning rate keeps steps small enough for the law{far}.")
        return remedies

    def table(self, whole: bool = False) -> Table:
        return table_of(self.features, self.title, (MEANING, "", self.verdict()), whole)

    def damping_table(self, whole: bool = False) -> Table:
        return table_of(self.damping, f"Validity of damping. {self.title}", DAMPING_MEANING, whole)

    def spectra_table(self) -> Table:
        """Curvature factors after the last step: how their eigenvalues and their damping go with the width."""
        rows = []
        for layer in self.record.layers("largest"):
            cells = []
            for quantity in SPECTRA:
                predicted = self.record.predicted.get(f"{quantity}/{layer}")
                cells.append(_size_and_slope(self.record.select(quantity, layer), predicted))
            rows.append((layer, *cells))
        columns = ("factor", *(NAMES[quantity] for quantity in SPECTRA))
        note = "at the widest; then the exponent in the width [theory]"
        return Table(f"Curvature. {self.title}", columns, tuple(rows), (note,))

    def distance_table(self) -> Table:
        """How far parameters are from where they began, relative to that."""
        rows = [
            (name, self.record.roles.get(name, ""), _size_and_slope(self.record.select("distance", name), None))
            for name in self.record.layers("distance")
        ]
        note = "at the widest; then the exponent in the width"
        return Table(
            f"Distance from initialization. {self.title}", ("parameter", "role", "|dW| / |W|"), tuple(rows), (note,)
        )

    def figure(self, kind: str = "features") -> Figure:
        """ "features", "damping", "spectra" or "distance"."""
        if kind == "features":
            parts = [
                (FEATURES, judge(self.record, FEATURES, self.tolerance)),
                (UPDATE, judge(self.record, UPDATE, self.tolerance)),
            ]
            return against_width(self.record, parts, self.title)
        if kind == "damping":
            return against_width(self.record, [(DAMPING, self.damping)], self.title)
        if kind == "spectra":
            return over_steps(self.record, SPECTRA, NAMES, f"Curvature factors. {self.title}")
        if kind == "distance":
            return over_steps(self.record, {"distance": "-"}, NAMES, f"Distance from initialization. {self.title}")
        raise ValueError(f"unknown figure {kind!r}; known: features, damping, spectra, distance")

    def to_dict(self) -> dict[str, Any]:
        content = {
            "title": self.title,
            "ok": self.ok,
            "verdict": self.verdict(),
            "tolerance": self.tolerance,
            "features": [asdict(verdict) for verdict in self.features],
            "damping": [asdict(verdict) for verdict in self.damping],
            "record": self.record.to_dict(),
        }
        return stamp(KIND, VERSION, _without_infinities(content))

    def save(self, folder: str | Path) -> list[Path]:
        """check.json, and for each kind its numbers (CSV) and, with matplotlib, a figure (SVG and PNG)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "check.json", self.to_dict())
        written = [folder / "check.json"]
        kinds = {
            "features": ("features", "update"),
            "damping": ("ratio",),
            "spectra": tuple(SPECTRA),
            "distance": ("distance",),
        }
        for kind, quantities in kinds.items():
            rows = [row for row in self.record.rows if row.quantity in quantities]
            if rows:
                written.append(figures.write_csv(folder / kind, Row._fields, rows))
                written += figures.save(self.figure(kind), folder / kind) if figures.available() else []
        return written

    @classmethod
    def from_dict(cls, data: object, source: str = "check") -> Check:
        content = check_stamp(data, KIND, VERSION, source)
        with damaged(source):
            return cls(Record.from_dict(content["record"]), content["tolerance"])

    @classmethod
    def load(cls, path: str | Path) -> Check:
        """From a ``check.json``."""
        return cls.from_dict(read_json(path), str(path))

    def __str__(self) -> str:
        return str(self.table())


def _without_infinities(value: Any) -> Any:
    """JSON knows none: an interval without an end has null there."""
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size_and_slope(rows: Sequence[Row], predicted: float | None) -> str:
    widest = [row.value for row in rows if row.width == max(each.width for each in rows)]
    text = f"{sum(widest) / len(widest):.3g}"
    positive = [row for row in rows if row.value > 0]
    if len({row.width for row in positive}) < 2:
        return text
    slope = fit_exponent([row.width for row in positive], [row.value for row in positive]).slope
    return f"{text}, {slope:+.2f}" + ("" if predicted is None else f" [{predicted:+.2g}]")


def coordinate_check(
    factory: Callable[..., nn.Module],
    optimizer: Callable[[nn.Module, Parametrization], Optimizer],
    batch: tuple[Any, Any],
    *,
    base_width: float,
    widths: Sequence[float] | None = None,
    seeds: int | Sequence[int] = 3,
    steps: int = 3,
    scheme: str = "mup",
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    tolerance: float = TOLERANCE,
    output_exponent: float | str | None = None,
    roles: Mapping[str, str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Check:
    """Train a few steps at several widths and seeds, and fit how the size of each layer's change goes with the width.

    factory: builds the network for a width. optimizer: from the network and its plan to any torch optimizer.
    batch: inputs (one, a tuple, or by name) and targets, the same at every step; loss(output, targets).
    widths: 4, 8, 16 and 32 times the base width, if not given. Small learning rates keep to the law's regime.
    roles: of parameters that no known module owns, as ``base_shapes`` takes them.
    """
    from mukron.params.shapes import build

    shapes = base_shapes(factory, base_width, roles=roles)

    def start(width: float, seed: int) -> Started:
        torch.manual_seed(seed)
        model = build(factory, width).to(batch_device(batch))
        plan = parametrize(model, shapes, scheme, output_exponent=output_exponent)
        return Started(model, plan, optimizer(model, plan))

    widths = [base_width * times for times in (4, 8, 16, 32)] if widths is None else widths
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    record = run(start, batch, loss, widths=widths, seeds=seeds, steps=steps, progress=progress)
    return Check(replace(record, setting=f"base width {base_width:g}"), tolerance)
