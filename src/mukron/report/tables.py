"""The tables of a study as its page shows them, with rounded numbers. The CSV files have all digits."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mukron.damping import Rule
from mukron.study.certificate import CANNOT_TELL, MOVES, TRANSFERS, Interval, Judgement, Regret
from mukron.study.curves import AXES
from mukron.study.drawing import setting_of
from mukron.study.numbers import metric_label, scheme_labels, settings
from mukron.study.points import POINT_FIELDS, PRUNED, Result
from mukron.study.record import StudyRecord
from mukron.table import Table
from mukron.train import RunConfig
from mukron.train.config import LATER
from mukron.train.records import DIVERGED, FINISHED

TONES = {TRANSFERS: "good", MOVES: "bad", CANNOT_TELL: "open"}


@dataclass(frozen=True)
class Card:
    """A verdict at the top of the page."""

    who: str
    verdict: str
    tone: str  # good, bad or open, which gives its colour
    facts: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]


def cards(record: StudyRecord) -> list[Card]:
    """Return the verdicts of the certificate."""
    judgements = record.certificate.judgements if record.certificate else ()
    labels = scheme_labels(record)
    return [
        Card(
            f"{labels.get(judged.scheme, judged.scheme)}: the best {AXES[judged.axis]}",
            judged.verdict,
            TONES.get(judged.verdict, "open"),
            (
                ("drift per doubling", _drift(judged.drift)),
                ("regret, widest", _regret(judged.regret[-1]) if judged.regret else "not measured"),
                ("wider is better", _wider(judged)),
            ),
            judged.reasons,
        )
        for judged in judgements
    ]


def _drift(drift: Interval | None) -> str:
    if drift is None:
        return "could not be fitted"
    return f"{drift.value:+.2f} [{drift.low:+.2f}, {drift.high:+.2f}]".replace("-", "\N{MINUS SIGN}").replace(
        "inf", "∞"
    )


def _regret(regret: Regret) -> str:
    if math.isinf(regret.loss):
        return "diverges there"
    if regret.loss == 0:
        return "none"
    units = "" if regret.units is None else f" ({regret.units:.1f}\N{MULTIPLICATION SIGN} noise)"
    return f"{regret.loss:.2g}{units}"


def _wider(judged: Judgement) -> str:
    answers = [f"{wider.when} {wider.answer}" for wider in judged.wider]
    return ", ".join(answers) or "not measured"


def optima_tables(record: StudyRecord) -> list[Table]:
    """Tabulate for every scheme the best setting at each width, and the regret of the narrowest width's best there."""
    labels = scheme_labels(record)
    columns = (
        "width",
        "best",
        "interval",
        "best that was run",
        f"{metric_label(record.metric)} there",
        "regret",
        "notes",
    )
    tables = []
    for judged in record.certificate.judgements if record.certificate else ():
        regrets = {regret.width: _regret(regret) for regret in judged.regret}
        rows = []
        for optimum in judged.optima:
            noise = "" if optimum.noise is None else f" ± {optimum.noise:.1g}"
            width, measured = f"{optimum.width:g}", f"{optimum.measured:.4g}"
            numbers = (width, f"{setting_of(optimum):.3g}", _range(optimum.best), measured)
            notes = "; ".join(optimum.notes)
            rows.append((*numbers, f"{optimum.value:.4g}{noise}", regrets.get(optimum.width, ""), notes))
        title = f"{labels.get(judged.scheme, judged.scheme)}: {AXES[judged.axis]}"
        last = None if any(row[-1] for row in rows) else -1  # the column of notes, if there are any
        tables.append(Table(title, columns[:last], tuple(row[:last] for row in rows)))
    return tables


def _range(interval: Interval) -> str:
    low, high = (
        None if math.isinf(end) or math.isnan(end) else f"{2**end:.3g}" for end in (interval.low, interval.high)
    )
    if low and high:
        return f"{low} to {high}"
    return f"{low} or more" if low else f"{high} or less" if high else "not known"


def tally(record: StudyRecord) -> str:
    """Count how the runs ended."""
    count = Counter(run.status for run in record.results)
    labels = {FINISHED: "finished", DIVERGED: "diverged", PRUNED: "given up"}
    ended = [f"{count[status]} {text}" for status, text in labels.items() if count[status]]
    return f"{len(record.results)} runs: {', '.join(ended)}"


def tried_table(record: StudyRecord) -> Table:
    """Tabulate the schemes, widths, learning rates, dampings and seeds that were tried."""
    points = [run.point for run in record.results]
    damping = {point.damping for point in points if point.damping is not None and "damping" in record.over}
    rows = [
        ("schemes", ", ".join(record.schemes)),
        ("widths", _values({point.width for point in points})),
        ("learning rates", _values({point.lr for point in points})),
        *([("dampings", _values(damping))] if damping else []),
        ("seeds", _values({float(point.seed) for point in points})),
    ]
    return Table("What was tried", ("", ""), tuple(rows))


def _values(values: Iterable[float]) -> str:
    """List the values if they are few, else their number and range."""
    ordered = sorted(values)
    if len(ordered) <= 12:
        return ", ".join(f"{value:.4g}" for value in ordered)
    return f"{len(ordered)} values from {ordered[0]:.3g} to {ordered[-1]:.3g}"


def diverged_table(record: StudyRecord) -> Table:
    """Tabulate by scheme and width how many runs diverged, at which settings, and why."""
    labels = scheme_labels(record)
    groups: dict[tuple[str, float], list[Result]] = {}
    for run in record.results:
        if run.status == DIVERGED:
            groups.setdefault((run.point.scheme, run.point.width), []).append(run)
    rows = []
    for (scheme, width), runs in groups.items():
        reason, count = Counter(run.reason for run in runs).most_common(1)[0]
        why = reason + (f" ({count} of {len(runs)})" if count < len(runs) else "")
        rows.append((labels[scheme], f"{width:g}", str(len(runs)), _values({run.point.lr for run in runs}), why))
    return Table("What diverged", ("scheme", "width", "runs", "at learning rates", "why"), tuple(rows))


def config_table(record: StudyRecord, all_fields: bool) -> Table:
    """Tabulate the settings that all runs share: those that differ from the defaults, or all."""
    excluded = (*POINT_FIELDS, "format", "version")
    shared = {name: value for name, value in record.config.to_dict().items() if name not in excluded}
    default = {**LATER, **RunConfig().to_dict()}
    rows = [
        (name, _text(value), *(() if all_fields else (_text(default[name]),)))
        for name, value in shared.items()
        if all_fields or value != default[name]
    ]
    columns = ("field", "value") if all_fields else ("field", "value", "default")
    return Table("All fields of a run" if all_fields else "Fields that differ from the defaults", columns, tuple(rows))


def settings_table(record: StudyRecord) -> Table:
    """Tabulate the numbers of every setting."""
    labels = scheme_labels(record)
    rows = []
    for setting in settings(record):
        damping = "" if setting.damping is None else f"{setting.damping:.4g}"
        ended = [f"{len(setting.values)} finished"] if setting.values else []
        ended += [f"{setting.diverged} diverged"] if setting.diverged else []
        ended += [f"{setting.pruned} given up"] if setting.pruned else []
        numbers = [f"{number:.4g}" for number in (setting.mean, *setting.spread)] if setting.whole else ["", "", ""]
        key = (labels[setting.scheme], f"{setting.width:g}", f"{setting.lr:.4g}", damping)
        rows.append((*key, *numbers, ", ".join(ended)))
    columns = (
        "scheme",
        "width",
        "learning rate",
        "damping",
        f"{metric_label(record.metric)}, mean",
        "lowest",
        "highest",
    )
    return Table("Every setting", (*columns, "seeds"), tuple(rows))


def origin_table(record: StudyRecord) -> Table:
    """Tabulate when, where and with which versions the study was run."""
    rows = [(name, str(value)) for name, value in record.made.items() if name != "command"]
    return Table("How it was made", ("", ""), tuple(rows))


def numeric(table: Table) -> list[bool]:
    """Return for every column whether it holds numbers, which are aligned to the right."""
    return [all(not cell or _is_number(cell) for cell in cells) for cells in zip(*table.rows, strict=True)]


def _is_number(cell: str) -> bool:
    try:
        float(cell.partition(" ± ")[0])
    except ValueError:
        return False
    return True


def _text(value: Any) -> str:
    if value in (None, (), [], {}):
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def snippet(config: RunConfig, metric: str) -> str:
    """Return Python code that trains this run again."""
    settings = {name: value for name, (value, _) in config.differences(RunConfig()).items()}
    if config.damping is not None and Rule.parse(config.damping.text()) == config.damping:
        settings["damping"] = config.damping.text()
    arguments = "".join(f"    {name}={value!r},\n" for name, value in settings.items())
    lines: Sequence[str] = (
        "from mukron.train import RunConfig, train\n",
        f"config = RunConfig(\n{arguments})" if arguments else "config = RunConfig()",
        "run = train(config)",
        f"print(run.final[{metric!r}])",
    )
    return "\n".join(lines)
