"""The point of it all, measured: under muP features move alike at every width, under SP as theory predicts."""

from __future__ import annotations

import sys

import feature_learning
import pytest
from feature_learning import OPTIMIZERS, changes, predicted_slopes, slopes


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_features_move_alike_at_every_width_under_mup(method):
    measured = slopes(changes(method, "mup"))
    assert all(abs(slope) < 0.1 for slope in measured), measured


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_features_move_as_predicted_under_sp(method):
    """Input, hidden, output: SGD -1/2, 1/2, 1; AdamW 0, 1, 3/2."""
    predicted = predicted_slopes(method, "sp")
    measured = slopes(changes(method, "sp"))
    assert measured == pytest.approx(predicted, abs=0.15)
    assert max(map(abs, measured)) > 0.5  # so that the test above can fail


def test_the_example_writes_its_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(feature_learning, "WIDTHS", (64, 128))
    monkeypatch.setattr(feature_learning, "SEEDS", range(1))
    monkeypatch.setattr(sys, "argv", ["feature_learning.py", "--figure", str(tmp_path / "features")])
    feature_learning.main()
    assert "adamw   mup" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir() if path.stat().st_size > 100} == {".svg", ".png", ".csv"}
