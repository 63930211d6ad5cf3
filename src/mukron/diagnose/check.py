"""The coordinate check, for any network, any method and any batch: does it learn features at every width?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mukron import figures
from mukron.diagnose.drawing import against_width, over_steps
from mukron.diagnose.readings import (
    DAMPING,
    EARLY,
    EXPONENT_TOLERANCE,
    LEARNING,
    ROUNDED,
    UNCLEAR,
    Verdict,
    judge,
    judge_logits,
    table_of,
)
from mukron.diagnose.record import FED, HEAD, SOURCE, UNSEEN, Measurement, Record
from mukron.diagnose.remedies import remedies
from mukron.exponents import fit_exponent
from mukron.notebook import Shown
from mukron.params.storage import check_stamp, damaged, read_json, stamp, write_json
from mukron.table import Table
from mukron.typed import read_as

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND, VERSION = "check", 1
MEANINGS = {  # of the rows of a table, each fitted by width^exponent
    "features": "change of a layer's output; that of an output layer may fall, but not along the descent",
    "attention": "change of attention logits along the descent of the loss",
    "own update": "dW h, a parameter's part in its layer's change",
    "descent": "change of the network's output along the descent of the loss",
    "logits": "initial size of attention logits, where the size d of a head grows",
}
DAMPING_MEANING = (
    "damping over the largest eigenvalue of a layer's curvature factor (A, R: of its input, B, L: of its output)",
    "drowns the factor: the step turns into one of first order; fades: damping loses its hold. Features decide.",
)
EARLY_MEANING = (
    " Where the size of heads grows, the first steps of this method do not follow the law of queries, keys and learned "
    "position biases yet, so these are not judged; check them with AdamW or Shampoo."
)
NOTES = {
    EARLY: EARLY_MEANING,
    ROUNDED: " Steps that are rounded away are too small to be seen; --set dtype=float64 shows them.",
}
UNSEEN_MEANING = (
    " Attention logits were not looked at: the loss has no derivative by them, as under activation checkpointing or "
    "where what comes after them starts at zero. Check without it."
)
SPECTRA = {"largest": "-", "mean": "--", "damping": ":"}
NAMES = {"largest": "largest eigenvalue", "mean": "mean eigenvalue", "damping": "damping", "distance": "|dW| / |W|"}
FIGURES = {  # by kind, the quantities that are in its CSV
    "features": tuple(reading.quantity for reading in LEARNING),
    "damping": ("ratio",),
    "spectra": tuple(SPECTRA),
    "distance": ("distance",),
}


@dataclass(frozen=True, repr=False)
class Check(Shown):
    """The result of a coordinate check: verdicts, tables and figures, all derived from the record.

    Attributes:
        record: What was measured.
        tolerance: The largest exponent that still counts as zero.

    Example:
        >>> from mukron.diagnose import Check, Measurement, Record
        >>> widths = (64, 128, 256)
        >>> rows = tuple(Measurement(width, seed, 1, "features", "fc1", 0.5) for width in widths for seed in (0, 1))
        >>> check = Check(Record(rows, widths, 1, method="kfac", scheme="mup", damping="", roles={}, predicted={}))
        >>> check.ok
        True
        >>> [(verdict.layer, verdict.word) for verdict in check.features]
        [('fc1', 'learns')]
    """

    record: Record
    tolerance: float = EXPONENT_TOLERANCE

    @cached_property
    def features(self) -> list[Verdict]:
        """The verdicts on the change of every layer's features, on attention logits, on every parameter's update.

        The last one is on the change of the network's output along the descent of the loss.
        """
        judged = [verdict for reading in LEARNING for verdict in judge(self.record, reading, self.tolerance)]
        return judged + judge_logits(self.record, self.tolerance)

    @cached_property
    def damping(self) -> list[Verdict]:
        """The verdicts on the ratio of the damping to the factor's largest eigenvalue, which must not grow."""
        return judge(self.record, DAMPING, self.tolerance)

    @property
    def failures(self) -> list[Verdict]:
        """The verdicts on features and updates that do not pass."""
        return [verdict for verdict in self.features if not verdict.ok]

    @property
    def ok(self) -> bool:
        """Whether every layer learns by the same amount at every width. The verdicts on damping do not count."""
        return not self.failures and not self.record.broken

    @property
    def unclear(self) -> bool:
        """Whether nothing is known to fail, but the seeds and widths do not suffice to say that all is well."""
        return not self.ok and not self.record.broken and all(verdict.word == UNCLEAR for verdict in self.failures)

    @property
    def exit_code(self) -> int:
        """The exit status of a command that reports this check: 0 if it is passed, 1 if not, 4 if it is unclear."""
        return 0 if self.ok else 4 if self.unclear else 1

    @property
    def title(self) -> str:
        """The line above tables and figures: method, scheme, damping, widths and steps."""
        return self.record.title

    def assert_ok(self) -> None:
        """Raise an error unless the check is passed; for use in tests.

        Raises:
            AssertionError: The check is not passed. The message holds the verdict and the table.
        """
        if not self.ok:
            raise AssertionError(f"{self.verdict()}\n\n{self.table()}")

    def verdict(self) -> str:
        """Return the verdict in words, with suggestions if the check is not passed."""
        words = {verdict.word for verdict in self.features}
        notes = [meaning for word, meaning in NOTES.items() if word in words]
        notes += [UNSEEN_MEANING] if self.record.layers(UNSEEN) else []
        if self.ok:
            return "OK: every layer learns alike at every width." + "".join(notes)
        broken = list(self.record.broken.items())
        sentences = [f"{len(broken)} of the runs broke ({broken[0][0]}: {broken[0][1]})."] if broken else []
        for word in dict.fromkeys(verdict.word for verdict in self.failures):
            layers = [
                f"{verdict.layer} ({verdict.role + ', ' if verdict.role else ''}{verdict.reading})"
                for verdict in self.failures
                if verdict.word == word
            ]
            more = f" and {len(layers) - 6} more" if len(layers) > 6 else ""
            sentences.append(f"{word}: {', '.join(layers[:6])}{more}.")
        word = "UNCLEAR." if self.unclear else "NOT OK."
        return " ".join([word, *sentences, *remedies(self.record, self.failures, self.damping)]) + "".join(notes)

    def table(self, whole: bool = False) -> Table:
        """Tabulate the verdicts on features and updates.

        Args:
            whole: Whether a long table shows every layer; by default it sums up those without a failure by role.

        Returns:
            The table.
        """
        measured = {verdict.reading for verdict in self.features}
        meanings = [f"{reading}: {meaning}" for reading, meaning in MEANINGS.items() if reading in measured]
        return table_of(self.features, self.title, (*meanings, "", self.verdict()), whole)

    def damping_table(self, whole: bool = False) -> Table:
        """Tabulate the verdicts on damping.

        Args:
            whole: Whether a long table shows every layer; by default it sums up those without a failure by role.

        Returns:
            The table.
        """
        return table_of(self.damping, f"Validity of damping. {self.title}", DAMPING_MEANING, whole)

    def spectra_table(self) -> Table:
        """Tabulate the eigenvalues and the damping of the curvature factors after the last step."""
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
        """Tabulate the distance of every parameter from its initial value, relative to that value."""
        rows = [
            (name, self.record.roles.get(name, ""), _size_and_slope(self.record.select("distance", name), None))
            for name in self.record.layers("distance")
        ]
        note = "at the widest; then the exponent in the width"
        return Table(
            f"Distance from initialization. {self.title}", ("parameter", "role", "|dW| / |W|"), tuple(rows), (note,)
        )

    def figure(self, kind: str = "features") -> Figure:
        """Draw a figure of the check; it needs matplotlib.

        Args:
            kind: ``"features"``, ``"damping"``, ``"spectra"`` or ``"distance"``.

        Returns:
            The figure.

        Raises:
            ValueError: The kind is unknown, or matplotlib is not installed.
        """
        if kind == "features":
            parts = [(reading, judge(self.record, reading, self.tolerance)) for reading in LEARNING]
            return against_width(self.record, [part for part in parts if part[1]], self.title)
        if kind == "damping":
            return against_width(self.record, [(DAMPING, self.damping)], self.title)
        if kind == "spectra":
            return over_steps(self.record, SPECTRA, NAMES, f"Curvature factors. {self.title}")
        if kind == "distance":
            return over_steps(self.record, {"distance": "-"}, NAMES, f"Distance from initialization. {self.title}")
        raise ValueError(f"unknown figure {kind!r}; known: features, damping, spectra, distance")

    plot = figure

    def _summary(self) -> list[str]:
        return [self.title, self.verdict()]

    def _tables(self) -> list[Table]:
        return [table_of(self.features, "Exponents in the width"), *([self.damping_table()] if self.damping else [])]

    def to_dict(self) -> dict[str, Any]:
        """Return the check as plain data for JSON."""
        content = {
            "title": self.title,
            "ok": self.ok,
            "unclear": self.unclear,
            "verdict": self.verdict(),
            "tolerance": self.tolerance,
            "features": [asdict(verdict) for verdict in self.features],
            "damping": [asdict(verdict) for verdict in self.damping],
            "record": self.record.to_dict(),
        }
        return stamp(KIND, VERSION, _without_infinities(content))

    def of_verdicts(self) -> Check:
        """Return the check with the numbers that its verdicts are made of alone: those after the last step."""
        used = {*(reading.quantity for reading in (*LEARNING, DAMPING)), "head_dim", "logits", "gradient", "evenness"}
        last = [row for row in self.record.rows if row.step == self.record.steps]
        kinds = (SOURCE, FED, UNSEEN, HEAD, "evenness")
        rows = [row for row in last if row.quantity in used or row.quantity.startswith(kinds)]
        return replace(self, record=replace(self.record, rows=tuple(rows)))

    def save(self, folder: str | Path) -> list[Path]:
        """Write check.json, the numbers (CSV) and, if matplotlib is installed, the figures (SVG and PNG).

        Args:
            folder: The folder to write to. It is created if it does not exist.

        Returns:
            The paths of the files.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "check.json", self.to_dict())
        written = [folder / "check.json"]
        for kind, quantities in FIGURES.items():
            rows = [row for row in self.record.rows if row.quantity in quantities]
            if rows:
                written.append(figures.write_csv(folder / kind, Measurement._fields, rows))
                written += figures.save(self.figure(kind), folder / kind) if figures.available() else []
        return written

    @classmethod
    def from_dict(cls, data: object, source: str = "check") -> Check:
        """Restore a check from plain data.

        Args:
            data: What ``to_dict`` returned.
            source: Where the data come from, for the text of errors.

        Returns:
            The check.

        Raises:
            ValueError: The data are not those of a check, or are damaged.
        """
        content = check_stamp(data, KIND, VERSION, source)
        with damaged(source):
            tolerance = read_as(float, content["tolerance"], "tolerance")
            return cls(Record.from_dict(content["record"]), tolerance)

    @classmethod
    def load(cls, path: str | Path) -> Check:
        """Load a check from a ``check.json``.

        Args:
            path: The path of the file.

        Returns:
            The check.

        Raises:
            ValueError: The file does not hold a check, or is damaged.
        """
        return cls.from_dict(read_json(path), str(path))


def _without_infinities(value: Any) -> Any:
    """Replace infinite numbers by None, since JSON has none: an unbounded interval ends in null."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size_and_slope(rows: Sequence[Measurement], predicted: float | None) -> str:
    widest = max(row.width for row in rows)
    text = f"{fmean(row.value for row in rows if row.width == widest):.3g}"
    positive = [row for row in rows if row.value > 0]
    if len({row.width for row in positive}) < 2:
        return text
    slope = fit_exponent([row.width for row in positive], [row.value for row in positive]).slope
    return f"{text}, {slope:+.2f}" + ("" if predicted is None else f" [{predicted:+.2g}]")


def is_clear(record: Record, tolerance: float) -> bool:
    """Return whether more seeds would not change the verdict: all is well, or something fails clearly."""
    return not Check(record, tolerance).unclear
