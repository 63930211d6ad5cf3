"""On a GPU: runs repeat, go on where they were stopped, and agree with the CPU's."""

from __future__ import annotations

import signal

import pytest
import torch

from mukron.data import load
from mukron.train import RunConfig, train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # of the first backward pass in a process
]
NET = """
from torch import nn

def make(width):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10)
    )
"""
CONFIG = RunConfig(
    model="dropout_on_cuda:make",
    width=128,
    base_width=64,
    batch=128,
    epochs=3,
    lr=0.002,
    method_options={"memory": "ema:0.95"},
    device="cuda",
)


@pytest.fixture(autouse=True)
def _dropout_net(tmp_path, monkeypatch):
    (tmp_path / "dropout_on_cuda.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)


def numbers(run):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in run.epochs]


@pytest.mark.parametrize("method", ["sgd", "kfac", "foof", "shampoo"])
def test_same_config_same_numbers(method):
    options = CONFIG.method_options if method == "kfac" else {}
    config = CONFIG.replace(method=method, method_options=options, epochs=2)
    digits = load("digits")
    before = torch.cuda.get_rng_state()
    assert numbers(train(config, dataset=digits)) == numbers(train(config, dataset=digits))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_convolutional_network_repeats():
    config = CONFIG.replace(model="cnn", width=32, base_width=16, epochs=1, augment=["crop", "cutout"])
    assert numbers(train(config)) == numbers(train(config))


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    def press(at):
        if at.step == 17 and at.row is None:
            signal.raise_signal(signal.SIGINT)

    assert train(CONFIG, tmp_path / "one", progress=press).status == "interrupted"
    one, whole = train(CONFIG, tmp_path / "one"), train(CONFIG, tmp_path / "whole")
    assert numbers(one) == numbers(whole)
    weights = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in ("one", "whole")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_it_agrees_with_the_cpu(dtype):
    config = CONFIG.replace(model="mlp", method_options={"fisher": "exact"}, epochs=1, dtype=dtype)
    there, here = train(config).final, train(config.replace(device="cpu")).final
    tolerance = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.05}[dtype]
    assert there["train_loss"] == pytest.approx(here["train_loss"], rel=tolerance)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler itself
def test_compiled():
    config = CONFIG.replace(model="mlp", epochs=1)
    plain, compiled = train(config).final, train(config.replace(compile=True)).final
    assert compiled["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-2)
