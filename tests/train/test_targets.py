"""Runs on targets with positions, on real numbers, on parts of an output, and with a loss of the user's own."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mukron.data import as_dataset, load
from mukron.train import (
    Run,
    RunConfig,
    RunError,
    batch_of,
    build,
    dataset_of,
    loop,
    loss_of,
    stack_size,
    stackable,
    train,
)

TEXT = load("coriolanus", length=16, samples=64, test_samples=16)
SMALL = {"model": "gpt", "width": 32, "base_width": 16, "model_options": {"depth": 1}, "data_options": {"length": 16}}
MODULE = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


def line(n=64):
    x = torch.linspace(-1, 1, n)[:, None].repeat(1, 3)
    return x, torch.stack([x[:, 0], 1 - x[:, 0]], 1)


def one(n=64):
    x, y = line(n)
    return x, y[:, 0]


def pixels(n=8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 4, 4, generator=g), torch.randint(5, (n, 4, 4), generator=g)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


class Segments(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 1), nn.Conv2d(width, 5, 1)

    def forward(self, x):
        return self.last(F.relu(self.first(x)))


@dataclass
class Returned:
    loss: torch.Tensor | None
    logits: torch.Tensor


class AsDict(Net):
    def forward(self, x):
        return {"hidden": x, "logits": super().forward(x)}


class AsDataclass(Net):
    def forward(self, x):
        return Returned(None, super().forward(x))


class AsTuple(Net):
    def forward(self, x):
        return super().forward(x), x


def absolute(output, targets):
    return (output - targets).abs().mean()


def focal(output, labels):
    p = F.log_softmax(output.flatten(0, -2), 1).gather(1, labels.flatten()[:, None])
    return -((1 - p.exp()) * p).mean()


def rows(output, targets):
    return (output - targets).abs().mean(1)


def broken(output, targets):
    return output @ targets
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_targets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_targets"


# Positions.


@pytest.mark.parametrize("method", ["adamw", "kfac", "foof", "shampoo"])
def test_a_language_model_is_trained(method):
    lr = {"adamw": 0.01, "kfac": 0.1, "foof": 0.5, "shampoo": 0.05}[method]
    run = train(RunConfig(**SMALL, data="coriolanus", method=method, lr=lr, samples=512, test_samples=16, epochs=3))
    assert run.status == "finished"
    assert run.final["train_loss"] < 4.2
    assert run.final["test_bits_per_byte"] == pytest.approx(run.final["test_loss"] / math.log(2))
    assert run.final["tokens"] == 3 * 16 * 32 * 16
    assert 0 < run.final["test_accuracy"] < 1
    assert len(run.sample) > 50


def test_its_loss_is_the_mean_over_positions():
    config = RunConfig(**SMALL, data="coriolanus", samples=64, method="adamw")
    built = build(config, TEXT)
    x, y = TEXT.train.inputs[:4], TEXT.train.targets[:4]
    logits = built.outputs(x)
    by_hand = np.mean(
        [-logits[i, t].detach().double().log_softmax(0)[y[i, t]].item() for i in range(4) for t in range(16)]
    )
    assert built.loss(logits, y).item() == pytest.approx(by_hand, rel=1e-5)
    squares = loss_of(config.replace(loss="mse"), TEXT)(logits, y)
    targets = F.one_hot(y, 256) - 1 / 256
    assert squares.item() == pytest.approx((logits - targets).square().sum(-1).mean().item() / 2, rel=1e-5)


def test_ignored_positions_do_not_count(own):
    inputs = TEXT.train.inputs[:32]
    targets = TEXT.train.targets[:32].clone()
    half = targets.clone()
    half[:, 8:] = -100
    config = RunConfig(**SMALL, data="mine", method="sgd", lr=1e-9, epochs=1, batch=8)
    run = train(config, dataset=as_dataset("mine", ((inputs, half), (inputs, half))))
    built = build(config, as_dataset("mine", (inputs, half)))
    first = F.cross_entropy(built.outputs(inputs)[:, :8].flatten(0, 1), half[:, :8].flatten())
    assert run.final["test_loss"] == pytest.approx(first.item(), rel=1e-4)


def test_a_text_has_batches_of_32_windows_unless_told():
    assert batch_of(RunConfig(**SMALL, data="coriolanus"), TEXT) == 32
    assert batch_of(RunConfig(**SMALL, data="coriolanus", batch=7), TEXT) == 7
    assert batch_of(RunConfig(), load("digits")) == 1500


def test_the_networks_usual_data():
    assert RunConfig(model="gpt").data == "coriolanus"
    assert RunConfig().data == "digits"
    assert RunConfig(model="gpt", data="shakespeare").data == "shakespeare"


def test_classes_in_dimension_one(own):
    config = RunConfig(
        **{"model": f"{own}:Segments", "base_width": 8, "width": 16, "data": f"{own}:pixels", "method": "kfac"},
        **{"lr": 0.05, "epochs": 3},
    )
    with pytest.raises(
        RunError, match=r"output has shape \[8, 5, 4, 4\]; own_targets:pixels wants \[samples, 4, 4, 5\]"
    ):
        train(config)
    run = train(config.replace(method_options={"class_dim": 1}))
    assert run.epochs[-1]["train_loss"] < run.epochs[0]["train_loss"]


def test_a_sample_and_its_text_come_back_from_the_folder(tmp_path):
    config = RunConfig(**SMALL, data="coriolanus", method="adamw", samples=64, test_samples=16, epochs=1)
    run = train(config, tmp_path / "run")
    assert run.sample
    assert Run.load(tmp_path / "run").sample == run.sample
    assert Run.from_dict(run.to_dict()).sample == run.sample
    assert train(config).sample == run.sample


def test_a_killed_run_on_text_continues_with_the_same_numbers(tmp_path):
    config = RunConfig(**SMALL, data="coriolanus", samples=128, test_samples=16, epochs=2)
    whole = train(config)
    train(config.replace(epochs=1), tmp_path / "run")
    resumed = train(config, tmp_path / "run")
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in run.epochs] for run in (whole, resumed)]
    assert timeless[0] == timeless[1]
    assert resumed.sample == whole.sample


def test_token_numbers(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(3000) % 10)
    options = {**SMALL, "data_options": {"length": 16}}
    config = RunConfig(**options, data=str(tmp_path / "tokens.npy"), method="adamw", lr=0.02, epochs=8)
    run = train(config)
    assert run.final["test_accuracy"] > 0.9  # every token follows from the one before it
    assert "test_bits_per_byte" not in run.final
    numbers = [int(word) for word in run.sample.split()]
    assert numbers[:8] == [(numbers[0] + k) % 10 for k in range(8)]


# Real numbers.


@pytest.mark.parametrize("method", ["adamw", "kfac", "foof", "shampoo", "gauss-newton", "sgd"])
def test_regression(method, own):
    lr = {"adamw": 0.01, "kfac": 0.1, "foof": 0.1, "shampoo": 0.1, "gauss-newton": 0.02, "sgd": 0.1}[method]
    config = RunConfig(data=f"{own}:line", width=32, base_width=16, loss="mse", method=method, lr=lr, epochs=40)
    assert dataset_of(config).classes == 2
    run = train(config)
    assert run.status == "finished"
    assert run.final["train_loss"] < 0.2 * run.epochs[0]["train_loss"]
    assert not any("accuracy" in name for row in run.epochs for name in row)


def test_one_real_number_a_sample(own):
    run = train(RunConfig(data=f"{own}:one", width=64, loss="mse", method="adamw", lr=0.01, epochs=2))
    assert run.status == "finished"


def test_regression_is_half_the_sum_of_squares(own):
    config = RunConfig(data=f"{own}:line", loss="mse")
    output, targets = torch.randn(6, 2), torch.randn(6, 2)
    expected = sum(float((f - y).square().sum()) / 2 for f, y in zip(output, targets, strict=True)) / 6
    assert float(loss_of(config, dataset_of(config))(output, targets)) == pytest.approx(expected)


def test_what_does_not_suit_real_numbers_is_refused(own):
    config = RunConfig(data=f"{own}:line")
    with pytest.raises(RunError, match="targets of own_targets:line are real numbers; use loss='mse'"):
        train(config)
    with pytest.raises(RunError, match=r"label_smoothing=0.1: the targets of own_targets:line are real numbers"):
        train(config.replace(loss="mse", label_smoothing=0.1))
    with pytest.raises(RunError, match=r"output has shape \[64, 2\]; own_targets:one wants \[samples, 1\]"):
        train(RunConfig(model=f"{own}:Net", base_width=8, data=f"{own}:one", loss="mse", method="sgd"))


def test_such_runs_are_not_stacked(own):
    config = RunConfig(data=f"{own}:line", loss="mse", width=32, momentum=0.0)
    assert stackable(config) == ""
    assert stack_size(config, dataset_of(config)) == 1
    assert "built-in ones" in stackable(config.replace(loss=f"{own}:absolute"))


# Parts of an output.


@pytest.mark.parametrize("method", ["kfac", "foof", "shampoo", "adamw", "gauss-newton"])
@pytest.mark.parametrize(("network", "output"), [("AsDict", "logits"), ("AsDataclass", "logits"), ("AsTuple", "0")])
def test_a_part_of_the_output_is_trained_like_the_output(network, output, method, own):
    common = {"base_width": 8, "width": 16, "data": f"{own}:line", "loss": "mse", "lr": 0.05, "epochs": 3}
    plain = train(RunConfig(model=f"{own}:Net", method=method, **common))
    part = train(RunConfig(model=f"{own}:{network}", output=output, method=method, **common))
    assert [row["train_loss"] for row in part.epochs] == [row["train_loss"] for row in plain.epochs]


def test_a_part_that_is_not_there_is_refused(own):
    config = RunConfig(model=f"{own}:AsDict", base_width=8, data=f"{own}:line", loss="mse", output="logit")
    with pytest.raises(RunError, match="output='logit': the network returned a dict of hidden, logits"):
        train(config)
    with pytest.raises(RunError, match="returned a Returned of loss, logits; name its output"):
        train(config.replace(model=f"{own}:AsDataclass", output=None))


# A loss of one's own.


@pytest.mark.parametrize("method", ["kfac", "foof", "shampoo", "adamw"])
def test_a_loss_of_ones_own(method, own):
    lr = {"adamw": 0.02, "kfac": 0.02, "foof": 0.5, "shampoo": 0.1}[method]
    config = RunConfig(
        data=f"{own}:line", width=32, base_width=16, loss=f"{own}:absolute", method=method, lr=lr, epochs=30
    )
    run = train(config)
    assert run.final["train_loss"] < 0.7 * run.epochs[0]["train_loss"]


def test_a_loss_of_ones_own_on_a_text(own):
    config = RunConfig(**SMALL, data="coriolanus", samples=128, test_samples=16, loss=f"{own}:focal", epochs=2)
    run = train(config)
    assert run.status == "finished"
    assert "test_accuracy" in run.final
    assert "test_bits_per_byte" not in run.final  # a loss of one's own is in no known unit


def test_the_likelihood_beside_a_loss_of_ones_own(own):
    config = RunConfig(data=f"{own}:line", width=64, loss=f"{own}:absolute")
    data = dataset_of(config)
    assert build(config, data).optimizer._capture.options.likelihood == "gaussian"
    chosen = config.replace(method_options={"likelihood": "categorical"})
    assert build(chosen, data).optimizer._capture.options.likelihood == "categorical"
    with pytest.raises(RunError, match="'likelihood' is said by the field loss"):
        RunConfig(method_options={"likelihood": "gaussian"})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("rows", r"returned a tensor \[64\]; expected one number"),
        ("broken", r"could not take outputs \[64, 2\] and targets \[64, 2\]"),
        ("nowhere", "has no function or class 'nowhere'"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(loss, message, own):
    with pytest.raises(ValueError, match=message):
        train(RunConfig(data=f"{own}:line", width=64, loss=f"{own}:{loss}", method="sgd"))


def test_keys_of_runs_without_an_output_stay():
    """The stored results of earlier versions are found by them."""
    assert "output" not in RunConfig().to_dict()
    assert RunConfig(output="logits").to_dict()["output"] == "logits"
    assert RunConfig.from_dict(RunConfig(output="logits").to_dict()).output == "logits"
    assert RunConfig().differences(RunConfig(output="logits")) == {"output": (None, "logits")}


def test_smoothed_labels_are_in_no_bits_per_byte():
    run = train(
        RunConfig(
            **SMALL, data="coriolanus", samples=64, test_samples=16, method="adamw", epochs=1, label_smoothing=0.1
        )
    )
    assert not any("bits_per_byte" in name for name in run.final)
    assert "test_accuracy" in run.final


def test_a_sample_comes_after_the_last_checkpoint_and_may_be_left_out(tmp_path, monkeypatch):
    config = RunConfig(**SMALL, data="coriolanus", samples=64, test_samples=16, method="adamw", epochs=1)
    assert train(config, sample=False).sample == ""

    def killed(*arguments):
        assert (tmp_path / "run" / "checkpoint.pt").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "written_sample", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run")
    monkeypatch.undo()
    assert train(config, tmp_path / "run").sample == train(config).sample
