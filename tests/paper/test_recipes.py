"""Every figure and table of the paper has a recipe, with the paper's settings, that runs from end to end."""

from __future__ import annotations

import csv
import os
import xml.etree.ElementTree as ET
from operator import attrgetter
from pathlib import Path

import pytest

from mukron.diagnose.check import Check
from mukron.paper import RECIPES, Outcome, ReproductionError, Request, Scale, load_evidence, reproduce
from mukron.paper.outcome import judge_claims
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Checking, key_of, recipe

PAPER = """
abc-parametrization coordinate k-fac-precond nngp b-output-k-fac training_curve-left training_curve-right
resnet-val-acc resnet-val-acc-vgg19 resnet-val-acc-imagenet k-fac-mup-lr zero-transfer k-fac-damping-transfer
ema-decay-dh dh-mlp-tanh train-curve-cnn-fashion-mnist k-fac-nngp-cross-entropy k-fac-effective
k-fac-nngp-cross-wo-momentum wo-momentum-b-output-k-fac word2vec-b shampoo-lr-transfer foof-lr-transfer
zero-transfer-full imagenet-lr-width zero-transfer-activation resnet18-kfac-val-acc resnet50-kfac-val-acc
resnet-val-acc-err distance-from-initial-weight k-fac-d-scale mean-eig-damping mlp-damping-scaling zero-transfer-up
abc-parametrization-lazy gauss-newton-coordinate gauss-newton-transfer
""".split()  # noqa: SIM905
THEORY = ("abc-parametrization", "abc-parametrization-lazy")

# What the paper's appendices B, G and H say of its figures: recipe, part, what, how much.
GRID = tuple(2.0**z for z in range(-20, 2))
SAID = [
    ("coordinate", "MLP, K-FAC, muP, rescaled", "config.data", "mnist"),
    ("coordinate", "MLP, K-FAC, muP, rescaled", "config.samples", 256),
    ("coordinate", "MLP, Shampoo, muP", "steps", 10),
    ("coordinate-myrtle5", "Myrtle-5, K-FAC, SP", "config.data", "cifar10"),
    ("coordinate-myrtle5", "Myrtle-5, K-FAC, SP", "config.loss", "cross-entropy"),
    ("coordinate-myrtle5", "Myrtle-5, K-FAC, SP", "config.batch", None),
    ("k-fac-precond", "MLP", "lr", (0.001,)),
    ("k-fac-precond", "MLP", "schemes", ("mup/rescaled:1,0",)),
    ("k-fac-precond", "MLP", "config.data", "fashion-mnist"),
    ("nngp", "K-FAC, b_L = 1, batch 1024", "config.epochs", 50),
    ("nngp", "K-FAC, b_L = 1, batch 1024", "config.samples", 1024),
    ("nngp", "K-FAC, b_L = 64, batch 1024", "lr", GRID),
    ("nngp", "K-FAC, b_L = 64, batch 1024", "config.output_exponent", "64"),
    ("nngp", "K-FAC, b_L = 64, batch 1024", "schemes", ("mup/rescaled:1,0",)),
    ("nngp", "Shampoo, b_L = 1, batch 1024", "schemes", ("mup/max-eigenvalue:0.001",)),
    ("b-output-k-fac", "SGD, b_L = 0.5, batch 64", "config.batch", 64),
    ("b-output-k-fac-small", "K-FAC, b_L = 0.5, batch 4", "config.batch", 4),
    ("wo-momentum-b-output-k-fac", "K-FAC, b_L = 0.5, batch 256", "config.momentum", 0.0),
    ("k-fac-nngp-cross-entropy", "SGD, b_L = 1, batch 1024", "config.loss", "cross-entropy"),
    ("k-fac-nngp-cross-wo-momentum", "SGD, b_L = 1, batch 1024", "config.momentum", 0.0),
    ("training_curve-left", "muP", "lr", (0.1,)),
    ("training_curve-left", "SP", "schemes", ("sp/max-eigenvalue:1e-06",)),
    ("training_curve-left", "SP", "config.data", "wikitext2"),
    ("training_curve-right", "muP", "lr", (0.003,)),
    ("training_curve-right", "muP", "schemes", ("mup/rescaled:10,0",)),
    ("training_curve-right", "muP", "config.augment", ("crop", "flip", "autoaugment", "cutout")),
    ("k-fac-mup-lr", "muP", "schemes", ("mup/rescaled:0.001,0",)),
    ("k-fac-mup-lr", "muP", "config.augment", ("crop", "flip", "cutout")),
    ("k-fac-mup-lr", "SP", "config.epochs", 55),
    ("zero-transfer", "MLP, K-FAC, SP", "schemes", ("sp/heuristic:0.001",)),
    ("zero-transfer", "MLP, K-FAC, muP", "schemes", ("mup/rescaled:1,0",)),
    ("zero-transfer", "MLP, SGD, SP", "config.epochs", 20),
    ("zero-transfer", "MLP, SGD, SP", "config.samples", 1024),
    ("zero-transfer", "MLP, SGD, SP", "config.loss", "mse"),
    ("zero-transfer-cnn", "CNN, K-FAC, SP", "schemes", ("sp/heuristic:1",)),
    ("zero-transfer-cnn", "CNN, K-FAC, muP", "schemes", ("mup/rescaled:100,0",)),
    ("zero-transfer-cnn", "CNN, K-FAC, muP", "config.epochs", 50),
    ("zero-transfer-resnet18", "ResNet-18, K-FAC, SP", "schemes", ("sp/heuristic:10",)),
    ("zero-transfer-resnet18", "ResNet-18, K-FAC, muP", "schemes", ("mup/rescaled:10,0",)),
    ("zero-transfer-resnet18", "ResNet-18, K-FAC, muP", "config.data", "fashion-mnist"),
    ("zero-transfer-full", "MLP, K-FAC, muP", "config.samples", None),
    ("k-fac-damping-transfer", "CNN, SP, heuristic", "lr", (0.003,)),
    ("k-fac-damping-transfer", "CNN, SP, heuristic", "config.epochs", 50),
    ("k-fac-damping-transfer", "CNN, muP, rescaled", "config.samples", 1024),
    ("resnet-val-acc", "ResNet-18, K-FAC, muP", "config.epochs", 300),
    ("resnet-val-acc", "ResNet-18, K-FAC, muP", "widths", (1, 2, 4, 8, 16)),
    ("resnet-val-acc", "ResNet-18, Shampoo, muP", "lr", (0.001,)),
    ("resnet-val-acc-vgg19", "VGG-19, K-FAC, SP", "lr", (0.01,)),
    ("resnet-val-acc-vgg19", "VGG-19, Shampoo, SP", "lr", (0.003,)),
    ("resnet-val-acc-imagenet", "muP", "lr", (0.2,)),
    ("resnet-val-acc-imagenet", "muP", "config.epochs", 55),
    ("resnet18-kfac-val-acc", "ResNet-18, K-FAC, muP", "config.data", "cifar10"),
    ("resnet50-kfac-val-acc", "ResNet-50, K-FAC, muP", "schemes", ("mup/rescaled:10,0",)),
    ("mlp-damping-scaling", "Fashion-MNIST, muP, rescaled", "config.samples", None),
    ("k-fac-d-scale", "narrow", "lr", (0.01,)),
    ("mean-eig-damping", "cifar100", "config.model", "resnet18"),
]


@pytest.mark.parametrize(("name", "part", "what", "value"), SAID)
def test_the_settings_are_those_of_the_paper(name, part, what, value):
    assert attrgetter(what)(RECIPES[name].experiment(Scale.PAPER).parts[part]) == value


def test_smoothing_clipping_and_averages_are_those_of_the_paper():
    curve = RECIPES["training_curve-right"].experiment(Scale.PAPER).parts["muP"].config
    assert (curve.label_smoothing > 0, curve.method_options["memory"]) == (True, "ema:0.5")
    imagenet = RECIPES["k-fac-mup-lr"].experiment(Scale.PAPER).parts["muP"].config
    assert (imagenet.label_smoothing > 0, imagenet.method_options["trust"]) == (True, "kl:0.001")
    assert imagenet.method_options["memory"] == "ema:0.95"  # tau = 0.05 of the newest
    words = RECIPES["training_curve-left"].experiment(Scale.PAPER).parts["SP"].config
    assert words.method_options["memory"] == "ema:0.9"


def test_every_figure_and_table_has_a_recipe():
    assert set(PAPER) <= set(RECIPES)
    assert all(name == each.name and each.where and each.title for name, each in RECIPES.items())


def test_a_name_is_given_once():
    with pytest.raises(ReproductionError, match="there are two recipes 'nngp'"):
        recipe("nngp", "Figure 3", "Again")(lambda scale: pytest.fail("made"))


@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("name", RECIPES)
def test_it_is_made_at_every_scale(name, scale):
    made = RECIPES[name].experiment(scale)
    assert made.claims
    assert bool(made.parts) == (name not in THEORY)
    if scale is not Scale.SMOKE:  # there, several data sets are digits
        assert len({key_of(part) for part in made.parts.values()}) == len(made.parts)
    on_gpu = RECIPES[name].experiment(scale, device="cuda")
    assert all(part.config.device == "cuda" for part in on_gpu.parts.values())
    assert [*map(key_of, on_gpu.parts.values())] == [*map(key_of, made.parts.values())]


# From end to end.


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One for all recipes, and for all processes that run tests: parts that recipes share are run once."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smoke"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:layer .* factorized with:RuntimeWarning")  # b_L = 64: B is next to nothing
@pytest.mark.parametrize("name", RECIPES)
def test_a_smoke_run_ends_with_all_files_and_its_evidence_gives_the_same_verdicts(name, folder):
    pytest.importorskip("matplotlib")
    experiment = RECIPES[name].experiment(Scale.SMOKE)
    outcome = reproduce(Request((name,), Scale.SMOKE, str(folder)))[name]
    assert Outcome.load(folder / name) == outcome
    assert [judged.claim for judged in outcome.claims] == [claim.text for claim in experiment.claims]
    assert {judged.verdict for judged in outcome.claims} <= {HOLDS, IN_PART, FAILS, UNTOLD}
    assert all(judged.measured for judged in outcome.claims)

    evidence = load_evidence(folder / name)
    assert judge_claims(name, "smoke", "", experiment, evidence, outcome.made) == outcome
    assert list(evidence) == list(experiment.parts)
    for title, part in experiment.parts.items():
        found = evidence[title]
        ran = {(row.width, row.seed) for row in found.record.rows} if isinstance(found, Check) else found.results
        assert len(ran) == (len(part.widths) * part.seeds if isinstance(part, Checking) else part.total)

    assert ET.parse(folder / name / "figure.svg").getroot().tag.endswith("svg")
    assert (folder / name / "numbers.csv").exists() == (name not in THEORY)
    if name not in THEORY:
        assert {line["part"] for line in lines(folder / name / "numbers.csv")} == set(experiment.parts)


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
