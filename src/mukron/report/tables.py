"""A study's tables as the page shows them: in words and rounded; the CSVs have the numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mukron.damping import Rule
from mukron.report.drawing import setting_of
from mukron.report.numbers import AXES, names, settings, words
from mukron.study.certificate import CANNOT_TELL, MOVES, TRANSFERS, Interval, Judgement, Regret
from mukron.study.points import DIVERGED, FINISHED, PRUNED, Result
from mukron.study.record import StudyRecord
from mukron.table import Table
from mukron.train import RunConfig

OWN = ("scheme", "width", "lr", "damping", "seed")  # fields that every point of a study says itself
TONES = {TRANSFERS: "good", MOVES: "bad", CANNOT_TELL: "open"}


@dataclass(frozen=True)
class Card:
    """A verdict as it stands at the top."""

    who: str
    verdict: str
    tone: str  # good, bad or open: its colour
    facts: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]


def cards(record: StudyRecord) -> list[Card]:
    judged = record.certificate.judgements if record.certificate else ()
    shown = names(record)
    return [
        Card(
            f"{shown.get(each.scheme, each.scheme)}: the best {AXES[each.axis]}",
            each.verdict,
            TONES.get(each.verdict, "open"),
            (
                ("drift per doubling", _drift(each.drift)),
                ("regret, widest", _regret(each.regret[-1]) if each.regret else "not measured"),
                ("wider is better", _wider(each)),
            ),
            each.reasons,
        )
        for each in judged
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
    said = [f"{each.when} {each.answer}" for each in judged.wider]
    return ", ".join(said) or "not measured"


def optima_tables(record: StudyRecord) -> list[Table]:
    """By scheme: the best setting at each width, and what the narrowest width's best costs there."""
    shown = names(record)
    columns = ("width", "best", "interval", "best that was run", f"{words(record.metric)} there", "regret", "notes")
    tables = []
    for judged in record.certificate.judgements if record.certificate else ():
        regrets = {each.width: _regret(each) for each in judged.regret}
        rows = []
        for each in judged.optima:
            noise = "" if each.noise is None else f" ± {each.noise:.1g}"
            numbers = (f"{each.width:g}", f"{setting_of(each):.3g}", _range(each.best), f"{each.measured:.4g}")
            notes = "; ".join(each.notes)
            rows.append((*numbers, f"{each.value:.4g}{noise}", regrets.get(each.width, ""), notes))
        title = f"{shown.get(judged.scheme, judged.scheme)}: {AXES[judged.axis]}"
        last = None if any(row[-1] for row in rows) else -1  # notes, if there are any
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
    """How the runs ended."""
    count = Counter(run.status for run in record.results)
    shown = {FINISHED: "finished", DIVERGED: "diverged", PRUNED: "given up"}
    ended = [f"{count[status]} {word}" for status, word in shown.items() if count[status]]
    return f"{len(record.results)} runs: {', '.join(ended)}"


def tried_table(record: StudyRecord) -> Table:
    """What was tried, in a few lines."""
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
    """All of them if they are few."""
    ordered = sorted(values)
    if len(ordered) <= 12:
        return ", ".join(f"{value:.4g}" for value in ordered)
    return f"{len(ordered)} values from {ordered[0]:.3g} to {ordered[-1]:.3g}"


def diverged_table(record: StudyRecord) -> Table:
    """By scheme and width: how many runs, at which settings, and why."""
    shown = names(record)
    groups: dict[tuple[str, float], list[Result]] = {}
    for run in record.results:
        if run.status == DIVERGED:
            groups.setdefault((run.point.scheme, run.point.width), []).append(run)
    rows = []
    for (scheme, width), runs in groups.items():
        reason, times = Counter(run.reason for run in runs).most_common(1)[0]
        why = reason + (f" ({times} of {len(runs)})" if times < len(runs) else "")
        rows.append((shown[scheme], f"{width:g}", str(len(runs)), _values({run.point.lr for run in runs}), why))
    return Table("What diverged", ("scheme", "width", "runs", "at learning rates", "why"), tuple(rows))


def config_table(record: StudyRecord, all_fields: bool) -> Table:
    """The run's fields that all points share: those that are no defaults, or all."""
    ours = {name: value for name, value in record.config.to_dict().items() if name not in (*OWN, "format", "version")}
    usual = RunConfig().to_dict()
    rows = [
        (name, _shown(value), *(() if all_fields else (_shown(usual[name]),)))
        for name, value in ours.items()
        if all_fields or value != usual[name]
    ]
    columns = ("field", "value") if all_fields else ("field", "value", "default")
    return Table("All fields of a run" if all_fields else "Fields that differ from the defaults", columns, tuple(rows))


def settings_table(record: StudyRecord) -> Table:
    """Every setting's numbers."""
    shown = names(record)
    rows = []
    for each in settings(record):
        damping = "" if each.damping is None else f"{each.damping:.4g}"
        ended = [f"{len(each.values)} finished"] if each.values else []
        ended += [f"{each.diverged} diverged"] if each.diverged else []
        ended += [f"{each.pruned} given up"] if each.pruned else []
        numbers = [f"{each.mean:.4g}", *(f"{end:.4g}" for end in each.spread)] if each.whole else ["", "", ""]
        rows.append((shown[each.scheme], f"{each.width:g}", f"{each.lr:.4g}", damping, *numbers, ", ".join(ended)))
    columns = ("scheme", "width", "learning rate", "damping", f"{words(record.metric)}, mean", "lowest", "highest")
    return Table("Every setting", (*columns, "seeds"), tuple(rows))


def made_table(record: StudyRecord) -> Table:
    rows = [(name, str(value)) for name, value in record.made.items() if name != "command"]
    return Table("How it was made", ("", ""), tuple(rows))


def numeric(table: Table) -> list[bool]:
    """By column, whether it holds numbers, which stand to the right."""
    return [all(not cell or _is_number(cell) for cell in cells) for cells in zip(*table.rows, strict=True)]


def _is_number(cell: str) -> bool:
    try:
        float(cell.partition(" ± ")[0])
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    if value in (None, (), [], {}):
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def snippet(config: RunConfig, metric: str) -> str:
    """Python that trains this run again."""
    fields = {name: ours for name, (ours, _) in config.differences(RunConfig()).items()}
    if config.damping is not None and Rule.parse(config.damping.text()) == config.damping:
        fields["damping"] = config.damping.text()
    arguments = "".join(f"    {name}={value!r},\n" for name, value in fields.items())
    lines: Sequence[str] = (
        "from mukron.train import RunConfig, train\n",
        f"config = RunConfig(\n{arguments})" if arguments else "config = RunConfig()",
        "run = train(config)",
        f"print(run.final[{metric!r}])",
    )
    return "\n".join(lines)
