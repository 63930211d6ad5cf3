"""A report of runs with fields that are left out of JSON where they have their default."""

from __future__ import annotations

from types import SimpleNamespace

from mukron.report.tables import config_table
from mukron.train import RunConfig


def test_an_output_and_classes_of_ones_own_are_listed():
    record = SimpleNamespace(config=RunConfig(output="logits", class_dim=1))
    assert ("output", "logits", "-") in [(name, value, "-") for name, value, _ in config_table(record, False).rows]
    assert "class_dim" in [row[0] for row in config_table(record, False).rows]
    assert "output" in [row[0] for row in config_table(record, True).rows]
