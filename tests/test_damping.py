"""Damping rules from text."""

from __future__ import annotations

import pytest

from mukron.damping import Constant, Fixed, Heuristic, MaxEigenvalue, Rescaled, Rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("rescaled", Rescaled(1.0)),
        ("Rescaled:0.5", Rescaled(0.5)),
        ("rescaled:0.5,0", Rescaled(0.5, floor=0.0)),
        ("heuristic:1e-2", Heuristic(0.01)),
        ("max-eigenvalue", MaxEigenvalue(1e-6)),
        ("constant:3", Constant(3.0)),
        ("fixed:1,0.1", Fixed(a=1.0, b=0.1)),
    ],
)
def test_a_rule_from_text(text, rule):
    assert Rule.parse(text) == rule
    assert Rule.from_plain(rule.plain()) == Rule.parse(rule.text()) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resacled", "unknown damping rule 'resacled'; known: rescaled, heuristic, fixed, max-eigenvalue, constant"),
        ("heuristic:x", "could not convert string to float.*expected heuristic:NUMBER"),
        ("heuristic:1,2", "damping 'heuristic:1,2'"),
        ("fixed:1", "damping 'fixed:1'"),
        ("rescaled:-1", "must not be negative"),
    ],
)
def test_text_that_is_no_rule(text, message):
    with pytest.raises(ValueError, match=message):
        Rule.parse(text)
