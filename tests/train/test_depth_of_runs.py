"""Runs of deep networks with the settings of a shallow one: the laws of depth in a config and in its script."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

import pytest
import torch

from mukron.study.script import script
from mukron.train import RunConfig, RunError, dataset_of, train
from mukron.train.build import build
from mukron.train.factories import network_options

DEEP = {"model": "resmlp", "width": 32, "base_width": 16, "model_options": {"depth": 8}, "base_depth": 2}
SHORT = {"samples": 64, "test_samples": 16, "epochs": 2, "batch": 32, "momentum": 0.0}


def built(**options):
    config = RunConfig(**{**DEEP, **SHORT, **options})
    return config, build(config, dataset_of(config))


@pytest.mark.parametrize(("method", "factor"), [("sgd", 4.0), ("adamw", 1.0), ("kfac", 0.25), ("foof", 4.0)])
def test_learning_rates_inside_of_blocks_follow_the_depth(method, factor):
    _, deep = built(method=method)
    _, alike = built(method=method, base_depth=8)
    law = {"adamw": "adam"}.get(method, method)
    for name in ("blocks.7.up.weight", "stem.weight"):
        ratio = deep.plan.scales(law)[name].lr / alike.plan.scales(law)[name].lr
        assert ratio == pytest.approx(factor if name.startswith("blocks") else 1.0)


def test_branches_are_multiplied_by_base_depth_over_depth():
    config, deep = built(method="sgd")
    _, alike = built(method="sgd", base_depth=8)
    x = torch.randn(4, 64)
    with torch.no_grad():
        moved = [(model.blocks[0](h := model.stem(x)) - h).norm() for model in (deep.model, alike.model)]
    assert float(moved[1] / moved[0]) == pytest.approx(4.0, rel=1e-4)
    assert RunConfig.from_dict(config.to_dict()) == config


def test_a_config_without_it_is_written_as_before():
    assert "base_depth" not in RunConfig().to_dict()


@pytest.mark.parametrize("method", ["sgd", "kfac"])
def test_the_script_of_a_deep_run_trains_as_the_run_does(method, tmp_path):
    config, _ = built(method=method, lr=0.01, batch=None)
    code = script(config, network_options(config, dataset_of(config)))
    assert "def network(width, depth=8):" in code
    assert "depth=2" in code
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, "script.py", "exec"), {})
    printed = [float(loss) for loss in re.findall(r"^epoch \d+: loss (\S+)$", out.getvalue(), re.MULTILINE)]
    run = train(config, tmp_path)
    assert printed == pytest.approx([row["train_loss"] for row in run.epochs], rel=1e-3)


def test_a_base_depth_needs_a_depth():
    with pytest.raises(RunError, match=r"base_depth=2: say the network's own depth too, model_options\.depth"):
        RunConfig(model="gpt", base_depth=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_options": {"depth": 8, "base_depth": 3}}, "say it once"),
        ({"model_options": {"depth": True}}, "say the network's own depth too"),
        ({"model": "mlp"}, "model='mlp' has no residual blocks"),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(RunError, match=message):
        built(**options)


def test_sp_has_no_multiplier_and_no_law():
    _, sp = built(method="sgd", scheme="sp")
    assert {scale.lr for scale in sp.plan.scales("sgd").values()} == {1.0}
    assert sp.model.blocks[0].multiplier == 1
