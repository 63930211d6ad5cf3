"""The recipes on b_L, the exponent of the output layer's variance, over batch sizes and over networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mukron.paper import drawing
from mukron.paper.claims import BestOf, beats, gap_grows
from mukron.paper.drawing import ExponentPanel
from mukron.paper.evidence import Evidence
from mukron.paper.nngp import MAIN_EXPONENTS, NNGP_CHOICES, best_at, nngp_part_name, one_beats, tuned_part
from mukron.paper.recipe import (
    Claim,
    Experiment,
    Part,
    Scale,
    recipe,
)
from mukron.paper.settings import (
    FLOOR,
    MOMENTUM,
    NORMAL,
    PAPER_SAMPLES,
    powers,
    rescaled,
    setting,
    study,
)
from mukron.table import Table

LARGE_BATCHES, SMALL_BATCHES = (64, 256, 1024), (4, 16)
BATCH_SIZES = (*SMALL_BATCHES, *LARGE_BATCHES)
# By method and b_L, the accuracies that the paper prints, in percent, for batch sizes 4 to 1024.
PaperAccuracies = Mapping[tuple[str, float], Sequence[float]]
PAPER_TABLE: PaperAccuracies = {
    ("SGD", 0.5): (82.60, 80.91, 78.86, 74.50, 66.83),
    ("SGD", 1.0): (83.62, 83.61, 82.10, 77.99, 73.40),
    ("SGD", 64.0): (83.98, 83.82, 82.60, 79.53, 74.63),
    ("K-FAC", 0.5): (83.18, 84.17, 83.75, 84.07, 80.25),
    ("K-FAC", 1.0): (83.84, 84.16, 84.29, 84.33, 83.21),
    ("K-FAC", 64.0): (81.56, 82.72, 82.63, 79.51, 75.37),
}
PAPER_TABLE_WITHOUT_MOMENTUM: PaperAccuracies = {
    ("SGD", 0.5): (80.52, 78.69, 75.05, 67.94, 49.70),
    ("SGD", 1.0): (82.85, 80.41, 77.58, 73.12, 64.30),
    ("SGD", 64.0): (83.59, 81.23, 77.25, 73.63, 70.53),
    ("K-FAC", 0.5): (77.60, 79.66, 83.94, 82.14, 78.63),
    ("K-FAC", 1.0): (79.10, 81.69, 83.92, 83.16, 80.27),
    ("K-FAC", 64.0): (76.06, 76.95, 77.28, 76.04, 75.94),
}
CAPTION_CHOICE = (
    "The caption says accuracy on the training data; the text compares with Table 2, so test accuracy is shown."
)


# Over batch sizes.


def batch_table(scale: Scale, batches: Sequence[int], printed: PaperAccuracies, **fields: Any) -> Experiment:
    """Returns an experiment on b_L over batch sizes, next to the accuracies that the paper prints."""
    shown_batches = tuple(scale.choose(batches[-1:], batches, batches))
    methods = ("SGD", "K-FAC")
    exponents = scale.choose((0.5, 64.0), MAIN_EXPONENTS, MAIN_EXPONENTS)
    parts: dict[str, Part] = {
        nngp_part_name(method, b, batch): tuned_part(scale, method, b, batch, **fields)
        for method in methods
        for b in exponents
        for batch in shown_batches
    }
    claims = []
    for batch in shown_batches if scale is not Scale.SMOKE else ():
        column = BATCH_SIZES.index(batch)
        paper_text = {key: f"{row[column]:g}" for key, row in printed.items()}
        claims += [
            Claim(
                f"K-FAC, batch {batch}: b_L = 1 beats {other:g}.",
                one_beats("K-FAC", other, batch),
                f"{paper_text['K-FAC', 1.0]} against {paper_text['K-FAC', other]}",
            )
            for other in (0.5, 64.0)
        ]
        claims.append(
            Claim(
                f"SGD, batch {batch}: b_L = 1 is not better than 64.",
                beats(best_at("SGD", 64.0, batch), best_at("SGD", 1.0, batch), or_equals=True),
                f"{paper_text['SGD', 64.0]} against {paper_text['SGD', 1.0]}",
            )
        )
    if len(shown_batches) > 1:
        pairs = [
            (f"batch {batch}", best_at("K-FAC", 1.0, batch), best_at("K-FAC", 64.0, batch)) for batch in shown_batches
        ]
        gaps = [
            printed["K-FAC", 1.0][column] - printed["K-FAC", 64.0][column]
            for column in map(BATCH_SIZES.index, shown_batches)
        ]
        text = "K-FAC: what b_L = 1 gains over 64 is less the smaller the batch."
        claims.append(Claim(text, gap_grows(pairs), ", ".join(f"{gap:+.2f}" for gap in gaps)))
    if scale is Scale.SMOKE:
        batch = shown_batches[0]
        claims = [Claim("K-FAC: 0.5 beats 64.", beats(best_at("K-FAC", 0.5, batch), best_at("K-FAC", 64.0, batch)))]

    def shown(evidence: Evidence) -> Table:
        rows = []
        for method in methods:
            for b in exponents:
                values = [best_at(method, b, batch).value(evidence).mean for batch in shown_batches]
                cells = ["-" if math.isnan(value) else f"{100 * value:.2f}" for value in values]
                paper = [f"{printed[method, b][BATCH_SIZES.index(batch)]:.2f}" for batch in shown_batches]
                rows.append(
                    (method, f"{b:g}", *(f"{ours} ({theirs})" for ours, theirs in zip(cells, paper, strict=True)))
                )
        columns = ("method", "b_L", *(f"batch {batch}" for batch in shown_batches))
        return Table("Test accuracy, ours (the paper's)", columns, tuple(rows))

    choices = NNGP_CHOICES if "momentum" in fields else (MOMENTUM, *NNGP_CHOICES)
    return Experiment(parts, claims, drawing.table(shown), choices)


@recipe("b-output-k-fac", "Table 2", "Test accuracy for different b_L and batch sizes, 64 to 1024")
def large_batches(scale: Scale) -> Experiment:
    return batch_table(scale, LARGE_BATCHES, PAPER_TABLE)


@recipe("b-output-k-fac-small", "Table 2", "The same, batch sizes 4 and 16")
def small_batches(scale: Scale) -> Experiment:
    return batch_table(scale, SMALL_BATCHES, PAPER_TABLE)


@recipe("wo-momentum-b-output-k-fac", "Appendix E.4, table", "The same without momentum, 64 to 1024")
def batches_without_momentum(scale: Scale) -> Experiment:
    experiment = batch_table(scale, LARGE_BATCHES, PAPER_TABLE_WITHOUT_MOMENTUM, momentum=0.0)
    return Experiment(experiment.parts, experiment.claims, experiment.draw, (*experiment.choices, CAPTION_CHOICE))


@recipe("wo-momentum-b-output-k-fac-small", "Appendix E.4, table", "The same without momentum, 4 and 16")
def small_batches_without_momentum(scale: Scale) -> Experiment:
    experiment = batch_table(scale, SMALL_BATCHES, PAPER_TABLE_WITHOUT_MOMENTUM, momentum=0.0)
    return Experiment(experiment.parts, experiment.claims, experiment.draw, (*experiment.choices, CAPTION_CHOICE))


# Over architectures.


@recipe("k-fac-effective", "Appendix E.3, figure", "b_L = 1 is better than 0.5 in various networks")
def architectures(scale: Scale) -> Experiment:
    networks: dict[str, dict[str, Any]] = {
        "MLP": {"model": "mlp", "data": "mnist", "width": 1024, "base": 64, "epochs": 20, "damping": 1},
        "CNN": {"model": "cnn", "data": "fashion-mnist", "width": 32, "base": 4, "epochs": 50, "damping": 1},
        "Myrtle-5": {
            "model": "myrtle5",
            "data": "fashion-mnist",
            "width": 64,
            "base": 4,
            "epochs": 20,
            "batch": 128,
            "damping": 1,
        },
        "ResNet-18": {
            "model": "resnet18",
            "data": "fashion-mnist",
            "width": 4,
            "base": 1,
            "epochs": 20,
            "batch": 128,
            "damping": 10,
        },
    }
    exponents = scale.choose((0.5, 1.0), MAIN_EXPONENTS, (0.5, 1.0, 2.0, 4.0, 64.0))
    parts: dict[str, Part] = {}
    for name, network in networks.items():
        for b in exponents:
            config = setting(
                scale,
                **{
                    "model": network["model"],
                    "data": network["data"],
                    "samples": PAPER_SAMPLES,
                    "loss": "mse",
                    "method": "kfac",
                },
                **{
                    "base_width": network["base"],
                    "epochs": network["epochs"],
                    "batch": network.get("batch"),
                    "dtype": "tf32",
                },
                **{"output_exponent": f"{b:g}", "evaluate_every": network["epochs"]},
                model_options=NORMAL if network["model"] in ("mlp", "cnn") else {},
            )
            small = {"mlp": 256, "cnn": 8, "myrtle5": 8, "resnet18": 2}[network["model"]]
            width = scale.choose(2 * network["base"], small, network["width"])
            rates = scale.choose((2.0**-4,), powers(-9, -1, 4), powers(-10, 0, 2))
            if scale is Scale.SMALL:
                config = config.replace(samples=256, test_samples=1000, epochs=5)
            scheme = f"mup/{rescaled(network['damping'])}"
            parts[f"{name}, b_L = {b:g}"] = study(
                scale, config, scheme, widths=(width,), lr=rates, seeds=scale.choose(1, 1, 2)
            )
    claims = [
        Claim(
            f"{name}: b_L = 1 is better than 0.5.",
            beats(BestOf(f"{name}, b_L = 1", name="b_L = 1:"), BestOf(f"{name}, b_L = 0.5", name="0.5:")),
        )
        for name in networks
    ]
    if 64.0 in exponents:
        claims += [
            Claim(
                f"{name}: far above 1 the training accuracy is higher than at 0.5.",
                beats(
                    BestOf(f"{name}, b_L = 64", name="b_L = 64:", metric="train_accuracy"),
                    BestOf(f"{name}, b_L = 0.5", name="0.5:", metric="train_accuracy"),
                ),
            )
            for name in networks
        ]
    panels = [ExponentPanel(name, {b: f"{name}, b_L = {b:g}" for b in exponents}) for name in networks]
    choices = (
        "Widths and learning rates: not given; MLP 1024 (base 64), CNN 32 (4), Myrtle-5 64 (4), ResNet-18 4 (1, the "
        "original network is 4).",
        "Damping: rescaled, 1; for ResNet-18 10, as in the transfer figure.",
        FLOOR,
    )
    return Experiment(parts, claims, drawing.over_exponent(panels, second="train_accuracy", share=False), choices)
