"""Verdicts, on records that are made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mukron.diagnose import Check, Measurement, Record
from mukron.diagnose.readings import DAMPING, FEATURES, UPDATE, judge

WIDTHS, SEEDS = (64, 128, 256, 512), range(3)


def record(slopes: dict[str, float], quantity: str = "features", noise: float = 0.01, **changes) -> Record:
    draws = np.random.RandomState(0)
    rows = [
        Measurement(width, seed, step, quantity, layer, step * width**slope * math.exp(noise * draws.randn()))
        for width in WIDTHS
        for seed in SEEDS
        for step in (1, 2)
        for layer, slope in slopes.items()
    ]
    return made(rows, **changes)


def made(rows, **changes) -> Record:
    about = {"method": "kfac", "scheme": "mup", "damping": "", "roles": {}, "predicted": {}}
    return Record(tuple(rows), WIDTHS, 2, **{**about, **changes})


@pytest.mark.parametrize(("slope", "word"), [(0.0, "learns"), (0.15, "learns"), (-0.5, "vanishes"), (1.0, "explodes")])
def test_the_exponent_decides(slope, word):
    (verdict,) = judge(record({"fc1": slope}), FEATURES)
    assert verdict.word == word
    assert verdict.ok == (word == "learns")
    assert verdict.measured.slope == pytest.approx(slope, abs=0.03)


def test_the_tolerance_is_the_users():
    (verdict,) = judge(record({"fc1": 0.15}), FEATURES, tolerance=0.1)
    assert verdict.word == "explodes"


@pytest.mark.parametrize("slope", [0.0, -0.3])
def test_noise_that_hides_the_answer_is_told(slope):
    """An interval that is too wide to say yes, or one that holds 0 beside a slope that is not."""
    (verdict,) = judge(record({"fc1": slope}, noise=2.0), FEATURES)
    assert verdict.word == "unclear"
    result = Check(record({"fc1": slope}, noise=2.0))
    assert not result.ok
    assert result.unclear
    assert result.exit_code == 4
    assert result.verdict().startswith("UNCLEAR. unclear: fc1 (features).")
    assert "Unclear ones need more seeds, or wider networks" in result.verdict()


def test_a_layer_that_never_moves_stands_still():
    still = record({"fc1": 0.0})
    still = [row._replace(value=0.0) for row in still.rows]
    (verdict,) = judge(made(still), FEATURES)
    assert (verdict.word, verdict.measured, verdict.ok) == ("stands still", None, False)
    (verdict,) = judge(made(still, idle={"fc1": "frozen"}), FEATURES)
    assert (verdict.word, verdict.ok) == ("frozen", True)


def test_a_layer_that_moves_at_some_widths_only_stands_still():
    rows = [row._replace(value=0.0) if row.width > 128 else row for row in record({"fc1": 0.0}).rows]
    assert judge(made(rows), FEATURES)[0].word == "stands still"


def test_an_update_of_rounding_alone_takes_no_part():
    """A bias before a batch norm: its gradient is zero but for rounding, which follows no law."""
    rows = record({"conv.weight": 0.0, "conv.bias": 1.0}, "update").rows
    small = [row._replace(value=1e-9 * row.value) if row.layer == "conv.bias" else row for row in rows]
    words = {verdict.layer: (verdict.word, verdict.ok) for verdict in judge(made(small), UPDATE)}
    assert words == {"conv.weight": ("learns", True), "conv.bias": ("no part", True)}


def test_a_number_that_is_none_is_an_explosion():
    rows = [row._replace(value=math.inf) if row.width == 512 else row for row in record({"fc1": 0.0}).rows]
    assert judge(made(rows), FEATURES)[0].word == "explodes"


def test_nothing_measured_is_not_clear_and_no_crash():
    result = Check(made([], broken={"width 64, seed 0": "the loss is nan after 0 steps"}))
    assert "the loss is nan" in str(result)
    assert not result.ok


def test_the_last_step_counts():
    """Only after the second step do features grow with the width."""
    rows = [row if row.step == 2 else row._replace(value=1.0) for row in record({"fc1": 1.0}).rows]
    (verdict,) = judge(made(rows), FEATURES)
    assert verdict.word == "explodes"


@pytest.mark.parametrize(("slope", "word"), [(0.0, "valid"), (1.0, "drowns the factor"), (-1.0, "fades")])
def test_damping_has_words_of_its_own(slope, word):
    assert judge(record({"fc1.A": slope}, "ratio"), DAMPING)[0].word == word


def test_a_check_names_what_is_wrong_and_what_to_do():
    roles = {"fc1": "input", "fc1.weight": "input", "fc2": "hidden"}
    features = record({"fc1": -1.0, "fc2": 0.0}, roles=roles, predicted={"features/fc1": 0.0})
    update, ratio = record({"fc1.weight": -1.0}, "update"), record({"fc1.A": 1.0, "fc2.A": 1.0}, "ratio")
    result = Check(made([*features.rows, *update.rows, *ratio.rows], roles=roles, predicted=features.predicted))
    assert not result.ok
    assert result.exit_code == 1
    assert [verdict.layer for verdict in result.failures] == ["fc1", "fc1.weight"]
    said = result.verdict()
    assert "vanishes: fc1 (input, features), fc1.weight (input, own update)." in said
    assert "Damping outgrows its factor in fc1.A:" in said  # of fc2 too, which learns all the same
    with pytest.raises(AssertionError, match=r"NOT OK.*fc1(.|\n)*exponent"):
        result.assert_ok()


def test_a_run_that_breaks_fails_the_check():
    broken = record({"fc1": 0.0}, broken={"width 512, seed 0": "the loss is nan after 2 steps"})
    result = Check(broken)
    assert not result.ok
    assert "1 of the runs broke (width 512, seed 0: the loss is nan after 2 steps)." in result.verdict()
    assert "lower learning rate" in result.verdict()


def test_a_long_table_sums_up_what_is_fine():
    slopes = {f"layer{number}": 0.0 for number in range(40)} | {"bad": 1.0}
    roles = dict.fromkeys(slopes, "hidden")
    result = Check(record(slopes, roles=roles))
    assert [row[1] for row in result.table().rows] == ["bad", "40 layers"]
    assert len(result.table(whole=True).rows) == 41
