"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mukron.cli import app
from mukron.models import MODELS
from mukron.theory import METHODS


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refuse(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def test_theory_of_one_method():
    output = run("explain", "--method", "kfac", "--scheme", "mup")
    hidden = next(line for line in output.splitlines() if line.startswith("hidden"))
    assert hidden.split()[:5] == ["hidden", "1/2", "0", "-1", "1"]


def test_the_trust_of_an_explained_network():
    wide = ("explain", "--model", "mlp", "--width", "256", "--base-width", "64", "--method", "kfac")
    assert "trust spectral:1" in run(*wide)
    assert "are those of K-FAC itself" in run(*wide, "--trust", "none")
    grafted = " ".join(run(*wide, "--trust", "graft:adam").split())
    assert "are those of Adam" in grafted
    assert "unknown trust 'much'" in refuse(*wide, "--trust", "much")
    assert "needs a network" in refuse("explain", "--trust", "none")
    assert "not preconditioned, AdamW's row" in run("explain", "--model", "cbow")


def test_all_methods_side_by_side():
    output = run("explain", "--method", "all")
    for method in METHODS.values():
        assert re.search(rf"^{re.escape(method.title)} +b=", output, re.MULTILINE), method


def test_a_resnet():
    output = run("explain", "--model", "resnet18", "--width", "8", "--base-width", "1", "--method", "kfac")
    row = next(line for line in output.splitlines() if line.startswith("blocks.2.shortcut.0.weight"))
    assert re.split(r"  +", row)[1:6] == ["hidden", "256 x 128 x 1 x 1", "32 x 16 x 1 x 1", "8", "8"]


@pytest.mark.parametrize("model", MODELS)
def test_every_built_in_network(model):
    base = MODELS[model].base_width
    output = run("explain", "--model", model, "--width", str(8 * base))
    output_layer = next(line for line in output.splitlines() if re.match(r"\S+ +output ", line))
    assert re.split(r"  +", output_layer)[4] == "8", output_layer  # its fan-in grew so much


def test_equal_rows_are_one_unless_the_whole_is_asked_for():
    wanted = ("explain", "--model", "gpt")
    assert re.search(r"^blocks\.0-3\.mlp\.up\.weight +hidden ", run(*wanted), re.MULTILINE)
    assert re.search(r"^blocks\.3\.mlp\.up\.weight +hidden ", run(*wanted, "--whole"), re.MULTILINE)


def test_arguments_of_the_network(tmp_path, monkeypatch):
    wanted = ("explain", "--model", "gpt", "--width", "128", "--set", "depth=2")
    output = run(*wanted, "--set", "tied=true", "--set", "heads=4", "--set", "norm=rms")
    assert "tokens.weight is also head.weight" in output
    assert re.search(r"^blocks\.0-1\.norm\{1,2\}\.weight ", output, re.MULTILINE)
    assert "is also head.weight" not in run(*wanted, "--set", "tied=False")
    assert "tied='no': expected True or False" in refuse(*wanted, "--set", "tied=no")
    assert "cannot be divided into 3 heads" in refuse(*wanted, "--set", "heads=3")
    assert "unexpected keyword argument 'dept'" in refuse("explain", "--model", "gpt", "--set", "dept=2")
    assert "expected NAME=VALUE" in refuse(*wanted, "--set", "tied")
    assert "needs a network" in refuse("explain", "--set", "tied=true")
    (tmp_path / "withoptions.py").write_text(
        "from torch import nn\ndef make(units, bias, sizes=()):\n    assert sizes == [1, 2]\n"
        "    return nn.Sequential(nn.Linear(3, units, bias), nn.Linear(units, 2, bias))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = ("explain", "--factory", "withoptions:make", "--base-width", "8")
    assert "0.bias" not in run(*own, "--set", "bias=false", "--set", "sizes=[1, 2]")
    assert "0.bias" in run(*own, "--set", "bias=true", "--set", "sizes=[1, 2]")


def test_options_reach_the_network():
    output = run("explain", "--model", "mlp", "--base-width", "32", "--method", "sgd")
    assert re.search(r"^fc2.weight +hidden +128 x 128 +32 x 32 +4 ", output, re.MULTILINE)  # four times the base
    assert "SGD, ntk" in run("explain", "--model", "mlp", "--method", "sgd", "--scheme", "ntk")
    assert "Every method, ntk" in run("explain", "--method", "all", "--scheme", "ntk")
    assert "b of the output weights is 2 by request" in run("explain", "--model", "mlp", "--output-exponent", "2")


def test_all_methods_of_a_network():
    output = run("explain", "--model", "mlp", "--method", "all")
    assert all(f"{method.title}, mup" in output for method in METHODS.values())


def test_a_users_own_network(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\ndef make(width):\n    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    output = run("explain", "--factory", "mynets:make", "--base-width", "8", "--width", "32", "--method", "sgd")
    assert re.search(r"^1\.weight +output +2 x 32 +2 x 8 +4 ", output, re.MULTILINE)
    assert "needs --base-width" in refuse("explain", "--factory", "mynets:make")
    assert "No module named 'other'" in refuse("explain", "--factory", "other:make", "--base-width", "8")
    assert "has no function or class 'take'" in refuse("explain", "--factory", "mynets:take", "--base-width", "8")
    (tmp_path / "bare.py").write_text(
        "import torch\nclass Bare(torch.nn.Module):\n    def __init__(self, width):\n        super().__init__()\n"
        "        self.position = torch.nn.Parameter(torch.randn(5, width))\n"
    )
    wanted = ("explain", "--factory", "bare:Bare", "--base-width", "8")
    assert re.search(r"^position +input", run(*wanted, "--role", "position=input"), re.MULTILINE)
    assert "not a known module" in refuse(*wanted)
    assert "expected NAME=ROLE" in refuse(*wanted, "--role", "position")
    assert "expected MODULE:FUNCTION" in refuse("explain", "--factory", "mynets", "--base-width", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "kfca"), "unknown method 'kfca'; known: 'sgd'"),
        (("--scheme", "mupp"), "unknown scheme 'mupp'"),
        (("--scheme", "uniform:2/3"), "r must lie in [0, 1/2]"),
        (("--model", "mlpp"), "unknown model 'mlpp' (did you mean 'mlp'?); known: mlp, cnn"),
        (("--width", "64"), "needs a network"),
        (("--model", "mlp", "--width", "8"), 'error: parameter "fc1.weight", dimension 0: shrinks from 64'),
        (("--model", "mlp", "--factory", "a:b"), "not both"),
        (("--model", "mlp", "--output-exponent", "x"), "output_exponent must be a number"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(arguments, message):
    assert message in refuse("explain", *arguments)


def test_sp_shows_no_initial_std_that_it_did_not_draw():
    assert "as drawn" in run("explain", "--model", "cnn", "--scheme", "sp")


@pytest.mark.parametrize("arguments", [("--method", "shampoo"), ("--model", "resnet18")])
def test_a_terminal_gets_a_drawn_table_within_its_width(arguments):
    """Through a real terminal of 80 columns, as 'script' makes one."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="80", TERM="xterm")
        os.execv(sys.executable, [sys.executable, "-m", "mukron.cli", "explain", *arguments])
    drawn = b""
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:
            break
        if not chunk:
            break
        drawn += chunk
    os.waitpid(pid, 0)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn.decode()).splitlines()
    assert any("─" in line for line in plain)
    assert len(plain) < 400  # no column is squeezed to a few characters a line
    assert any("hidden" in line for line in plain)  # nor cut
    assert max(map(len, plain)) <= 80


def test_installed_command():
    command = Path(sys.executable).with_name("mukron")
    shown = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"mukron \d+\.\d+\.\d+\S*\n", shown)


def test_bench(tmp_path, monkeypatch):
    """Small and without a bar on time: every method is measured, and the command can be typed again."""
    monkeypatch.chdir(tmp_path)
    typed = ("bench", "kfac-step", "--widths", "32,64", "--batch", "16", "--rounds", "2", "--against", "none")
    output = run(*typed, "--no-memory", "--out", "found")
    data = json.loads(Path("found/kfac-step-cpu.json").read_text())
    methods = [
        "SGD",
        "AdamW",
        "K-FAC (mc), fused",
        "K-FAC (mc)",
        "K-FAC (empirical), fused",
        "K-FAC (empirical)",
        "FOOF",
        "K-FAC, defaults",
        "K-FAC, bounded",
    ]
    assert [(row["width"], row["method"]) for row in data["rows"]] == [(w, m) for w in (32, 64) for m in methods]
    assert all(len(row["milliseconds"]) == 2 for row in data["rows"])
    assert all(row["differs"] < 1e-2 for row in data["rows"] if row["method"] not in methods[-2:])
    assert data["command"] == shlex.join(["mukron", *typed, "--no-memory", "--out", "found"])
    assert Path("found/kfac-step-cpu.svg").exists()
    assert re.search(r"^32 +SGD +\S+ +\S+ - \S+ +\S+ +1\.00 ", output, re.MULTILINE)
    run("bench", "page", "found/kfac-step-cpu.json", "--out", "docs/performance.md")
    assert "(../found/kfac-step-cpu.svg)" in Path("docs/performance.md").read_text()


def test_bench_stopped_keeps_the_widths_it_has(tmp_path, monkeypatch):
    from mukron.bench.steps import StepsRun

    whole = StepsRun._measure_width

    def stopped(self, width, *rest):
        if width > 8:
            raise KeyboardInterrupt
        return whole(self, width, *rest)

    monkeypatch.setattr(StepsRun, "_measure_width", stopped)
    typed = ("bench", "kfac-step", "--widths", "8,16", "--batch", "4", "--rounds", "2", "--against", "none")
    result = CliRunner().invoke(app, (*typed, "--no-memory", "--out", str(tmp_path / "found")))
    assert result.exit_code == 130
    data = json.loads((tmp_path / "found/kfac-step-cpu.json").read_text())
    assert {row["width"] for row in data["rows"]} == {8}
    assert str(tmp_path) not in data["command"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("kfac-step", "--widths", "wide"), "--widths 'wide': expected numbers"),
        (("kfac-step", "--widths", "0"), "expected whole numbers from 1 on"),
        (("kfac-step", "--widths", "1.5"), "--widths '1.5': expected whole numbers"),
        (("kfac-step", "--against", "jax"), "unknown peer 'jax'; this benchmark knows"),
        (("roots", "--device", "tpu"), "unknown device 'tpu'; choose cpu or cuda"),
        (("conv", "--classes", "7"), "--classes 7: choose 10 or 100"),
        (("page", "nothing.json"), "nothing.json: no result of mukron bench could be read"),
    ],
)
def test_bench_refuses_with_a_way_out(arguments, said):
    assert said in refuse("bench", *arguments)


def test_bench_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "torch finds no GPU here; choose cpu" in refuse("bench", "kfac-step", "--device", "cuda")


def test_a_reader_that_has_seen_enough_is_no_error():
    """As in "mukron explain | head": who reads is gone before anything is printed."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "mukron.cli", "explain", "--method", "all"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_laws_of_weight_decay_and_of_embeddings():
    wanted = ("explain", "--model", "gpt", "--width", "128", "--base-width", "32", "--method", "muon")
    output = run(*wanted, "--decay", "1/width", "--embedding-lr=-1/2")
    lines = output.splitlines()
    for name, expected in (("blocks.0-3.mlp.up.weight", ("1", "0.25")), ("tokens.weight", ("0.5", "1"))):
        row = next(line for line in lines if line.startswith(name))
        cells = dict(zip(re.split(r"  +", lines[2]), re.split(r"  +", row), strict=True))
        assert (cells["lr x"], cells["decay x"]) == expected
    part = "takes off a part of each weight: learning rate times weight decay. decay x multiplies that part; it is"
    assert f"{part} r_in^-1 by request." in output
    assert f"{part} 1 in every layer." in run(*wanted)
    assert 'decay must be "constant" or "1/width" or an exponent' in refuse(*wanted, "--decay", "linear")
    assert "embedding_lr must be an exponent" in refuse(*wanted, "--embedding-lr", "half")
    assert "needs a network" in refuse("explain", "--decay", "1/width")


def test_depth():
    deep = ("explain", "--model", "gpt", "--base-depth", "2", "--depth", "16", "--method", "kfac", "--trust", "none")
    output = run(*deep)
    row = next(line for line in output.splitlines() if line.startswith("blocks.0-15.mlp.up.weight"))
    cells = dict(zip(re.split(r"  +", output.splitlines()[2]), re.split(r"  +", row), strict=True))
    assert (cells["L"], cells["lr x"], cells["rho_A x"]) == ("8", "0.125", "4")
    assert "would move like L" in cells["why"]
    assert "blocks.0-7.norm{1,2}" in run("explain", "--model", "gpt", "--base-depth", "2", "--set", "tied=true")
    assert "L^-1, rho_B x L^-2" in run("explain", "--method", "kfac")
    assert "--depth needs --base-depth" in refuse("explain", "--model", "gpt", "--depth", "4")
    assert "needs a network" in refuse("explain", "--base-depth", "4")
    assert "Put the blocks into an nn.ModuleList" in refuse("explain", "--model", "mlp", "--base-depth", "4")


@pytest.mark.parametrize("text", ["2^", "2^-3:1", "a", "0^-1", "-2^0.5", "2^99999"])
@pytest.mark.parametrize("command", [("train",), ("check",), ("check", "depth")])
def test_what_is_no_learning_rate(command, text):
    result = CliRunner().invoke(app, [*command, "--lr", text], catch_exceptions=False)
    assert result.exit_code == 2
    assert f"Invalid value for '--lr': '{text}': expected one number, as in 0.03 or" in " ".join(result.stderr.split())
