"""Studies say how long their runs were, and errors on the command line advise its own options."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mukron.cli import app


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "steps", "few"), [("64", 2, True), ("2", 64, False)])
def test_a_study_says_how_many_steps_a_run_took(batch, steps, few, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--method", "sgd", "--width", "16", "--trials", "2", "--samples", "128", "--epochs", "1", "--no-report"]
    done = CliRunner().invoke(app, ["tune", *options, "--batch", batch])
    assert done.exit_code == 0, done.output
    assert f"a run took {steps} steps of {batch} samples" in done.output
    assert ("which is few" in done.output) == few


NETWORK = """
from torch import nn, ones

class Network(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.position = nn.Parameter(ones(2, width))
        self.linear = nn.Linear(64, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.linear(x.flatten(1)) + self.position.sum(0))
"""


def test_advice_is_in_the_words_of_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "advised.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for command in ("explain", "check"):
        done = CliRunner().invoke(app, [command, "--factory", "advised:Network", "--method", "sgd"])
        assert done.exit_code == 2, done.output
        assert "--role NAME=ROLE" in done.output
        assert "base_shapes(" not in done.output


def test_a_role_without_its_value_is_refused_in_one_line():
    done = CliRunner().invoke(app, ["train", "--model", "gpt", "--role", "pos"])
    assert done.exit_code == 2
    assert "--role 'pos': expected NAME=ROLE" in done.output
    assert "Traceback" not in done.output
