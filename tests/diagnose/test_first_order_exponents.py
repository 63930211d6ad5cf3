"""Exponents of SGD and AdamW: under muP features move alike at every width, under SP as theory predicts."""

from __future__ import annotations

import sys

import feature_learning
import pytest
from feature_learning import OPTIMIZERS, check, slopes


@pytest.mark.slow
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_features_move_alike_at_every_width_under_mup(method):
    found = slopes(check(method, "mup"))
    assert all(abs(measured) < 0.1 for measured, _ in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(("method", "exponents"), [("sgd", (-0.5, 0.5, 1.0)), ("adamw", (0.0, 1.0, 1.5))])
def test_features_move_as_predicted_under_sp(method, exponents):
    found = slopes(check(method, "sp"))
    assert tuple(predicted for _, predicted in found.values()) == exponents
    assert tuple(measured for measured, _ in found.values()) == pytest.approx(exponents, abs=0.15)


def test_the_example_writes_its_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(feature_learning, "WIDTHS", (64, 128))
    monkeypatch.setattr(feature_learning, "SEEDS", range(1))
    monkeypatch.setattr(sys, "argv", ["feature_learning.py", "--figure", str(tmp_path / "features")])
    feature_learning.main()
    assert "adamw   mup" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir() if path.stat().st_size > 100} == {".svg", ".png", ".csv"}
