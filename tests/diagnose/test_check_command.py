"""``mukron check`` as a user runs it: the promised verdicts, smaller; files, exit codes, a network of one's own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mukron.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"


def check(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["check", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout if code in (0, 1, 4) else result.output


def refuse(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["check", *arguments], catch_exceptions=False)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


# 'make test' has two cores; by hand the defaults go further. What needs the wide ones says "unclear" of the small ones.
SMALL = {"mlp": "128,256,512", "cnn": "32,64,128"}
WIDE = {"mlp": "128,256,512,1024", "cnn": "64,128,256"}
FEW = ("--seeds", "2", "--steps", "2", "--show", "features")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("method", ["kfac", "sgd", "adamw", "foof", "shampoo", "gauss-newton"])
def test_mup_passes_and_sp_fails(model, method):
    widths = (WIDE if method in ("kfac", "gauss-newton") else SMALL)[model]
    if model == "cnn" and method == "shampoo":
        widths = "24,48,96"
    wanted = ("--model", model, "--method", method, "--widths", widths, *FEW)
    if method == "gauss-newton" and model == "cnn":
        wanted = (*wanted, "--samples", "8")
    assert "OK: every layer learns alike" in check(*wanted, "--scheme", "mup")
    output = check(*wanted, "--scheme", "sp", code=1)
    assert "NOT OK." in output
    assert "The scheme is sp" in output


@pytest.mark.parametrize(("model", "layer"), [("mlp", "fc1.weight"), ("cnn", "conv1.weight")])
def test_the_heuristic_damping_fails_and_the_input_layer_is_named(model, layer):
    output = check("--model", model, "--damping", "heuristic", "--widths", WIDE[model], *FEW, code=1)
    assert output.startswith("K-FAC, mup, damping heuristic:0.001, trust none, lr ")
    assert re.search(rf"^own update +{layer} +input .* vanishes$", output, re.MULTILINE), output
    said = output[output.index("NOT OK.") :]
    assert f"{layer} (input, own update)" in said
    assert f"Damping outgrows its factor in {layer.partition('.')[0]}.A" in said


def test_a_check_of_bounded_steps_says_which_bound():
    few = ("--widths", "64,128", "--seeds", "1", "--steps", "1", "--show", "features", "--tolerance", "9")
    output = check(*few, "--set", "method_options.trust=spectral", code=4)
    assert output.startswith("K-FAC, mup, damping rescaled:1, trust spectral:1, lr ")
    output = check(*few, "--set", 'method_options={"memory": "ema:0.9"}', code=4)
    assert "trust none" in output


def test_a_network_of_ones_own(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    wanted = ("--factory", "own_network:make", "--method", "shampoo", "--widths", "128,256,512", *FEW[:4])
    assert "OK: every layer learns alike" in check(*wanted)
    output = check("--factory", "own_network:make", "--method", "sgd", "--data", "own_network:batch", *FEW[:2])
    assert "widths 64 to 512" in output  # twice the default width of ``make``, and on


def test_a_network_that_does_not_take_the_data(monkeypatch, tmp_path):
    (tmp_path / "others.py").write_text("from torch import nn\ndef make(width):\n    return nn.Linear(3, width)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    said = refuse("--factory", "others:make", "--method", "sgd")
    assert "could not take samples [32, 1, 8, 8] of digits" in said
    assert "These are digits, which are taken where no data are named" in said


def test_one_batch_says_what_was_checked(tmp_path):
    output = check("--method", "adam", "--widths", "64,128,256", *FEW, "--json", str(tmp_path / "new" / "check.json"))
    assert re.match(r"AdamW, mup, lr 0\.\d+, digits \(32 samples\), base width 64, widths 64 to 256, 2 steps", output)
    about = json.loads((tmp_path / "new" / "check.json").read_text())["record"]["about"]
    assert about["config"]["method"] == "adamw"
    assert set(about) == {"config", "mukron", "torch"}


def test_what_breaks_has_an_exit_code_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "bugs.py").write_text(
        "from torch import nn\ndef make(width):\n    raise RuntimeError('broken')\n"
        "def two(width):\n    return Two(1, width)\n"
        "class Two(nn.Conv2d):\n    def __init__(self, a, b):\n        super().__init__(a, b, 8)\n"
        "    def forward(self, x):\n        return super().forward(x).flatten(1), 0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert "RuntimeError: broken" in check("--factory", "bugs:make", "--method", "sgd", code=3)
    assert "name its output" in check("--factory", "bugs:two", "--method", "sgd", "--base-width", "8", code=2)


def test_bfloat16_and_clipping_are_part_of_what_is_checked(tmp_path):
    def sizes(*more: str) -> list[float]:
        file = tmp_path / "check.json"
        CliRunner().invoke(app, ["check", "--method", "sgd", "--widths", "64,128", *FEW, "--json", str(file), *more])
        rows = json.loads(file.read_text())["record"]["rows"]
        return [value for *_, quantity, _, value in rows if quantity in ("features", "update")]

    plain = sizes()
    assert sizes() == plain
    assert sizes("--set", "dtype=bfloat16") != plain
    assert max(sizes("--set", "clip_norm=1e-6")) < 1e-3 * max(plain)


def test_files_and_tables(tmp_path):
    output = check(  # two points tell no interval: that is not clear
        *("--method", "kfac", "--widths", "64,128", "--seeds", "1", "--steps", "1", "--show", "all"),
        *("--out", str(tmp_path / "out"), "--json", str(tmp_path / "check.json"), "--tolerance", "9"),
        code=4,
    )
    for title in ("K-FAC, mup", "Validity of damping.", "Curvature.", "Distance from initialization."):
        assert title in output
    content = json.loads((tmp_path / "check.json").read_text(), parse_constant=pytest.fail)
    assert content["format"] == "mukron.check"
    assert content["features"][0]["measured"]["low"] is None
    assert (tmp_path / "out" / "spectra.svg").exists()


def test_nngp(tmp_path):
    output = check("nngp", "--samples", "64", "--steps", "2", "--width", "128", "--out", str(tmp_path))
    kfac = next(line for line in output.splitlines() if line.startswith("K-FAC, output layer at zero"))
    sgd = next(line for line in output.splitlines() if line.startswith("SGD, output layer at zero"))
    assert float(kfac.split("zero")[1].split()[0]) > 0.999
    assert float(sgd.split("zero")[1].split()[0]) < 0.9
    assert {path.name for path in tmp_path.iterdir()} == {"nngp.json", "nngp.svg", "nngp.png", "nngp.csv"}
    assert (tmp_path / "nngp.csv").read_text().startswith("run,step,loss,correlation,distance,size\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "kfca"), "no such optimizer (did you mean 'kfac'?)"),
        (("--scheme", "mupp"), "unknown scheme 'mupp'"),
        (("--damping", "heuristics"), "unknown damping rule 'heuristics'"),
        (("--method", "sgd", "--damping", "rescaled"), "damping: sgd has none"),
        (("--model", "mpl"), "unknown model 'mpl'"),
        (("--model", "mlp", "--factory", "a:b"), "not both"),
        (("--widths", "64,wide"), "--widths '64,wide': expected numbers"),
        (("--widths", "64"), "at least two widths"),
        (("--show", "feature"), "known: features, damping, spectra, distance, all"),
        (("--model", "cbow", "--data", "digits"), "numbers of neighbouring words"),
        (("--set", "dampening=1"), "a run has no field 'dampening'"),
        (("--set", "width=64"), "a check has its own; say --widths, --seeds, --steps"),
        (("--set", "batch=8"), "batch=8: a check learns all its samples in one batch"),
        (("--set", "schedule=cosine"), "a check makes a few steps at one learning rate"),
        (("--factory", "mynets", "--base-width", "8"), "expected MODULE:FUNCTION"),
        (("--role", "position"), "expected NAME=ROLE"),
        (("--out", "/dev/null/x"), "cannot write to /dev/null/x"),
        (("nngp", "--activation", "rleu"), "unknown activation 'rleu'"),
    ],
)
def test_a_wrong_request_is_told_in_one_line(arguments, message):
    assert message in refuse(*arguments)


def test_ctrl_c_ends_a_check_with_a_word_and_its_own_code(monkeypatch):
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mukron.diagnose.configured.record_runs", pressed)
    result = CliRunner().invoke(app, ["check", "--widths", "64,128"], catch_exceptions=False)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
