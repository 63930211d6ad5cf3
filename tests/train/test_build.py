"""From a config to network, plan, optimizer and loss."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, FOOF, KFAC, AdamStep, Exact, GaussNewton, Heuristic, KLClip, Rescaled, Shampoo
from mukron.data import Split, as_dataset, load
from mukron.models import CNN
from mukron.train import RunConfig, RunError, build, dataset_of, factory_of, loss_of, train

DIGITS = load("digits")
SMALL_IMAGES = as_dataset("small", (DIGITS.train.inputs[:, 0, :4, :4], DIGITS.train.targets))


def test_the_network_is_fitted_to_the_data():
    built = build(RunConfig(width=128, base_width=32, model_options={"depth": 4}), DIGITS)
    shapes = [tuple(parameter.shape) for parameter in built.model.parameters()]
    assert shapes == [(128, 64), (128, 128), (128, 128), (10, 128)]
    assert built.plan.base_width == 32
    assert built.plan.scales("kfac")["fc2.weight"].damping == {"A": 4.0, "B": 0.25}
    assert isinstance(build(RunConfig(model="cnn", width=16), DIGITS).model, CNN)


def test_the_scheme_and_the_output_exponent_reach_the_weights():
    def size(**fields):
        return float(build(RunConfig(width=1024, method="sgd", **fields), DIGITS).model.fc3.weight.detach().std())

    assert size(scheme="mup") == pytest.approx(size(scheme="sp") / 4, rel=0.05)  # r_in = 16
    assert size(output_exponent=2) == pytest.approx(size(scheme="mup") / 16, rel=0.05)
    assert size(output_exponent="zero") == 0


def test_a_seed_is_a_network():
    first, again, other = (
        build(RunConfig(width=64, seed=seed), DIGITS).model.fc2.weight.detach() for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("name", "dtype"), [("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")])
def test_weights_have_the_configs_dtype(name, dtype):
    built = build(RunConfig(width=64, dtype=name), DIGITS)
    x = DIGITS.prepare(DIGITS.train.inputs[:4], built.config.weights_dtype)
    assert built.model.fc1.weight.dtype == x.dtype == getattr(torch, dtype)
    assert built.outputs(x).dtype == getattr(torch, name)


def optimizer(**fields):
    return build(RunConfig(width=128, **fields), DIGITS).optimizer


def test_methods():
    kfac = optimizer(loss="mse", seed=3, method_options={"memory": "ema:0.5", "fisher": "exact", "exclude": ["fc1"]})
    assert isinstance(kfac, KFAC)
    assert (kfac.capture_options.likelihood, kfac.capture_options.fisher) == ("gaussian", Exact())
    assert (kfac.options.memory, kfac.options.exclude, kfac.options.seed) == (EMA(0.5), ("fc1",), 3)
    assert kfac.param_groups[0]["damping_rule"] == Rescaled(1.0).plain()
    assert optimizer().capture_options.likelihood == "categorical"
    assert optimizer(damping=Heuristic(0.1)).param_groups[0]["damping_rule"] == Heuristic(0.1).plain()
    assert optimizer(method_options={"trust": "kl:0.5"}).options.trust == KLClip(0.5)
    foof = optimizer(method="foof", momentum=0.5, weight_decay=0.1, lr=3.0)
    assert isinstance(foof, FOOF)
    assert [foof.param_groups[0][name] for name in ("momentum", "weight_decay", "lr")] == [0.5, 0.1, 3.0]
    shampoo = optimizer(method="shampoo:1/4", method_options={"fallback": "adamw"})
    assert isinstance(shampoo, Shampoo)
    assert shampoo.method.e_A == Fraction(1, 4)
    assert shampoo.options.fallback == AdamStep()
    assert isinstance(optimizer(method="gauss-newton"), GaussNewton)


def test_torchs_own_methods_take_the_plans_groups():
    sgd = optimizer(method="sgd", lr=0.5, weight_decay=0.1, method_options={"nesterov": True})
    assert type(sgd) is torch.optim.SGD
    assert {group["role"]: group["lr"] for group in sgd.param_groups} == {"input": 1.0, "hidden": 0.5, "output": 0.25}
    assert all(group["lr"] * group["weight_decay"] == pytest.approx(0.05) for group in sgd.param_groups)
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in sgd.param_groups)
    adamw = optimizer(method="adamw", momentum=0.8, method_options={"beta2": 0.99, "eps": 1e-6})
    assert type(adamw) is torch.optim.AdamW
    assert all(group["betas"] == (0.8, 0.99) for group in adamw.param_groups)
    # at twice the base width: gradients are half as large where fan-out grows
    assert {group["role"]: group["eps"] for group in adamw.param_groups} == pytest.approx(
        {"input": 5e-7, "hidden": 5e-7, "output": 1e-6}
    )


def test_the_laws_of_decay_and_embeddings_reach_the_optimizer():
    sgd = optimizer(method="sgd", weight_decay=0.1, lr=0.5, decay="1/width")
    products = {group["role"]: group["lr"] * group["weight_decay"] for group in sgd.param_groups}
    assert products == pytest.approx({"input": 0.05, "hidden": 0.025, "output": 0.025})
    kfac = optimizer(method="kfac", decay="1/2", embedding_lr=-1)
    assert {name: entry.decay for name, entry in kfac.entries.items()} == pytest.approx(
        {"fc1.weight": 1, "fc2.weight": 2**-0.5, "fc3.weight": 2**-0.5}
    )
    assert kfac.parametrization.embedding_lr == -1


def test_losses_are_what_they_say():
    torch.manual_seed(0)
    output, labels = torch.randn(6, 10), torch.randint(10, (6,))
    targets = F.one_hot(labels, 10) - 0.1
    half_squares = sum(0.5 * float((f - t).square().sum()) for f, t in zip(output, targets, strict=True)) / 6
    assert float(loss_of(RunConfig(loss="mse"), DIGITS)(output, labels)) == pytest.approx(half_squares)
    smoothed = loss_of(RunConfig(loss="mse", label_smoothing=1 / 3), DIGITS)
    assert float(smoothed((1 - 1 / 3) * targets, labels)) == pytest.approx(0, abs=1e-12)
    entropy = loss_of(RunConfig(label_smoothing=0.2), DIGITS)
    assert torch.equal(entropy(output, labels), F.cross_entropy(output, labels, label_smoothing=0.2))
    assert entropy(output.bfloat16(), labels).dtype == torch.float32
    with pytest.raises(RunError, match=r"output has shape \[6, 9\]; digits wants \[samples, 10\]"):
        entropy(output[:, :9], labels)
    with pytest.raises(RunError, match=r"the network returned a tuple; expected a tensor \[samples, 10\]"):
        entropy((output, output), labels)
    few = replace(DIGITS, classes=5)
    labels = labels.clamp_max(4)  # data of one's own that shows 5 classes of 10
    targets = F.one_hot(labels, 10) - 0.1
    assert float(loss_of(RunConfig(loss="mse"), few)(targets, labels)) == pytest.approx(0, abs=1e-12)
    assert torch.equal(loss_of(RunConfig(), few)(output, labels), F.cross_entropy(output, labels))


def test_data_are_the_configs(tmp_path):
    chosen = dataset_of(RunConfig(samples=100, test_samples=30))
    again = dataset_of(RunConfig(samples=100, test_samples=30, seed=5), DIGITS)
    assert (len(chosen.train), len(chosen.test)) == (100, 30)
    assert torch.equal(chosen.train.inputs, again.train.inputs)  # at every seed, loaded before or not
    with pytest.raises(RunError, match="the config's data is 'mnist', but the data set given is 'digits'"):
        dataset_of(RunConfig(data="mnist"), DIGITS)
    with pytest.raises(ValueError, match="unknown data set 'digit'"):
        dataset_of(RunConfig(data="digit"))


def test_what_does_not_fit_is_told(monkeypatch):
    with pytest.raises(RunError, match="model='vgg19', data='digits': this network pools images of at least 32"):
        factory_of(RunConfig(model="vgg19"), DIGITS)
    with pytest.raises(RunError, match=r"model='mlp', model_options={'dept': 4}: .*unexpected keyword argument 'dept'"):
        build(RunConfig(model_options={"dept": 4}), DIGITS)
    with pytest.raises(ValueError, match="unknown model 'mpl'"):
        build(RunConfig(model="mpl"), DIGITS)
    with pytest.raises(ValueError, match="shrinks from 64"):
        build(RunConfig(width=32), DIGITS)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(RunError, match="device='cuda': torch finds 0 GPUs here; choose cpu"):
        build(RunConfig(device="cuda"), DIGITS)
    with pytest.raises(RunError, match="device='hpu': torch cannot use it here"):
        build(RunConfig(device="hpu"), DIGITS)
    with pytest.raises(RunError, match=r"width=64\.5: the widths of mlp are whole numbers"):
        build(RunConfig(width=64.5), DIGITS)
    with pytest.raises(RunError, match="width=1e\\+13: there is no memory for so wide a 'mlp'"):
        build(RunConfig(width=10**13), DIGITS)
    with pytest.raises(RunError, match="exclude='head' is no layer of this network; its layers: fc1, fc2, fc3"):
        build(RunConfig(method_options={"exclude": ["fc1", "head"]}), DIGITS)


NETS = """
import torch
from torch import nn

class Positions(nn.Module):
    def __init__(self, depth=1, width=8):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.position = nn.Parameter(torch.randn(2, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(torch.relu(self.first(x.flatten(1)) + self.position.sum(0)))

def make(size, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, size), nn.ReLU(), nn.Linear(size, classes))

class ByName(Positions):
    def forward(self, x):
        return {"logits": super().forward(x)}

def no_width():
    return make(8)
"""


def test_a_users_own_network(tmp_path, monkeypatch):
    (tmp_path / "own_nets_to_build.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig(model="own_nets_to_build:make", width=32, base_width=8, model_options={"classes": 10})
    built = build(config, DIGITS)
    assert isinstance(built.model, nn.Sequential)
    assert built.model[1].out_features == 32
    positions = RunConfig(model="own_nets_to_build:Positions", width=32, base_width=8)
    with pytest.raises(ValueError, match=r'parameter "position".*not a known module'):
        build(positions, DIGITS)
    assert build(positions.replace(roles={"position": "input"}), DIGITS).model.first.out_features == 32
    with pytest.raises(
        RunError, match="own_nets_to_build:no_width': takes no arguments; expected a function of the wi"
    ):
        build(config.replace(model="own_nets_to_build:no_width", model_options={}), DIGITS)
    by_name = positions.replace(model="own_nets_to_build:ByName", roles={"position": "input"})
    for method in ("sgd", "kfac"):
        with pytest.raises(RunError, match=r"the network returned a dict of logits; name its output, output='logits'"):
            train(by_name.replace(method=method), dataset=DIGITS)
    few = config.replace(model_options={"classes": 9})
    with pytest.raises(RunError, match=r"output has shape \[64, 9\]; digits wants \[samples, 10\]"):
        train(few, dataset=DIGITS)
    with pytest.raises(RunError, match=r"could not take samples \[64, 1, 4, 4\] of small: mat1 and mat2"):
        train(config.replace(data="small"), dataset=SMALL_IMAGES)
    with pytest.raises(ValueError, match="model 'nowhere:make': No module named 'nowhere'"):
        build(config.replace(model="nowhere:make"), DIGITS)
    with pytest.raises(ValueError, match="module 'own_nets_to_build' has no function or class 'take'"):
        build(config.replace(model="own_nets_to_build:take"), DIGITS)


def test_data_of_ones_own(tmp_path, monkeypatch):
    """A function's tensors are trained on like a data set that has a name."""
    (tmp_path / "own_data_to_build.py").write_text(
        "import torch\n"
        "def pair(n=20):\n"
        "    g = torch.Generator().manual_seed(0)\n"
        "    return torch.randn(n, 6, generator=g), torch.arange(n) % 3\n"
        "def both():\n"
        "    return pair(), pair(10)\n"
        "def images():\n"
        "    return torch.arange(20 * 16, dtype=torch.uint8).reshape(20, 1, 4, 4), torch.arange(20) % 2\n"
        "def wrong():\n"
        "    return torch.randn(4, 2), torch.zeros(4, dtype=torch.complex64)\n"
        "def nothing():\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig(data="own_data_to_build:pair", width=64, epochs=1, data_options={"n": 30}, samples=12)
    data = dataset_of(config)
    assert (len(data.train), len(data.test), data.classes, data.input_shape) == (12, 0, 3, (6,))
    assert torch.equal(data.prepare(data.train.inputs, torch.float64), data.train.inputs.double())
    run = train(config)
    assert run.status == "finished"
    assert "test_loss" not in run.final  # there is nothing to test on
    both = dataset_of(RunConfig(data="own_data_to_build:both"))
    assert (len(both.train), len(both.test)) == (20, 10)
    images = dataset_of(RunConfig(data="own_data_to_build:images"))
    assert float(images.prepare(images.train.inputs).mean()) == pytest.approx(0, abs=1e-5)
    with pytest.raises(ValueError, match=r"targets are class numbers or real numbers, got \[4\] torch.complex64"):
        dataset_of(RunConfig(data="own_data_to_build:wrong"))
    with pytest.raises(ValueError, match=r"expected tensors \(inputs, targets\)"):
        dataset_of(RunConfig(data="own_data_to_build:nothing"))
    with pytest.raises(RunError, match=r"data_options={'size': 3}: got an unexpected keyword argument 'size'"):
        dataset_of(RunConfig(data="own_data_to_build:pair", data_options={"size": 3}))


def test_a_data_set_that_is_given_is_checked():
    float_targets = Split(DIGITS.train.inputs, DIGITS.train.targets.float())
    with pytest.raises(ValueError, match=r"targets to train on are torch.float32, those to test on torch.int64"):
        dataset_of(RunConfig(), replace(DIGITS, train=float_targets))
    with pytest.raises(ValueError, match="digits: target 9; those of 9 classes go to 8"):
        dataset_of(RunConfig(), replace(DIGITS, classes=9))
    nothing = Split(DIGITS.train.inputs[:0], DIGITS.train.targets[:0])
    with pytest.raises(ValueError, match="digits: there are no samples to train on"):
        dataset_of(RunConfig(), replace(DIGITS, train=nothing))
    untested = train(RunConfig(width=64, epochs=1, lr=0.001), dataset=replace(DIGITS, test=nothing))
    assert "train_loss" in untested.final
    assert "test_loss" not in untested.final
