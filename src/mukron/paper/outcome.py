"""What a recipe found, as it is kept in a folder of its name: result.json, evidence.json, numbers.csv, figure.svg."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mukron import figures
from mukron.diagnose.check import Check
from mukron.paper.errors import ReproductionError
from mukron.paper.recipe import RECIPES, Claim, Evidence, Experiment, Finding, PartResult, Scale, verdict_of
from mukron.params.storage import check_stamp, damaged, read_json, stamp, write_json
from mukron.study.points import Result
from mukron.study.record import StudyRecord

OUTCOME_KIND, EVIDENCE_KIND, OUTCOME_VERSION = "reproduction", "evidence", 1
RESULT_FILE, EVIDENCE_FILE, NUMBERS_NAME, FIGURE_NAME = "result.json", "evidence.json", "numbers", "figure"


@dataclass(frozen=True)
class Judged:
    """A claim with what became of it."""

    claim: str
    paper: str
    verdict: str
    measured: str
    tried: str = ""  # empty where it holds


@dataclass(frozen=True)
class Outcome:
    """A recipe that was run."""

    name: str
    scale: str
    less: str  # how it was made smaller than its scale, in words
    verdict: str
    claims: tuple[Judged, ...]
    choices: tuple[str, ...]
    made: Mapping[str, str]  # command, machine, versions, date, runs, time

    def to_dict(self) -> dict[str, Any]:
        return stamp(OUTCOME_KIND, OUTCOME_VERSION, asdict(self))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Outcome:
        path = Path(folder) / RESULT_FILE
        try:
            content = check_stamp(read_json(path), OUTCOME_KIND, OUTCOME_VERSION, str(path))
        except OSError as error:
            raise ReproductionError(f"{path}: cannot be read: {error.strerror}; run the recipe first") from error
        with damaged(str(path)):
            own = {name: content[name] for name in ("name", "scale", "less", "verdict", "made")}
            return cls(
                **own, claims=tuple(Judged(**each) for each in content["claims"]), choices=tuple(content["choices"])
            )


def judge_claims(
    name: str, scale: str, less: str, experiment: Experiment, evidence: Evidence, made: Mapping[str, str]
) -> Outcome:
    """Check every claim on the evidence."""
    findings = [claim.check(evidence) for claim in experiment.claims]
    claims = tuple(_judged(claim, finding) for claim, finding in zip(experiment.claims, findings, strict=True))
    return Outcome(name, scale, less, verdict_of(findings), claims, tuple(experiment.choices), dict(made))


def _judged(claim: Claim, finding: Finding) -> Judged:
    tried = "" if finding.verdict == "holds" else claim.tried
    return Judged(claim.text, claim.paper, finding.verdict, finding.measured, tried)


# Files.


def keep(outcome: Outcome, experiment: Experiment, evidence: Evidence, folder: str | os.PathLike[str]) -> list[Path]:
    """Write all of it; returns the files."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    content = {name: _kept(found) for name, found in evidence.items()}
    write_json(target / EVIDENCE_FILE, stamp(EVIDENCE_KIND, OUTCOME_VERSION, {"parts": content}))
    write_json(target / RESULT_FILE, outcome.to_dict())
    written = [target / RESULT_FILE, target / EVIDENCE_FILE]
    if columns_and_rows := csv_rows(evidence):
        written.append(figures.write_csv(target / NUMBERS_NAME, *columns_and_rows))
    if figures.available():
        written += figures.save(experiment.draw(evidence), target / FIGURE_NAME, (".svg",))
    return written


def load_evidence(folder: str | os.PathLike[str]) -> Evidence:
    path = Path(folder) / EVIDENCE_FILE
    content = check_stamp(read_json(path), EVIDENCE_KIND, OUTCOME_VERSION, str(path))
    with damaged(str(path)):
        return Evidence({name: _found(each, f"{path}: {name}") for name, each in content["parts"].items()})


def _kept(found: PartResult) -> dict[str, Any]:
    return found.to_dict()


def _found(content: Any, source: str) -> PartResult:
    if content["format"] == "mukron.study":
        return StudyRecord.from_dict(content, source)
    return Check.from_dict(content, source)


def thinned(record: StudyRecord) -> StudyRecord:
    """All epochs of each width's best setting, and of the others the last alone: what claims and figures look at."""
    ranked = [record.ranked(width=width) for width in record.widths]
    best = {settings[0][0] for settings in ranked if settings}

    def thin(result: Result) -> Result:
        whole = replace(result.point, seed=record.config.seed) in best
        return result if whole else replace(result, rows=tuple(result.rows[-1:]))

    return replace(record, results=tuple(map(thin, record.results)))


def csv_rows(evidence: Evidence) -> tuple[Sequence[str], list[tuple[object, ...]]] | None:
    """One line a run of the studies, and one a reading of the checks; None where there is nothing but theory."""
    columns = ("part", "scheme", "width", "lr", "damping", "seed", "status", "quantity", "value")
    rows = [(name, *row) for name, found in evidence.items() for row in _csv_lines(found)]
    return (columns, rows) if rows else None


def _csv_lines(found: PartResult) -> Iterator[tuple[object, ...]]:
    if isinstance(found, Check):
        lr, damping = found.record.about["config"]["lr"], found.record.damping
        for row in found.record.rows:
            if row.step == found.record.steps:
                yield (
                    found.record.scheme,
                    row.width,
                    lr,
                    damping,
                    row.seed,
                    "",
                    f"{row.quantity}/{row.layer}",
                    row.value,
                )
        return
    for result in found.results:
        point = result.point
        value = result.value(found.metric)
        yield point.scheme, point.width, point.lr, point.damping, point.seed, result.status, found.metric, value


def judge_again(folder: str | os.PathLike[str]) -> Outcome:
    """Claims and figure anew from the evidence that is kept, after they were changed; what was run stays as it was."""
    before, evidence = Outcome.load(folder), load_evidence(folder)
    experiment = RECIPES[before.name].make(Scale(before.scale))
    missing = [name for name in experiment.parts if name not in evidence]
    if missing:
        raise ReproductionError(f"{folder}: has no {missing[0]!r}, which the recipe now asks for; run it again")
    evidence = Evidence({name: evidence[name] for name in experiment.parts})
    after = judge_claims(before.name, before.scale, before.less, experiment, evidence, before.made)
    keep(after, experiment, evidence, folder)
    return after


def outcomes(folder: str | os.PathLike[str]) -> dict[str, Outcome]:
    """All that are kept in a folder, in the order of the recipes."""
    there = {path.parent.name for path in Path(folder).glob(f"*/{RESULT_FILE}")}
    if unknown := there - set(RECIPES):
        raise ReproductionError(f"{folder}: holds results of unknown recipes: {', '.join(sorted(unknown))}")
    return {name: Outcome.load(Path(folder) / name) for name in RECIPES if name in there}
