"""The outcome of a recipe, stored in a folder of its name: result.json, evidence.json, numbers.csv, figure.svg."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mukron import figures
from mukron.diagnose.check import Check
from mukron.paper.disclosures import disclosures
from mukron.paper.effects import Effect
from mukron.paper.errors import ReproductionError
from mukron.paper.evidence import Evidence
from mukron.paper.kernel import regress
from mukron.paper.recipe import RECIPES, Claim, Experiment, Finding, PartResult, Regression, Scale, verdict_of
from mukron.params.storage import check_stamp, damaged, read_json, stamp, write_json
from mukron.study.points import Result
from mukron.study.record import StudyRecord
from mukron.train import dataset_of
from mukron.typed import fields_of, read_as
from mukron.workers.machine import describe_machine, source_commit

OUTCOME_KIND, EVIDENCE_KIND, OUTCOME_VERSION = "reproduction", "evidence", 1
RESULT_FILE, EVIDENCE_FILE, NUMBERS_NAME, FIGURE_NAME = "result.json", "evidence.json", "numbers", "figure"


@dataclass(frozen=True)
class Judged:
    """A claim with its finding.

    Attributes:
        claim: The claim's text.
        paper: The number that the paper prints.
        verdict: "holds", "holds in part", "does not hold" or "cannot be determined".
        measured: What was measured.
        tried: What else was run to find out why, and what it gave.
        ours: Whether the claim is not the paper's but our own.
        earlier: The verdict by an earlier rule, where that gave another one.
        rule: What the earlier rule was and what replaced it.
        effect: How large what the claim is about is; None where that is no single number.
    """

    claim: str
    paper: str
    verdict: str
    measured: str
    tried: str = ""
    ours: bool = False
    earlier: str = ""
    rule: str = ""
    effect: Effect | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as data for JSON."""
        return {**asdict(self), "effect": None if self.effect is None else self.effect.to_dict()}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a recipe that was run.

    Attributes:
        name: The recipe's name.
        scale: The scale it was run at.
        less: How it was made smaller than its scale, in words.
        verdict: The verdict on the recipe: on the paper's claims, if there are any, else on our own.
        claims: The claims with their findings.
        choices: What was chosen where the paper is silent, and what is to be disclosed of the runs.
        made: The command, machine, versions, date and runs, and the commit if the source is a checkout.
        minutes: The time that training took, over all runs.

    Example:
        >>> outcome = Outcome("nngp", "small", "", "holds", (), (), {})
        >>> outcome.to_dict()["verdict"]
        'holds'
    """

    name: str
    scale: str
    less: str
    verdict: str
    claims: tuple[Judged, ...]
    choices: tuple[str, ...]
    made: Mapping[str, str]
    minutes: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as data for JSON."""
        claims = [judged.to_dict() for judged in self.claims]
        return stamp(OUTCOME_KIND, OUTCOME_VERSION, {**asdict(self), "claims": claims})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Outcome:
        """Reads the outcome of a recipe.

        Args:
            folder: The recipe's folder.

        Returns:
            The outcome.

        Raises:
            ReproductionError: If there is no result.json.
            ValueError: If it is damaged or something else.
        """
        path = Path(folder) / RESULT_FILE
        try:
            content = check_stamp(read_json(path), OUTCOME_KIND, OUTCOME_VERSION, str(path))
        except OSError as error:
            raise ReproductionError(f"{path}: cannot be read: {error.strerror}; run the recipe first") from error
        with damaged(str(path)):
            fields = {name: value for name, value in content.items() if name not in ("format", "version")}
            outcome: Outcome = read_as(cls, fields, "outcome")
            return outcome


def judge_claims(
    name: str, scale: str, less: str, experiment: Experiment, evidence: Evidence, made: Mapping[str, str]
) -> Outcome:
    """Checks every claim of a recipe on the evidence.

    Args:
        name: The recipe's name.
        scale: The scale it was run at.
        less: How it was made smaller than its scale, in words.
        experiment: The recipe at that scale.
        evidence: The results of its parts.
        made: The command, machine, versions, date and runs.

    Returns:
        The outcome.

    Example:
        >>> experiment = RECIPES["abc-parametrization"].experiment(Scale.SMOKE)
        >>> judge_claims("abc-parametrization", "smoke", "", experiment, Evidence(), {}).verdict
        'holds'
    """
    findings = [claim.check(evidence) for claim in experiment.claims]
    claims = tuple(_judged(claim, finding) for claim, finding in zip(experiment.claims, findings, strict=True))
    of_the_paper = [finding for claim, finding in zip(experiment.claims, findings, strict=True) if not claim.ours]
    choices = (*experiment.choices, *disclosures(experiment.parts))
    return Outcome(
        name,
        scale,
        less,
        verdict_of(of_the_paper or findings),
        claims,
        choices,
        dict(made),
        minutes=evidence.minutes,
    )


def _judged(claim: Claim, finding: Finding) -> Judged:
    return Judged(
        claim=claim.text,
        paper=claim.paper,
        verdict=finding.verdict,
        measured=finding.measured,
        tried=claim.tried,
        ours=claim.ours,
        earlier=finding.earlier,
        rule=finding.rule,
        effect=finding.effect,
    )


# Files.


def keep(outcome: Outcome, experiment: Experiment, evidence: Evidence, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes an outcome with its evidence, numbers and figure.

    Args:
        outcome: The outcome.
        experiment: The recipe, which draws the figure.
        evidence: The results of its parts.
        folder: The recipe's folder; created if missing.

    Returns:
        The files written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    content = {name: _to_data(result) for name, result in evidence.items()}
    write_json(target / EVIDENCE_FILE, stamp(EVIDENCE_KIND, OUTCOME_VERSION, {"parts": content}))
    write_json(target / RESULT_FILE, outcome.to_dict())
    written = [target / RESULT_FILE, target / EVIDENCE_FILE]
    if columns_and_rows := csv_rows(evidence):
        written.append(figures.write_csv(target / NUMBERS_NAME, *columns_and_rows))
    if figures.available():
        written += figures.save(experiment.draw(evidence), target / FIGURE_NAME, (".svg",))
    return written


def load_evidence(folder: str | os.PathLike[str]) -> Evidence:
    """Reads the results of a recipe's parts.

    Args:
        folder: The recipe's folder.

    Returns:
        The evidence.

    Raises:
        OSError: If there is no evidence.json.
        ValueError: If it is damaged or something else.

    Example:
        >>> import tempfile
        >>> from mukron.paper import Request, reproduce
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = reproduce(Request(("abc-parametrization",), Scale.SMOKE, folder))
        ...     dict(load_evidence(f"{folder}/abc-parametrization"))  # a table of theory: nothing is run
        {}
    """
    path = Path(folder) / EVIDENCE_FILE
    content = check_stamp(read_json(path), EVIDENCE_KIND, OUTCOME_VERSION, str(path))
    with damaged(str(path)):
        parts = fields_of(content["parts"], "parts")
        return Evidence({name: _part_result(data, f"{path}: {name}") for name, data in parts.items()})


def _to_data(result: PartResult) -> dict[str, Any]:
    return result.to_dict()


def _part_result(content: Any, source: str) -> PartResult:
    if fields_of(content, "part", "format")["format"] == "mukron.study":
        return StudyRecord.from_dict(content, source)
    return Check.from_dict(content, source)


def thinned(record: StudyRecord) -> StudyRecord:
    """Drops what claims and figures do not read: all epochs but the last, except for each width's best setting.

    Args:
        record: The study.

    Returns:
        The smaller record.
    """
    ranked = [record.ranked(width=width) for width in record.widths]
    best = {settings[0][0] for settings in ranked if settings}

    def thin(result: Result) -> Result:
        is_best = replace(result.point, seed=record.config.seed) in best
        return result if is_best else replace(result, rows=tuple(result.rows[-1:]))

    return replace(record, results=tuple(map(thin, record.results)))


def csv_rows(evidence: Evidence) -> tuple[Sequence[str], list[tuple[object, ...]]] | None:
    """Returns the content of numbers.csv: one row per run of a study and per reading of a coordinate check.

    Args:
        evidence: The results of all parts.

    Returns:
        Columns and rows, or None if the recipe runs nothing.

    Example:
        >>> csv_rows(Evidence()) is None
        True
    """
    columns = ("part", "scheme", "width", "lr", "damping", "seed", "status", "quantity", "value")
    rows = [(name, *row) for name, result in evidence.items() for row in _csv_lines(result)]
    return (columns, rows) if rows else None


def _csv_lines(result: PartResult) -> Iterator[tuple[object, ...]]:
    if isinstance(result, Check):
        lr, damping = result.record.about["config"]["lr"], result.record.damping
        for row in result.record.rows:
            if row.step == result.record.steps:
                yield (
                    result.record.scheme,
                    row.width,
                    lr,
                    damping,
                    row.seed,
                    "",
                    f"{row.quantity}/{row.layer}",
                    row.value,
                )
        return
    for run in result.results:
        point = run.point
        value = run.value(result.metric)
        yield point.scheme, point.width, point.lr, point.damping, point.seed, run.status, result.metric, value


def provenance_here(device: str) -> dict[str, str]:
    """Returns the machine, the versions, the commit if there is one, and the date.

    Args:
        device: A device of torch.

    Returns:
        Text by what it says.

    Example:
        >>> list(provenance_here("cpu"))
        ['machine', 'versions', 'commit', 'date']
    """
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {**describe_machine(device), "commit": source_commit(), "date": date}


def judge_again(folder: str | os.PathLike[str], data_dir: str | None = None) -> Outcome:
    """Checks the claims and draws the figure again from the stored evidence, and stores both.

    A part that the recipe did not have before is computed if it trains nothing.

    Args:
        folder: The recipe's folder.
        data_dir: Where data sets are kept; None: the usual folder.

    Returns:
        The new outcome.

    Raises:
        ReproductionError: If the recipe now has a part that was not run.

    Example:
        >>> import tempfile
        >>> from mukron.paper import Request, reproduce
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = reproduce(Request(("abc-parametrization",), Scale.SMOKE, folder))
        ...     judge_again(f"{folder}/abc-parametrization").verdict
        'holds'
    """
    before, evidence, made = Outcome.load(folder), load_evidence(folder), {}
    experiment = RECIPES[before.name].make(Scale(before.scale))
    missing = {name: part for name, part in experiment.parts.items() if name not in evidence}
    for name, part in missing.items():
        if not isinstance(part, Regression):
            raise ReproductionError(f"{folder}: has no {name!r}, which the recipe now asks for; run it again")
        evidence[name] = regress(part, dataset_of(part.config, None, data_dir))
        where = [text for text in provenance_here(part.config.device).values() if text]
        made[name] = "; ".join(["computed after the runs", *where])
    evidence = Evidence({name: evidence[name] for name in experiment.parts})
    made = {**before.made, **made}
    after = judge_claims(before.name, before.scale, before.less, experiment, evidence, made)
    keep(after, experiment, evidence, folder)
    return after


def outcomes(folder: str | os.PathLike[str]) -> dict[str, Outcome]:
    """Reads all outcomes in a folder.

    Args:
        folder: The folder of the recipes' folders.

    Returns:
        The outcomes by recipe, in the order of the recipes.

    Raises:
        ReproductionError: If there is a result of an unknown recipe.

    Example:
        >>> outcomes("no-such-folder")
        {}
    """
    stored = {path.parent.name for path in Path(folder).glob(f"*/{RESULT_FILE}")}
    if unknown := stored - set(RECIPES):
        raise ReproductionError(f"{folder}: holds results of unknown recipes: {', '.join(sorted(unknown))}")
    return {name: Outcome.load(Path(folder) / name) for name in RECIPES if name in stored}
