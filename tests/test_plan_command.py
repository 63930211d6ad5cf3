"""``mukron plan`` as a user runs it: from a tuned folder, from a study, from a run; exit codes and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mukron.cli import app
from mukron.study import Certificate, Point, Result, StudyRecord
from mukron.study.certificate import CANNOT_TELL, MOVES, TRANSFERS, Judgement
from mukron.study.functions import best_run
from mukron.train import RunConfig

CONFIG = RunConfig(width=32, base_width=32, samples=24, test_samples=8, epochs=2)
QUICK = ("--no-measure",)


def plan(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def refuse(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def record(*runs: tuple[str, float, float, float | None, float], certificate: Certificate | None = None) -> StudyRecord:
    """runs: scheme, width, lr, damping, final training loss; two seeds of each."""
    results = [
        Result(Point(scheme, width, lr, damping, seed), "finished", ({"epoch": 2, "train_loss": loss + 0.02 * seed},))
        for scheme, width, lr, damping, loss in runs
        for seed in (0, 1)
    ]
    return StudyRecord("tuned", CONFIG, ("lr", "damping"), "train_loss", results, certificate)


MUP, SP = "mup/rescaled:1", "sp/heuristic:0.001"
TUNED = record((MUP, 32, 0.1, 2.0, 0.5), (MUP, 32, 0.05, 0.5, 0.3), (MUP, 32, 0.2, 0.5, 0.9))
STUDY = record((MUP, 32, 0.1, 1.0, 0.5), (MUP, 64, 0.2, 1.0, 0.4), (SP, 32, 0.1, 1e-3, 0.6), (SP, 64, 0.1, 1e-3, 0.6))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(record: StudyRecord, folder: Path, name: str = "tuned") -> Path:
    (folder / name).mkdir()
    record.save(folder / name / "study.json")
    return folder / name


def test_from_what_tune_left(folder):
    saved(TUNED, folder)
    output = plan("--width", 128, *QUICK)
    lines = output.splitlines()
    assert lines[0] == "Best of 6 runs at width 32: train_loss 0.31, mean of 2 seeds."
    assert lines[1] == "mlp on digits, kfac, mup: lr 0.05, damping rescaled:0.5."
    assert "K-FAC, mup, width 128, settings of base width 32" in lines
    assert "fc2.weight  hidden  128 x 128" in output
    assert "Memory of a step, width 128, batch 24, cpu" in output
    assert "Counted, not measured, and without its time: it was not asked for." in output
    assert output.rstrip().endswith('print(f"epoch {epoch + 1}: loss {total / len(loader):.4g}")')
    assert "mukron.KFAC(model, p, lr=0.05, damping=mukron.Rescaled(0.5))" in output


def test_measured_and_kept_in_files(folder):
    saved(TUNED, folder)
    output = plan("--width", 64, "--json", folder / "new" / "plan.json", "--code", folder / "new" / "wide.py")
    assert "A step, width 64, batch 24, cpu" in output
    assert "KFAC: 0 steps skipped" in output
    assert "import torch" not in output
    content = json.loads((folder / "new" / "plan.json").read_text())
    assert (content["format"], content["version"]) == ("mukron.plan", 1)
    assert (content["config"]["width"], content["config"]["lr"], content["tuned"]["width"]) == (64, 0.05, 32)
    assert [each["name"] for each in content["layers"]] == ["fc1.weight", "fc2.weight", "fc3.weight"]
    assert [each["method"] for each in content["steps"]] == ["K-FAC", "SGD"]
    assert content["code"] == (folder / "new" / "wide.py").read_text()
    assert RunConfig.from_dict(content["config"]).width == 64


def test_a_study_with_schemes_and_widths(folder):
    place = saved(STUDY, folder, "study")
    output = plan("--width", 128, "--from", place, *QUICK)  # SP cannot transfer: the other one is meant
    assert output.startswith("Best of 2 runs at width 32: train_loss 0.51")
    assert "mup: lr 0.1, damping rescaled:1." in output
    output = plan("--width", 128, "--from", place, "--scheme", "mup", "--tuned-at", 64, *QUICK)
    assert "lr 0.2, damping rescaled:1." in output
    assert "tuned under SP" in refuse("--width", 128, "--from", place, "--scheme", "sp", *QUICK)
    said = refuse("--width", 128, "--from", place, "--scheme", "ntk", *QUICK)
    assert said == f"error: --scheme ntk: 0 of the study's schemes; say which with --scheme: {MUP}, {SP}"
    assert "--tuned-at 48: the study has widths 32, 64" in refuse(
        "--width", 128, "--from", place, "--tuned-at", 48, *QUICK
    )
    several = saved(record((MUP, 32, 0.1, 1.0, 0.5), ("mup/constant:1", 32, 0.1, 1.0, 0.5)), folder, "several")
    assert "say which with --scheme" in refuse("--width", 128, "--from", several, *QUICK)
    assert "WARNING: with this rule" in plan("--width", 128, "--from", several, "--scheme", "mup/constant", *QUICK)


@pytest.mark.parametrize("verdict", [TRANSFERS, MOVES, CANNOT_TELL])
def test_a_certificate_is_told(verdict):
    judged = Judgement(MUP, "lr", (), None, (), (), verdict, ("drift 0.01 a doubling.",))
    other = Judgement(SP, "lr", (), None, (), (), MOVES, ("drift -0.9 a doubling.",))
    certificate = Certificate("train_loss", (judged, other))
    _, said = best_run(record((MUP, 32, 0.1, 1.0, 0.5), certificate=certificate), None, None)
    assert said[1] == f"Transfer of lr: {verdict}. drift 0.01 a doubling."
    warned = ["WARNING: by this study the best lr moves with the width; do not rely on it."]
    assert said[2:] == (warned if verdict == MOVES else [])


def test_from_any_run(folder):
    CONFIG.replace(method="sgd", lr=0.25, model="own_network:make", width=16, base_width=16).save("run.json")
    output = plan("--width", 64, "--config", "run.json", "--factory", "own_network:make", *QUICK)
    assert output.startswith("Settings of run.json.\nown_network:make on digits, sgd, mup: lr 0.25.\n")
    assert "from own_network import make as network" in output
    assert "blocks.0-1.up.weight" in output
    assert "blocks.0.up.weight" in plan("--width", 64, "--config", "run.json", "--trust", "--whole", *QUICK)
    assert "--config is one already" in refuse("--width", 64, "--config", "run.json", "--scheme", "mup")
    assert "nowhere.json: there is no such file" in refuse("--width", 64, "--config", "nowhere.json")


def test_wrong_requests(folder):
    said = refuse("--width", 128)
    assert said.startswith("error: tuned: there is no study (no study.json); run 'mukron tune' first")
    place = saved(TUNED, folder)
    assert "width=-1.0: expected a number above 0" in refuse("--width", -1)
    assert "the widths of mlp are whole numbers" in refuse("--width", 40.5, *QUICK)
    assert "device=" in refuse("--width", 64, "--device", "abacus", *QUICK)
    assert "cannot write" in refuse("--width", 64, "--json", place / "study.json" / "plan.json", *QUICK)
    (place / "study.json").write_text("{}")
    assert "expected format 'mukron.study'" in refuse("--width", 64, *QUICK)
