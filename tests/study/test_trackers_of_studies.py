"""Trackers of studies: every run of a study is told once, however it is trained."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from small_studies import LIGHT, TINY, tiny_study
from typer.testing import CliRunner

from mukron.cli import app
from mukron.study import Search
from mukron.train import RunError

OWN = """
import json, os
from pathlib import Path

class Lines:
    def __init__(self, run):
        self.run, self.file = run, Path(os.environ["LINES"])
    def write(self, what, *said):
        with self.file.open("a") as file:
            file.write(json.dumps([self.run.group, self.run.name, what, *said]) + "\\n")
    def start(self, config):
        self.write("start", config["lr"])
    def log(self, step, metrics):
        self.write("log", step, metrics["train_loss"])
    def finish(self, summary):
        self.write("finish", summary["status"], summary["reason"])

class Broken(Lines):
    def start(self, config):
        super().start(config)
        raise ConnectionError("gone")
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What ``lines_tracker:Lines`` was told so far, by run."""
    (tmp_path / "lines_tracker.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("LINES", str(tmp_path / "lines"))

    def read():
        runs = defaultdict(list)
        for line in (tmp_path / "lines").read_text().splitlines():
            group, name, *said = json.loads(line)
            assert group == "study"
            runs[name].append(said)
        return dict(runs)

    return read


def expected(record):
    return {
        result.point.text(): [
            ["start", result.point.lr],
            *(["log", row["step"], row["train_loss"]] for row in result.rows),
            ["finish", result.status, result.reason],
        ]
        for result in record.results
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"one_by_one": False},
        {"keep_runs": True},
        {
            "search": Search(12, pruner="halving"),
            "widths": (8,),
            "schemes": ("mup",),
            "seeds": 1,
            "config": TINY.replace(epochs=8),
        },
    ],
    ids=["one by one", "stacks", "kept", "pruned"],
)
def test_every_run_is_told_once(options, told, tmp_path):
    study = tiny_study(tmp_path / "study", lr=(0.01, 1e6), tracker="lines_tracker:Lines", **options)
    record = study.run()
    statuses = {result.status for result in record.results}
    assert statuses >= ({"pruned"} if "search" in options else {"finished", "diverged"})
    assert told() == expected(record)
    study.run()
    assert told() == expected(record)


@pytest.mark.slow
def test_workers_tell_theirs(told, tmp_path):
    record = tiny_study(tmp_path / "study", LIGHT, tracker=["lines_tracker:Lines"]).run(workers=2)
    assert told() == expected(record)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_results_do_not_depend_on_a_tracker_that_fails(told, one_by_one, tmp_path):
    """It is tried once in a worker: a service that does not answer would hold up every run."""
    plain = tiny_study(tmp_path / "plain", one_by_one=one_by_one).run()
    study = tiny_study(tmp_path / "study", one_by_one=one_by_one, tracker="lines_tracker:Broken")
    with pytest.warns(UserWarning, match="tracker 'lines_tracker:Broken' failed and is not used any more") as warned:
        watched = study.run()
    assert len([warning for warning in warned if "tracker" in str(warning.message)]) == 1
    assert len(told()) == 1

    def rows(record):
        return {result.point: [{**row, "seconds": 0} for row in result.rows] for result in record.results}

    assert rows(watched) == rows(plain)


def test_tensorboard_has_a_folder_for_every_run(tmp_path):
    pytest.importorskip("tensorboard")
    record = tiny_study(tmp_path / "study", seeds=1, tracker="tensorboard").run()
    folders = {path.parent.parent.name for path in (tmp_path / "study/tracked").glob("*/tensorboard/events*")}
    assert folders == {result.point.config(record.config).key() for result in record.results}


def test_names_are_checked_before_anything_is_trained(tmp_path):
    study = tiny_study(tmp_path / "study", tracker="wandv")
    with pytest.raises(RunError, match="tracker='wandv': unknown"):
        study.run()
    assert study.results() == []


@pytest.mark.parametrize("command", [["tune", "--trials", "2", "--width", "8"], ["transfer", "--widths", "8,16"]])
def test_the_commands_have_the_option(command, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [
        "--samples",
        "64",
        "--epochs",
        "1",
        "--batch",
        "32",
        "--lr",
        "0.01:0.02",
        "--method",
        "sgd",
        "--no-report",
    ]
    base = [] if command[0] == "tune" else ["--base-width", "8", "--seeds", "1"]
    result = CliRunner().invoke(
        app, [*command, *options, *base, "--out", "study", "--tracker", "lines_tracker:Lines"], catch_exceptions=False
    )
    record = json.loads(Path("study/study.json").read_text())
    assert len(told()) == len(record["results"]) > 1, result.output
