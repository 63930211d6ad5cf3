"""Slopes of all features of a GPT over its depth, as docs/theory.md has them from the kept measurements."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from mukron.exponents import fit_exponent

DOCS = Path(__file__).parents[2] / "docs"
BEFORE_ATTENTION = ("norm1", "attention.query", "attention.key", "attention.value")


def slopes(file: str) -> dict[str, dict[str, dict[str, str]]]:
    """By method and feature, the row of a kept measurement."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    with (DOCS / "figures" / "gpt-depth" / file).open() as rows:
        for row in csv.DictReader(rows):
            found.setdefault(row["method"], {})[row["feature"]] = row
    return found


def span(rows: list[dict[str, str]], column: str) -> str:
    numbers = [float(row[column]) for row in rows]
    return f"{min(numbers):+.2f} to {max(numbers):+.2f}"


def parts(features: dict[str, dict[str, str]]) -> tuple[list[dict[str, str]], ...]:
    """Features that read the stream before attention, all others inside of blocks, and those outside."""
    inside = {name.removeprefix("blocks.*."): row for name, row in features.items() if "*" in name}
    before = [inside.pop(name) for name in BEFORE_ATTENTION]
    return before, [*inside.values()], [row for name, row in features.items() if "*" not in name]


def line(method: str) -> str:
    before, others, outside = parts(slopes("features.csv")[method])
    cells = [method, span(before, "mean"), span(before, "half"), span(others, "mean"), span(outside, "mean")]
    deeper = slopes("features-deeper.csv").get(method)
    cells += [""] * 2 if deeper is None else [span([*deeper.values()], "mean"), span(parts(deeper)[0], "half")]
    return f"| {' | '.join(cells)} |"


METHODS = list(slopes("features.csv"))


@pytest.mark.parametrize("method", METHODS)
def test_the_page_has_the_slopes_that_were_measured(method):
    assert line(method) in (DOCS / "theory.md").read_text()


def test_every_method_was_measured():
    kinds = {method.partition(",")[0] for method in METHODS}
    assert kinds == {"SGD", "AdamW", "Muon", "SOAP", "Shampoo", "K-FAC", "FOOF", "Gauss-Newton"}
    assert set(slopes("features-deeper.csv")) == kinds


def test_what_the_page_says_of_them():
    """Below 0.12 in deep networks; at depth 2 to 16 but for the features that it names."""
    large = {
        (method, feature.removeprefix("blocks.*."))
        for method, features in slopes("features.csv").items()
        for feature, row in features.items()
        if abs(float(row["mean"])) >= 0.12
    }
    assert large == {
        *(
            (method, "norm1")
            for method in METHODS
            if not method.startswith(("FOOF", "Gauss-Newton")) and method != "SOAP"
        ),
        *(("SGD", f"attention.{name}") for name in ("query", "key", "value")),
        *(("AdamW", f"attention.{name}") for name in ("query", "key")),
        *(("Gauss-Newton", name) for name in ("norm2", "mlp.up", "tokens")),
    }
    page = (DOCS / "theory.md").read_text()
    for method, name in large:
        kept = slopes("features.csv")[method]
        assert f"{float(kept.get(f'blocks.*.{name}', kept.get(name))['mean']):+.2f}" in page
    deeper = [row for features in slopes("features-deeper.csv").values() for row in features.values()]
    assert max(abs(float(row["mean"])) for row in deeper) < 0.12
    for method, features in slopes("features.csv").items():
        least, most = (-0.155, -0.045) if method.startswith(("K-FAC", "Gauss-Newton")) else (-0.075, -0.005)
        assert all(least < float(row["half"]) < most for row in parts(features)[0]), method
    middles = [row for features in slopes("features-deeper.csv").values() for row in parts(features)[0]]
    assert max(abs(float(row["half"])) for row in middles) < 0.075


@pytest.mark.parametrize(("depths", "slope"), [((2, 4, 8, 16), 0.29), ((8, 16, 32, 64), 0.06)])
def test_what_the_places_of_blocks_alone_would_do(depths, slope):
    shares = [fmean(block / depth for block in range(depth)) for depth in depths]
    assert fit_exponent(depths, shares).slope == pytest.approx(slope, abs=0.005)


def test_the_script_repeats_a_measurement():
    """One method, few seeds: the rows of all features."""
    script = DOCS / "figures" / "gpt-depth" / "features.py"
    command = [sys.executable, "-W", "ignore", str(script), "2,4,8", "2", "AdamW"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = {row["feature"]: row for row in csv.DictReader(printed)}
    assert set(rows) == set(slopes("features.csv")["AdamW"])
    assert float(rows["blocks.*.norm1"]["mean"]) > 0.12 > abs(float(rows["blocks.*.norm1"]["half"]))
    assert abs(float(rows["blocks.*.mlp.out"]["mean"])) < 0.12
