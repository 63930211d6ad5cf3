"""What goes wrong is one line with an exit code, and nothing is half-written; --traceback shows the rest."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mukron.cli import app
from mukron.train import RunConfig

MINE = """
import torch
from torch import nn

def nothing():
    return nn.Linear(64, 10)

def broken(width=16):
    return None.thing

def large(width=16):
    class Large(nn.Sequential):
        def forward(self, x):
            if torch.is_grad_enabled() and len(x) > 8:
                torch.empty(10**15)
            return super().forward(x)
    return Large(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))
"""
QUICK = ("--method", "sgd", "--samples", "32", "--epochs", "1")
STUDY = ("--widths", "8,16", "--base-width", "8", "--lr", "0.1", "--seeds", "1", "--no-report", *QUICK)
CHECK = ("--method", "sgd", "--steps", "1", "--seeds", "1", "--widths", "8,16", "--base-width", "8")
PLAN = ("--width", "64", "--config", "run.json", "--no-measure")
RANKS = ("--ranks", "4", "--model", "mlp", "--width", "64", "--batch", "64")
WRITES_FILES = {
    "transfer --json": ("transfer", *STUDY, "--out", "out", "--json"),
    "plan --json": ("plan", *PLAN, "--json"),
    "plan --code": ("plan", *PLAN, "--code"),
    "plan --ranks --json": ("plan", *RANKS, "--json"),
    "check --json": ("check", *CHECK, "--json"),
}
WRITES_FOLDERS = {
    "train": ("train", "--width", "16", *QUICK, "--out"),
    "tune": ("tune", "--width", "16", "--trials", "1", *QUICK, "--out"),
    "transfer": ("transfer", *STUDY, "--out"),
    "check": ("check", *CHECK, "--out"),
    "check nngp": ("check", "nngp", "--steps", "1", "--samples", "16", "--out"),
    "reproduce": ("reproduce", "abc-parametrization", "--scale", "smoke", "--out"),
    "bench roots": ("bench", "roots", "--widths", "16", "--out"),
}
NO_WIDTHS = ("inf", "nan", "1e30", "-1", "0", "9" * 400)
WITH_WIDTH = {
    "train": ("train", *QUICK, "--out", "out", "--width"),
    "train --base-width": ("train", "--width", "16", *QUICK, "--out", "out", "--base-width"),
    "tune": ("tune", "--trials", "1", *QUICK, "--out", "out", "--width"),
    "transfer": ("transfer", *STUDY[2:], "--out", "out", "--widths"),
    "plan": ("plan", "--config", "run.json", "--no-measure", "--width"),
    "plan --ranks": ("plan", *RANKS[:4], "--batch", "64", "--width"),
    "check": ("check", *CHECK[:6], "--widths"),
    "explain": ("explain", "--model", "mlp", "--width"),
    "explain --base-width": ("explain", "--model", "mlp", "--base-width"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-folder").mkdir()
    RunConfig(method="sgd", width=16, base_width=16, samples=32).save("run.json")
    return tmp_path


def line(*arguments, code):
    """The one line that a command says on the error stream."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    if result.stderr.startswith("Usage: "):  # what typer itself refuses
        assert code == 2
        return " ".join(result.stderr.split())
    said = [text for text in result.stderr.splitlines() if not text.startswith(("0/", "run 1"))]
    assert len(said) == 1, result.stderr
    assert said[0].startswith("error: ")
    assert len(said[0]) < 1000
    return said[0]


@pytest.mark.parametrize("command", WRITES_FILES.values(), ids=WRITES_FILES)
@pytest.mark.parametrize(("path", "said"), [("a-folder", "it is a folder"), ("a-file/x.json", "it is a file")])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, path, said, folder):
    assert said in line(*command, path, code=2)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("command", WRITES_FOLDERS.values(), ids=WRITES_FOLDERS)
@pytest.mark.parametrize("path", ["a-file", "a-file/below", "/proc/none/of/it"])
def test_a_folder_that_cannot_be_written_is_refused(command, path):
    assert path.partition("/below")[0] in line(*command, path, code=2)


def test_a_missing_folder_of_a_file_is_made(folder):
    assert CliRunner().invoke(app, ["plan", *PLAN, "--json", "new/folder/plan.json"]).exit_code == 0
    assert [path.name for path in (folder / "new" / "folder").iterdir()] == ["plan.json"]


@pytest.mark.parametrize("command", WITH_WIDTH.values(), ids=WITH_WIDTH)
@pytest.mark.parametrize("width", NO_WIDTHS)
def test_a_width_that_cannot_be(command, width):
    line(*command, width, code=2)


@pytest.mark.parametrize("name", ["train", "tune", "transfer", "plan", "check", "explain", "explain --base-width"])
def test_widths_of_the_networks_here_are_whole(name):
    assert "whole numbers" in line(
        *WITH_WIDTH[name], "100.5,200.5" if name in ("transfer", "check") else "100.5", code=2
    )


def test_numbers_that_are_none():
    for numbers in ("-8^0.5", "2^1e9", "1e999", "nan"):
        assert "--lr" in line("transfer", *STUDY, "--lr", numbers, code=2)
    for method in ("shampoo:1e99999999", "kronecker:1,1e-999999999", "shampoo:1/0"):
        assert "expected a short number" in line("explain", "--method", method, code=2)
    for law in ("--output-exponent", "--decay", "--embedding-lr"):
        line("explain", "--model", "mlp", law, "1e999999999", code=2)
        line("train", *QUICK, "--set", f"{law[2:].replace('-', '_')}=1e999999999", code=2)
    assert "beyond all floating-point numbers" in line("explain", "--model", "mlp", "--decay=-9999", code=2)


def test_data_that_is_too_deep_or_too_long(folder):
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "long.json").write_text('{"lr": ' + "9" * 5000 + "}")
    for file in ("deep.json", "long.json"):
        assert f"{file}: not a JSON file" in line("train", "--config", file, code=2)
    assert "[[[[" in line("train", *QUICK, "--set", f"model_options={'[' * 100_000}", code=2)


def test_a_folder_or_nothing_in_place_of_a_file():
    for file, said in (
        ("a-folder", "is a folder"),
        ("nowhere.json", "there is no such file"),
        ("a-file", "not a JSON"),
    ):
        for command in (("train",), ("plan", "--width", "64"), ("transfer", "--widths", "8,16")):
            assert said in line(*command, "--config", file, code=2)


def test_a_function_without_arguments():
    assert "takes no arguments" in line("train", "--factory", "mine:nothing", "--base-width", "16", *QUICK, code=2)
    assert "takes no arguments" in line("explain", "--factory", "mine:nothing", "--base-width", "16", code=2)


def test_an_error_of_the_users_code_is_one_line_with_its_place():
    command = ("train", "--factory", "mine:broken", "--width", "16", "--base-width", "16", *QUICK, "--out", "out")
    said = line(*command, code=3)
    assert "AttributeError: 'NoneType' object has no attribute 'thing' (" in said
    assert said.endswith("mine.py, line 9); mukron --traceback shows more")
    for arguments in (("--traceback", *command), (*command, "--traceback")):
        result = CliRunner().invoke(app, [*arguments])
        assert result.exit_code == 3
        assert "Traceback (most recent call last):" in result.stderr
        assert "return None.thing" in result.stderr
    assert "Traceback" not in CliRunner().invoke(app, [*command]).stderr


def test_no_memory_for_a_step():
    said = line("train", "--factory", "mine:large", "--width", "16", "--base-width", "16", *QUICK, code=3)
    assert said.startswith("error: out of memory (")
    assert "give a smaller batch or width" in said


def test_a_full_disk_leaves_no_half_of_a_file(folder):
    """Files may not grow beyond nothing here, which fails as a full disk does: when something is written."""
    (folder / "plan.json").write_text("{}")
    source = Path(sys.modules["mukron"].__file__ or "").parents[1]
    for arguments in (("plan", *PLAN, "--json", "plan.json"), ("plan", *PLAN, "--code", "plan.py")):
        done = subprocess.run(
            [sys.executable, "-m", "mukron", *arguments],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
            env={**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith(f"error: {arguments[-1]}: File too large")
    assert (folder / "plan.json").read_text() == "{}"
    assert not (folder / "plan.py").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".plan")]


def test_the_traceback_of_a_wrong_request_is_shown_too():
    """The user's own code may raise a ValueError anywhere."""
    command = ("train", "--factory", "mine:nothing", "--base-width", "16", *QUICK)
    result = CliRunner().invoke(app, ["--traceback", *command])
    assert result.exit_code == 2
    assert "Traceback (most recent call last):" in result.stderr
