"""The README and the docs are run: every Python block, every mukron command that names no file of the reader's."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mukron.bench.page import page_text
from mukron.bench.result import BenchResult
from mukron.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for found, text in fenced if found == language]


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)  # README's is run below
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page in one go: later ones build on earlier ones."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, str(page), "exec"), {})


def test_readme_shows_what_explain_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "README.md", "python")
    exec(code, {})
    (shown,) = blocks(ROOT / "README.md", "")
    assert capsys.readouterr().out.strip() == shown.strip()


def test_readme_commands_run():
    commands = [
        shlex.split(line, comments=True)[1:]
        for block in blocks(ROOT / "README.md", "sh")
        for line in block.splitlines()
        if line.startswith("mukron explain") and "mypackage" not in line
    ]
    assert len(commands) == 4
    for command in commands:
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_price_of_a_step_is_what_the_benchmark_wrote():
    result = BenchResult.load(ROOT / "docs/figures/bench/kfac-step-cpu.json")
    page = (ROOT / "docs/optimizers.md").read_text()
    assert f"`{result.command}`" in page
    said = re.search(
        r"at ([\d.]+) times the time and ([\d.]+) times the memory of SGD with momentum at width (\d+)", page
    )
    assert said is not None
    width = int(said[3])
    base, row = (next(r for r in result.at(width) if r.method == name) for name in ("SGD", "K-FAC (mc)"))
    assert said.groups()[:2] == (f"{row.median / base.median:.2f}", f"{row.memory / base.memory:.2f}")


def test_the_page_of_benchmarks_is_what_the_command_writes(tmp_path):
    """From the files that it names, in their order; nothing is typed by hand."""
    written = (ROOT / "docs/performance.md").read_text()
    files = [ROOT / "docs" / name for name in re.findall(r"Numbers: \[.*?\]\((.*?)\)", written)]
    benches = ("kfac-step", "shampoo-step", "roots", "sweep")
    named = {f"{bench}-{device}" for bench in benches for device in ("cpu", "cuda")} | {"conv-cuda"}
    assert {file.stem for file in files} >= named
    assert written == page_text(files, ROOT / "docs")


def stored_tables() -> dict[str, str]:
    """What the commands of docs/features.md printed, from the numbers that they stored."""
    from mukron.diagnose import Check
    from mukron.diagnose.landing import Landing

    figures = ROOT / "docs" / "figures"
    tables = {}
    for name in ("check-kfac", "check-heuristic", "check-sp"):
        check = Check.load(figures / name / "check.json")
        shown = [check.table(), check.damping_table()] if check.damping else [check.table()]
        tables[name] = "\n\n".join(map(str, shown))
    tables["check-nngp"] = str(Landing.load(figures / "check-nngp" / "nngp.json").table())
    return tables


@pytest.mark.parametrize("name", ["check-kfac", "check-heuristic", "check-sp", "check-nngp"])
def test_the_tables_of_the_features_page_are_those_of_its_figures(name):
    page = (ROOT / "docs" / "features.md").read_text()
    (shown,) = re.findall(rf"<!-- docs/figures/{name} -->\n```text\n(.*?)\n```", page, re.DOTALL)
    assert shown == stored_tables()[name]


def test_the_exponents_of_a_gpt_are_those_of_its_checks():
    from mukron.diagnose import Check

    readings = ("features", "attention", "own update", "descent")
    rows = []
    for method in ("adamw", "foof", "kfac", "shampoo"):
        check = Check.load(ROOT / "docs" / "figures" / "check-gpt" / f"{method}.json")
        assert check.ok
        slopes: dict[str, list[float]] = {reading: [] for reading in readings}
        for verdict in check.features:
            if verdict.measured and (verdict.reading, verdict.role) != ("features", "output"):
                slopes[verdict.reading].append(verdict.measured.slope)
        largest = max(abs(slope) for found in slopes.values() for slope in found)
        assert largest < (0.14 if method == "kfac" else 0.12)
        ranges = [
            f"{min(found):+.2f} to {max(found):+.2f}" if found[1:] else f"{found[0]:+.2f}" for found in slopes.values()
        ]
        widths, seeds = check.record.widths, {row.seed for row in check.record.rows}
        cells = [check.title.partition(",")[0], f"{widths[0]} to {widths[-1]}", str(len(seeds)), *ranges]
        rows.append(f"| {' | '.join(cells)} |")
    page = (ROOT / "docs" / "transformers.md").read_text()
    assert "\n".join(rows) in page


@pytest.mark.parametrize(
    ("page", "name"),
    [("README.md", "transfer-kfac"), ("docs/transfer.md", "transfer-kfac"), ("docs/transfer.md", "transfer-own")],
)
def test_certificates_are_those_of_their_studies(page, name):
    """README shows the table alone, the page its words too."""
    from mukron.study import Certificate

    (shown,) = re.findall(rf"<!-- docs/figures/{name} -->\n```text\n(.*?)\n```", (ROOT / page).read_text(), re.DOTALL)
    stored = json.loads((ROOT / "docs" / "figures" / name / "certificate.json").read_text())
    table = Certificate.from_dict(stored).table()
    assert shown == str(table if page != "README.md" else replace(table, notes=())).rstrip()


def test_the_first_pictures_study_shows_what_is_claimed_of_it():
    from mukron.study import Certificate

    stored = json.loads((ROOT / "docs" / "figures" / "transfer-kfac" / "certificate.json").read_text())
    sp, mup = Certificate.from_dict(stored).judgements
    assert mup.drift.low < 0 < mup.drift.high
    assert sp.drift.high < mup.drift.low
    assert all(wider.better for wider in mup.wider)
    assert (sp.verdict, mup.verdict) == ("does not transfer", "transfers")
    lower = [ours.width for ours, theirs in zip(sp.optima, mup.optima, strict=True) if ours.value < theirs.value]
    assert lower == [256, 512, 1024]  # as docs/transfer.md admits


def test_the_first_study_is_the_one_of_make_demo():
    rule = re.search(r"^\t(\$\(BIN\)/mukron transfer .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    for variable, value in {"BIN)/": "", "METHOD)": "kfac", "PLAIN)": "--set method_options.trust=none"}.items():
        rule = rule.replace(f"$({variable}", value)
    assert f"```sh\n{rule}\n```" in (ROOT / "docs/transfer.md").read_text()


def test_the_study_of_an_own_network_ends_in_a_verdict():
    from mukron.study import Certificate

    stored = json.loads((ROOT / "docs" / "figures" / "transfer-own" / "certificate.json").read_text())
    assert [judgement.verdict for judgement in Certificate.from_dict(stored).judgements][-1] == "transfers"
