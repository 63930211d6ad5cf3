"""What is disclosed of a recipe's runs follows from their configurations."""

from __future__ import annotations

import pytest

from mukron.paper import RECIPES, Scale
from mukron.paper.disclosures import disclosures
from mukron.paper.recipe import Checking
from mukron.train import RunConfig


def said(**fields) -> str:
    return " ".join(disclosures({"part": Checking(RunConfig(**fields), (64.0, 128.0))}))


def test_nothing_is_disclosed_of_nothing():
    assert disclosures({}) == ()


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"trust": "none"}, True),
        ({}, False),  # bounded steps draw random signs
        ({"trust": "none", "fisher": "exact"}, False),
        ({"fisher": "mc"}, True),
    ],
)
def test_the_fisher(options, drawn):
    assert ("Monte-Carlo" in said(method="kfac", method_options=options)) == drawn
    assert "Monte-Carlo" not in said(method="sgd")


def test_number_format_damping_and_weights():
    assert "tf32, 10 bits of mantissa: all parts." in said(dtype="tf32")
    assert "tf32" not in said()
    assert "a product of 1" in said(method="kfac", damping="heuristic:0.001")
    assert "a product of 1" not in said(method="kfac", damping="rescaled:1")
    assert "Initial weights of mlp: torch's own" in said(model="mlp")
    assert "Initial weights" not in said(model="mlp", model_options={"sigma": 1.0})


def test_parts_in_tf32_are_named_by_their_method_where_that_tells_them():
    def which(*formats):
        parts = {
            f"{method} {dtype}": Checking(RunConfig(method=method, dtype=dtype), (64.0,)) for method, dtype in formats
        }
        (sentence,) = [each for each in disclosures(parts) if each.startswith("Matrix")] or [""]
        return sentence.rpartition(": ")[2]

    assert which(("kfac", "tf32"), ("shampoo", "float32")) == "K-FAC."
    assert which(("kfac", "tf32"), ("kfac", "float32")) == "kfac tf32."
    assert which(("kfac", "float32")) == ""


def test_the_learning_rates_of_figure_1_are_named():
    """They differ between SP and muP."""
    parts = RECIPES["coordinate"].experiment(Scale.PAPER).parts
    rates = {name: part.config.lr for name, part in parts.items()}
    assert rates["MLP, K-FAC, SP"] != rates["MLP, K-FAC, muP, rescaled"]
    (sentence,) = [each for each in disclosures(parts) if each.startswith("Learning rates: ")]
    assert all(f"{name} {rate:g}" in sentence for name, rate in rates.items())
