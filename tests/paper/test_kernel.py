"""Kernel regression beside the runs: a plain reference gives the same accuracies, and older results get it added."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mukron.diagnose.nngp import feature_kernel
from mukron.paper import RECIPES, Request, Scale, judge_again, load_evidence, reproduce
from mukron.paper.kernel import regress
from mukron.paper.nngp import KERNEL
from mukron.paper.recipe import Less, Regression, key_of
from mukron.train import RunConfig, dataset_of
from mukron.train.build import network_of

CONFIG = RunConfig(
    method="kfac", scheme="mup", damping="rescaled:2", width=128, base_width=32, samples=200, output_exponent="64"
)


def test_the_accuracies_are_those_of_a_plain_reference():
    dataset = dataset_of(CONFIG)
    record = regress(Regression(CONFIG, (128.0,), seeds=2), dataset)
    assert [result.point.seed for result in record.results] == [0, 1]
    for result in record.results:
        model, _ = network_of(CONFIG.replace(seed=result.point.seed), dataset)
        train, test = (dataset.prepare(split.inputs, CONFIG.weights_dtype) for split in (dataset.train, dataset.test))
        K, K_test = feature_kernel(model, train).numpy(), feature_kernel(model, test, train).numpy()
        labels = dataset.train.targets.numpy()
        Y = np.eye(10)[labels] - 0.1
        ridge = 2 * np.trace(K) / 32  # 32: the fan-in of the output layer at the base width
        alpha = np.linalg.solve(K + ridge * np.eye(200), Y)
        for outputs, targets, name in (
            (K @ alpha, labels, "train_accuracy"),
            (K_test @ alpha, dataset.test.targets.numpy(), "test_accuracy"),
        ):
            assert result.value(name) == pytest.approx((outputs.argmax(1) == targets).mean())


def test_it_does_not_depend_on_the_output_layer():
    dataset = dataset_of(CONFIG)
    accuracies = [
        regress(Regression(CONFIG.replace(output_exponent=b), (128.0,)), dataset).results[0].value("test_accuracy")
        for b in ("1", "64")
    ]
    assert accuracies[0] == accuracies[1] > 0.7


def test_it_is_the_regression_of_the_runs_that_it_is_compared_with():
    """Same network, data and damping; seeds are limited like those of other parts."""
    parts = RECIPES["nngp"].experiment(Scale.PAPER).parts
    part, runs = parts[KERNEL], parts["K-FAC, b_L = 64, batch 1024"]
    assert (part.widths, part.total, part.rho) == (runs.widths, len(runs.seeds), 1.0)
    for field in ("model", "model_options", "base_width", "data", "samples", "loss"):
        assert getattr(part.config, field) == getattr(runs.config, field)
    assert Less(seeds=2, epochs=3).applied_to(part).total == 2
    assert key_of(part) != key_of(runs)


@pytest.mark.filterwarnings("ignore:layer .* factorized with:RuntimeWarning")
def test_a_result_without_it_gets_it_when_it_is_judged_again(tmp_path):
    folder = tmp_path / "nngp"
    reproduce(Request(("nngp",), Scale.SMOKE, str(tmp_path)))
    whole = load_evidence(folder)[KERNEL]
    content = json.loads((folder / "evidence.json").read_text())
    del content["parts"][KERNEL], content["seal"]
    (folder / "evidence.json").write_text(json.dumps(content))
    again = judge_again(folder)
    added = load_evidence(folder)[KERNEL]
    assert [result.rows for result in added.results] == [result.rows for result in whole.results]
    assert again.made[KERNEL].startswith("computed after the runs; ")
    del content["parts"]["SGD, b_L = 64, batch 1024"]
    (folder / "evidence.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has no 'SGD, b_L = 64, batch 1024', which the recipe now asks for; run it"):
        judge_again(folder)
