"""Text of files reaches no terminal and no page as something to obey; names that are nearly right are named."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mukron.cli import app
from mukron.printable import printable
from mukron.study import Point, Result, StudyRecord
from mukron.table import Table
from mukron.train import RunConfig

SLY = "\x1b]0;title\x07\x1b[2J[red]<script>alert(1)</script>"


def test_control_characters_are_escaped_and_nothing_else():
    assert printable("a\x1b\x07\x9b\u202eb\r") == "a\\x1b\\x07\\x9b\\u202eb\\r"
    assert printable("ä λ\tb\n") == "ä λ\tb\n"


def test_a_table_obeys_nothing():
    table = Table(SLY, ("name", SLY), (("a", SLY),), (SLY,))
    assert "\x1b" not in str(table)
    assert "[red]" in str(table)
    assert "<script>" not in table._repr_html_()


def test_a_study_that_somebody_sent_obeys_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(method="sgd", base_width=8, width=16, epochs=1, output=SLY, roles={SLY: "input"})
    rows = [{"epoch": 1, "train_loss": 0.5, SLY: 1.0}]
    results = [Result(Point("mup", width, 0.1, None, 0), "finished", rows, reason=SLY) for width in (8, 16)]
    StudyRecord(SLY, config, ("lr",), "train_loss", tuple(results)).save("study.json")
    for command in (
        ("plan", "--from", ".", "--width", "32", "--no-measure"),
        ("train", "--config", "study.json"),
        ("plan", "--from", ".", "--width", "32", "--no-measure", "--data", SLY),
    ):
        result = CliRunner().invoke(app, [*command])
        assert "\x1b" not in result.output
        assert "\x07" not in result.output


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("train", "--model", "rsnet18"), "resnet18"),
        (("train", "--method", "kfca"), "kfac"),
        (("data", "fetch", "mnits"), "mnist"),
        (("reproduce", "zero-transfr", "--scale", "smoke"), "zero-transfer"),
        (("explain", "--model", "gtp"), "gpt"),
    ],
)
def test_a_name_that_is_nearly_right_is_named(arguments, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 2
    assert f"did you mean '{meant}'?" in " ".join(result.stderr.split())


def test_shells_complete_commands_and_options():
    environment = {"_MUKRON_COMPLETE": "complete_bash", "COMP_WORDS": "mukron tr", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], env=environment, prog_name="mukron")
    assert {"train", "transfer"} <= set(result.stdout.split())
