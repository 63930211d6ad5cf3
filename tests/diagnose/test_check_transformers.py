"""``mukron check`` of a GPT: every method passes under muP, and what breaks muP is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mukron.cli import app

GPT = ("--model", "gpt", "--show", "features", "--set", "model_options.depth=2")
SMALL = (*GPT, "--widths", "64,128,256")


def check(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["check", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def verdicts(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What a check that passes says of every layer, module and parameter that has an exponent."""
    assert "OK: every layer learns alike at every width." in check(*arguments, "--json", str(folder / "check.json"))
    found = json.loads((folder / "check.json").read_text())["features"]
    return [verdict for verdict in found if verdict["measured"] is not None]


def is_whole_output(verdict: dict[str, Any]) -> bool:
    """Whether it is the change of the output in all directions, a part of which falls with the width."""
    return verdict["reading"] == "features" and verdict["role"] == "output"


@pytest.mark.parametrize("method", ["adamw", "foof", "shampoo", "kfac", "muon", "soap"])
def test_every_method_passes_under_mup(method, tmp_path):
    """K-FAC approaches its law from below, as curvature of few rows in narrow networks: its exponents are larger.

    SOAP's plain steps are noisy: directions without signal count as much as others. Its default steps are checked.
    """
    widths, largest = ("128,256,512", 0.25) if method == "kfac" else ("64,128,256", 0.15)
    bounded = ("--set", "method_options.trust=spectral") if method == "soap" else ()
    found = verdicts(tmp_path, *GPT, "--method", method, "--widths", widths, *bounded)
    assert {verdict["reading"] for verdict in found} == {"features", "attention", "own update", "descent"}
    for verdict in found:
        if not is_whole_output(verdict):
            assert abs(verdict["measured"]["slope"]) <= largest, verdict


@pytest.mark.slow
def test_wide_networks_follow_the_law_with_kfac_too(tmp_path):
    wide = (*GPT, "--method", "kfac", "--widths", "256,512,1024,2048", "--seeds", "3", "--steps", "2")
    for verdict in verdicts(tmp_path, *wide):
        assert is_whole_output(verdict) or abs(verdict["measured"]["slope"]) <= 0.12, verdict


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--method", "adamw", "--scheme", "sp"), "The scheme is sp"),
        (("--method", "kfac", "--damping", "heuristic"), "Damping outgrows its factor in tokens.A, positions.A"),
        (
            ("--method", "adamw", "--set", "model_options.heads=4", "--set", "model_options.attention=sqrt(d)"),
            "the size d of a head grows from 16 to 64, and muP needs logits that are divided by d",
        ),
        (
            ("--method", "adamw", "--set", "model_options.tied=true", "--set", "model_options.multiplier=1"),
            "head.weight is tied to tokens.weight",
        ),
    ],
    ids=["sp", "heuristic", "growing head", "tied head"],
)
def test_what_breaks_mup_is_named(options, cause):
    output = check(*SMALL, *options, code=1)
    assert "NOT OK." in output
    assert cause in output


@pytest.mark.parametrize("options", [("heads=4",), ("tied=true",), ("norm=rms", "mlp=swiglu")])
def test_a_gpt_that_does_what_mup_needs_passes(options):
    settings = [part for option in options for part in ("--set", f"model_options.{option}")]
    assert "OK: every layer learns alike" in check(*SMALL, "--method", "adamw", *settings)


def test_few_numbers_are_unclear_and_have_an_exit_code_of_their_own():
    output = check("--model", "mlp", "--method", "sgd", "--widths", "64,128", "--seeds", "1", "--steps", "1", code=4)
    assert "UNCLEAR. unclear: fc1 (input, features)" in output


NOISY = ("--model", "mlp", "--method", "kfac", "--widths", "64,80", "--samples", "8", "--steps", "1")


def test_the_seeds_are_as_many_as_the_verdict_needs(tmp_path):
    """SP's output explodes clearly after three seeds; two widths far from the law need more than the most."""
    said = check("--model", "mlp", "--method", "sgd", "--scheme", "sp", "--widths", "64,128,256", code=1)
    assert "run 1 of 9: width 256, seed 0" in said
    assert "seed 3" not in said
    result = CliRunner().invoke(app, ["check", *NOISY, "--json", str(tmp_path / "check.json")])
    assert result.exit_code == 4, result.output
    record = json.loads((tmp_path / "check.json").read_text())["record"]
    assert {row[1] for row in record["rows"]} == set(range(8))  # the most


def test_a_loss_an_output_and_data_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_outputs.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width):\n        super().__init__()\n"
        "        self.body, self.head = nn.Linear(6, width), nn.Linear(width, 2)\n"
        "    def forward(self, x):\n        h = self.body(x).tanh()\n"
        "        return {'features': h, 'real': self.head(h)}\n"
        "def data():\n    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))\n"
        "    return x, x[:, :2] ** 2\n"
        "def huber(output, targets):\n    return nn.functional.huber_loss(output, targets)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = (
        "--factory",
        "own_outputs:Net",
        "--data",
        "own_outputs:data",
        "--base-width",
        "32",
        "--widths",
        "128,256,512",
    )
    for loss in ("mse", "own_outputs:huber"):
        assert "OK: every layer" in check(*own, "--method", "sgd", "--loss", loss, "--output", "real", "--lr", "0.1")
    assert "name its output" in check(*own, "--method", "sgd", "--loss", "mse", code=2)


@pytest.mark.parametrize("method", ["sgd", "foof", "kfac", "shampoo"])
def test_heads_that_grow_are_told_right_from_wrong_by_every_method(method):
    growing = (*SMALL, "--method", method, "--set", "model_options.heads=4")
    output = check(*growing, "--seeds", "3")
    assert "OK: every layer learns alike" in output
    assert ("are not judged" in output) == (method != "shampoo")
    assert "divided by d, not by its root" in check(*growing, "--set", "model_options.attention=sqrt(d)", code=1)


def test_a_layer_that_starts_near_zero_does_not_lower_the_learning_rate(tmp_path, monkeypatch):
    (tmp_path / "scaled.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width=32):\n        super().__init__()\n"
        "        self.first, self.branch = nn.Linear(64, width), nn.Linear(width, width)\n"
        "        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)\n"
        "        nn.init.constant_(self.norm.weight, 1e-6)\n"
        "    def forward(self, x):\n        h = self.first(x.flatten(1)).tanh()\n"
        "        return self.head(h + self.norm(self.branch(h)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    files = ("--json", "folder/no-ending", "--seeds", "1")
    CliRunner().invoke(app, ["check", "--factory", "scaled:Net", "--method", "adamw", "--widths", "64,128", *files])
    about = json.loads(Path("folder/no-ending").read_text())["record"]["about"]
    assert about["config"]["lr"] >= 1e-4
