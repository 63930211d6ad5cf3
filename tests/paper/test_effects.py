"""Effects say how much, with what is known of the noise, and survive their file."""

from __future__ import annotations

import json
import math

import pytest

from mukron.diagnose import Check
from mukron.exponents import Exponent
from mukron.paper.claims import Value, difference
from mukron.paper.effects import Effect, effect_of, worst_exponent
from mukron.paper.evidence import Evidence
from mukron.paper.outcome import Judged, load_evidence
from mukron.paper.recipe import HOLDS, Scale
from mukron.paper.run import Request, reproduce
from mukron.typed import read_as


@pytest.mark.parametrize(
    ("effect", "text"),
    [
        (Effect(1.5, 1.0, 2.0, "points"), "+1.50 [+1.00, +2.00] points"),
        (Effect(-0.8, -math.inf, 0.2, "per doubling"), "-0.80 [-inf, +0.20] per doubling"),
        (Effect(1.5, None, None, "points"), "+1.50 points (one seed)"),
        (Effect(0.1, 0.0, 0.2, ""), "+0.10 [+0.00, +0.20]"),
    ],
)
def test_an_effect_as_text_and_through_json(effect, text):
    judged = Judged("a", "", HOLDS, "b", effect=effect)
    assert str(effect) == text
    assert read_as(Judged, json.loads(json.dumps(judged.to_dict(), allow_nan=False)), "claim") == judged


def test_results_of_earlier_versions_have_no_effect():
    old = {"claim": "a", "paper": "", "verdict": HOLDS, "measured": "b"}
    assert read_as(Judged, old, "claim").effect is None


def test_a_difference_has_twice_the_standard_error_on_either_side():
    found = difference(Value(0.92, 0.003), Value(0.90, 0.004))
    assert (found.value, found.low, found.high, found.unit) == pytest.approx((2.0, 1.0, 3.0, "points"), abs=1e-9)
    assert difference(Value(0.92, None), Value(0.90, 0.004)).low is None
    assert difference(Value(3.0, 0.1, accuracy=False), Value(2.0, 0.0, accuracy=False)).unit == ""
    assert difference(Value(math.nan, None), Value(0.9, 0.01)) is None


def test_nothing_is_shown_as_minus_zero():
    assert str(effect_of(-0.001, -0.004, 0.004, "points")) == "+0.00 [+0.00, +0.00] points"


def test_the_worst_exponent_is_farthest_from_its_prediction():
    found = worst_exponent({"a": (Exponent(1.1, 1.0, 1.2), 1.0), "b": (Exponent(-0.3, -0.4, -0.2), 0.0)})
    assert (found.value, found.low, found.high) == pytest.approx((-0.3, -0.4, -0.2))
    assert worst_exponent({}) is None


def test_checks_record_their_time(tmp_path):
    outcome = reproduce(Request(("gauss-newton-coordinate",), Scale.SMOKE, str(tmp_path)))["gauss-newton-coordinate"]
    evidence = load_evidence(tmp_path / "gauss-newton-coordinate")
    assert all(isinstance(part, Check) and part.record.about["seconds"] >= 0 for part in evidence.values())
    assert evidence.seconds == pytest.approx(sum(part.record.about["seconds"] for part in evidence.values()))
    assert "of a check" in outcome.made["runs"]
    assert Evidence().seconds == 0
