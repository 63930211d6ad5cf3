"""``mukron.tune``, ``mukron.transfer`` and ``mukron.plan`` do what the commands do."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import mukron
from mukron.cli import app
from mukron.study import StudyError, StudyRecord
from mukron.train import RunConfig

SMALL = {"epochs": 1, "batch": 32, "samples": 64}
OPTIONS = ("--epochs", "1", "--batch", "32", "--samples", "64")


def values(record: StudyRecord) -> list:
    runs = [(result.point, result.rows[-1]["train_loss"]) for result in record.results]
    return sorted(runs, key=lambda run: (run[0].width, run[0].lr, run[0].damping, run[1]))


def command(*arguments: object) -> None:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code in (0, 1, 4), result.output


def test_tune_and_plan_do_what_the_commands_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = mukron.tune(8, trials=3, lr=(0.001, 0.1), folder="ours", **SMALL)
    command("tune", "--width", 8, "--trials", 3, "--lr", "0.001:0.1", "--out", "theirs", "--no-report", *OPTIONS)
    theirs = StudyRecord.load("theirs/study.json")
    assert len(record.results) == 3
    assert (record.config, values(record)) == (theirs.config, values(theirs))
    for tuned in ("ours", record, record.best()):
        plan = mukron.plan(32, tuned, steps=0)
        assert (plan.config.width, plan.tuned) == (32, record.best())


@pytest.mark.parametrize("over", ["lr", "damping"])
def test_transfer_does_what_the_command_does(over, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"lr": (0.01, 0.02)} if over == "lr" else {"damping": (0.5, 1.0)}
    options = ("--lr", "0.01,0.02") if over == "lr" else ("--damping", "0.5,1")
    record = mukron.transfer(
        widths=(8, 16), over=over, schemes="mup", seeds=1, folder="ours", base_width=8, **given, **SMALL
    )
    small = ("--widths", "8,16", "--over", over, "--scheme", "mup", "--seeds", 1, "--base-width", 8)
    command("transfer", *small, *options, *OPTIONS, "--out", "theirs", "--no-report")
    theirs = StudyRecord.load("theirs/study.json")
    assert len(record.results) == 4
    assert (record.config, values(record)) == (theirs.config, values(theirs))
    assert record.certificate == theirs.certificate


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"over": "momentum"}, "over='momentum': expected lr, damping or lr,damping"),
        ({"damping": (0.5, 2)}, "damping: several, but over='lr'; give over='lr,damping' for both"),
        ({"seed": 3}, "seed: a study has its own"),
        ({"widths": (8,)}, r"give at least two, as in widths=\(64, 512\)"),
        ({"lerning": 3}, "lerning"),
    ],
)
def test_wrong_requests(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        mukron.transfer(**{"widths": (8, 16), "base_width": 8, **SMALL, **arguments})


def test_plans_of_nothing(tmp_path):
    with pytest.raises(StudyError, match=r"there is no study.*run mukron.tune"):
        mukron.plan(64, tmp_path)
    with pytest.raises(StudyError, match="tuned= is a run already"):
        mukron.plan(64, RunConfig(), scheme="mup")


def test_the_names_are_functions_and_cost_nothing_until_used():
    code = (
        "import sys, mukron; assert 'torch' not in sys.modules\n"
        "import mukron.study, mukron.study.transfer\n"
        "assert all(callable(f) and f.__module__ == 'mukron.commands' for f in "
        "(mukron.tune, mukron.transfer, mukron.plan))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
