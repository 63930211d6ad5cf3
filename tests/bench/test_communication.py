"""The benchmark of communication: what it counts, stores, draws and writes into a page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mukron.bench.communication.page import COMMUNICATION_MARKER, communication_section, write_communication_page
from mukron.bench.communication.ranks import ALL_REDUCED, AS_IT_IS, EMPIRICAL, SGD, CountedSizes
from mukron.bench.communication.result import CommunicationResult
from mukron.cli import app
from mukron.optim.communication import BY_TIME, WAYS
from mukron.optim.ranked_run import DDP, PLAIN

DOCS = Path(__file__).parents[2] / "docs"
STORED = DOCS / "figures" / "communication" / "communication.json"
MARKED = f"# Title\n\n{COMMUNICATION_MARKER}\n{COMMUNICATION_MARKER}\n\nThe end.\n"


@pytest.mark.slow
def test_the_command_counts_stores_and_writes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(MARKED)
    sizes = ["--widths", "32", "--batches", "16", "--ranks", "2", "--out", str(tmp_path), "--page", str(page)]
    done = CliRunner().invoke(app, ["bench", "communication", *sizes], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "All counts are exactly as predicted" in done.stdout
    result = CommunicationResult.load(tmp_path / "communication.json")
    assert len(result.steps) == 2 + 4 * 4
    (sgd,) = (step for step in result.steps if step.optimizer == SGD)
    assert sgd.bytes == sgd.predicted == 4 * 32 * (784 + 32 + 10)  # 2 (k - 1) / k is 1
    for way in (*WAYS, BY_TIME):
        plain, wrapped = (result.step(sgd, AS_IT_IS, averaged, way) for averaged in (PLAIN, DDP))
        assert plain.bytes < wrapped.bytes
        assert plain.headers > 0
    assert result.step(sgd, AS_IT_IS, PLAIN, "rows").bytes < sgd.bytes
    assert result.step(sgd, ALL_REDUCED, DDP, "").bytes > 10 * sgd.bytes
    assert (tmp_path / "communication.svg").exists()
    assert page.read_text().endswith("\n\nThe end.\n")
    assert "**K-FAC as it is by default, in DistributedDataParallel**" in page.read_text()


def test_the_page_shows_what_is_stored():
    page = (DOCS / "distributed.md").read_text()
    _, shown, _ = page.split(COMMUNICATION_MARKER)
    assert shown.strip() == communication_section(STORED, DOCS).strip()


def test_stored_counts_are_exactly_those_of_the_formulas():
    result = CommunicationResult.load(STORED)
    assert {(step.ranks, step.width, step.batch) for step in result.steps} >= {(2, 256, 64), (4, 1024, 1024)}
    assert all(step.bytes == pytest.approx(step.predicted, rel=1e-12) for step in result.steps)


def test_what_the_page_claims_of_batches_below_the_width_was_counted():
    """Less than SGD: with the empirical Fisher at all of them; by default below 2/3 of the width, or with 4 ranks."""
    result = CommunicationResult.load(STORED)
    below = [step for step in result.steps if step.optimizer == SGD and step.batch < step.width]
    ratio = {
        (kind, sgd.ranks, sgd.width, sgd.batch): result.step(sgd, kind, PLAIN, BY_TIME).bytes / sgd.bytes
        for sgd in below
        for kind in (AS_IT_IS, EMPIRICAL)
    }
    assert {batch / width for _, _, width, batch in ratio} >= {1 / 16, 1 / 4, 3 / 4}
    assert max(value for (kind, *_), value in ratio.items() if kind == EMPIRICAL) == pytest.approx(0.90, abs=0.005)
    default = {key[1:]: value for key, value in ratio.items() if key[0] == AS_IT_IS}
    assert default[2, 1024, 768] == pytest.approx(1.22, abs=0.005)
    assert default[4, 1024, 768] == pytest.approx(0.86, abs=0.005)
    assert all(value < 1 for (ranks, width, batch), value in default.items() if ranks == 4 or batch < 2 / 3 * width)


def test_tables_say_how_far_counts_are_off():
    result = CommunicationResult.load(STORED)
    step = result.steps[0]
    off = replace(result, steps=(replace(step, bytes=1.5 * step.predicted), *result.steps[1:]))
    assert "within 50.0% of what was predicted" in off.tables()[0].notes[-1]
    assert max(len(line) for table in result.tables() for line in str(table).splitlines()) <= 120


def test_pages_without_markers_are_refused_before_the_work(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    done = CliRunner().invoke(app, ["bench", "communication", "--page", str(page)])
    assert done.exit_code == 2
    assert "expected <!-- communication --> twice" in re.sub(r"\s+", " ", done.stderr)
    with pytest.raises(ValueError, match="twice"):
        write_communication_page(STORED, page)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (((64,), (64,), (1,)), "at least 2"),
        (((64,), (3,), (2, 4)), "need a sample"),
        (((64,), (8,), (2,), 0), "positive"),
    ],
)
def test_other_sizes_are_refused(sizes, said):
    with pytest.raises(ValueError, match=said):
        CountedSizes(*sizes)
