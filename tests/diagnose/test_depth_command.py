"""``mukron check depth`` as a user runs it."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from mukron.cli import app

FEW = ("--depths", "2,4,8", "--seeds", "2", "--base-width", "32", "--samples", "8")

OWN = """
from mukron.models import ResidualMLP


def multiplied(width, depth):
    return ResidualMLP(width, inputs=64, depth=depth, base_depth=2)


def plain(width, depth):
    return ResidualMLP(width, inputs=64, depth=depth)
"""

TIED = """
from mukron.models import GPT


def tied(width, depth):
    model = GPT(width, depth=depth, base_depth=2, tied=True)
    del model.mukron_roles
    return model
"""


def check(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["check", "depth", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout if code in (0, 1) else " ".join(result.stderr.split())


@pytest.mark.parametrize("method", ["sgd", "adamw", "kfac"])
def test_the_residual_mlp_passes(method):
    output = check("--method", method, *FEW)
    assert "multiplied by 1/L" in output
    assert "features  blocks.*.up " in output


def test_a_network_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "ownblocks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("ownblocks", None)
    assert "multiplied by 1/L" in check("--factory", "ownblocks:multiplied", "--method", "adamw", *FEW)
    output = check("--factory", "ownblocks:plain", "--method", "adamw", *FEW, code=1)
    assert "no factor 1/L" in output
    assert "x = x + branch(x) * (base_depth / depth)" in output


def test_a_role_that_cannot_be_inferred_is_declared(tmp_path, monkeypatch):
    (tmp_path / "tiedblocks.py").write_text(TIED)
    monkeypatch.syspath_prepend(tmp_path)
    tied = ("--factory", "tiedblocks:tied", "--method", "adamw", "--data", "coriolanus", "--depths", "2,4")
    tied = (*tied, "--seeds", "1", "--base-width", "16", "--lr", "2^-9")
    assert "--role tokens.weight=input" in check(*tied, code=2)
    result = CliRunner().invoke(app, ["check", "depth", *tied, "--role", "tokens.weight=input"], catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    assert "multiplied by 1/L" in result.stdout


def test_wrong_requests():
    assert "'mlp' has no residual blocks whose number can grow; resmlp, gpt have" in check("--model", "mlp", code=2)
    assert "expected whole numbers, as in 2,4,8,16" in check("--depths", "2.5,4", code=2)
