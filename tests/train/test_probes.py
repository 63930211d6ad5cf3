"""What probes read, against the same numbers worked out by hand; and that they leave no trace."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.linalg import MatrixFactor, RowsFactor
from mukron.models import MLP, ResNet18
from mukron.train.probes import PROBES, Distance, Features, Rates, Spectra
from mukron.train.quantities import first_tensor, largest_eigenvalue


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.fixture
def trained():
    """A small MLP with biases, its probes, and a step of SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x = torch.randn(11, 5)
    before = copy.deepcopy(model)
    probes = {name: probe(model, None, x) for name, probe in PROBES.items()}
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return before, model, x, probes


def test_features_and_their_parts(trained):
    before, model, x, probes = trained
    read = probes["features"].read()
    with torch.no_grad():
        h, h0 = torch.tanh(model[0](x)), torch.tanh(before[0](x))
        assert read["features/0"] == pytest.approx(rms(model[0](x) - before[0](x)))
        assert read["features/2"] == read["output"] == pytest.approx(rms(model(x) - before(x)))
        # dW h is of the features as they are now, not as they were
        assert read["update/2.weight"] == pytest.approx(rms(h @ (model[2].weight - before[2].weight).T))
        assert read["update/2.weight"] != pytest.approx(rms(h0 @ (model[2].weight - before[2].weight).T))
        assert read["update/2.bias"] == pytest.approx(rms(model[2].bias - before[2].bias))
        assert read["update/0.weight"] == pytest.approx(rms(x @ (model[0].weight - before[0].weight).T))


def test_distance(trained):
    before, model, _, probes = trained
    read = probes["distance"].read()
    assert set(read) == {"distance/0.weight", "distance/0.bias", "distance/2.weight", "distance/2.bias"}
    change = (model[2].weight - before[2].weight).norm() / before[2].weight.norm()
    assert read["distance/2.weight"] == pytest.approx(change.item(), rel=1e-5)


def test_a_parameter_that_began_at_zero_has_no_relative_distance():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    probe = Distance(model, None, None)
    model.bias.data.add_(1.0)
    assert probe.read() == {"distance/weight": 0.0}


def test_spectra_are_those_of_the_factors():
    torch.manual_seed(0)
    model, x, y = MLP(6, inputs=5, classes=3), torch.randn(40, 5), torch.randint(3, (40,))
    optimizer = mukron.KFAC(model, lr=0.01, damping=mukron.Fixed(a=0.5, b=0.25), trust=None)
    probe = Spectra(model, optimizer, x)
    assert probe.read() == {}
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    read = probe.read()
    values = torch.linalg.eigvalsh((x.T @ x / len(x)).double())
    assert read["largest/fc1.A"] == pytest.approx(float(values[-1]), rel=1e-5)
    assert read["mean/fc1.A"] == pytest.approx(float(values.mean()), rel=1e-5)
    assert read["damping/fc1.A"] == 0.5
    assert read["damping/fc3.B"] == 0.25


def test_a_first_order_method_has_no_spectra():
    model = MLP(4, inputs=3)
    assert Spectra(model, torch.optim.SGD(model.parameters(), lr=0.1), None).read() == {}


def test_the_largest_eigenvalue_of_a_large_matrix():
    X = torch.randn(2, 700, 600, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor = MatrixFactor(X.mT @ X)
    truth = torch.linalg.eigvalsh(factor.M)[:, -1].mean()
    assert largest_eigenvalue(factor) == pytest.approx(float(truth), rel=1e-4)
    assert "eigh" not in factor.__dict__


@pytest.mark.parametrize("training", [True, False])
def test_reading_leaves_no_trace(training):
    """Weights, running averages, hooks, mode, random numbers and K-FAC's listening are as before."""
    torch.manual_seed(0)
    model, x = ResNet18(1, classes=3).train(training), torch.randn(4, 3, 8, 8)
    optimizer = mukron.KFAC(model, lr=0.01, trust=None)
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    probes = [probe(model, optimizer, x) for probe in PROBES.values()]
    for probe in probes:
        probe.read()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert model.training == training
    assert not optimizer.capture.gather()


def test_dropout_is_the_same_each_time():
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    probe = Features(model, None, torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
    assert set(probe.read().values()) == {0.0}


def test_a_layer_that_runs_twice_and_one_that_does_not():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"output": self.layer(self.layer(x).relu())}

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(3, 4)
    probe = Features(model, None, {"x": x})
    before = [(u := model.layer(x)), model.layer(u.relu())]
    model.layer.weight.data.mul_(1.1)
    after = [(u := model.layer(x)), model.layer(u.relu())]
    read = probe.read()
    own, idle = {"update/layer.weight", "update/layer.bias"}, {"update/idle.weight", "update/idle.bias"}
    assert set(read) == {"features/layer", "output", *own, *idle}
    assert read["update/idle.weight"] == 0
    change = torch.stack([a - b for a, b in zip(after, before, strict=True)]).detach()
    assert read["features/layer"] == pytest.approx(rms(change))


class Attention(nn.Module):
    """A bare parameter, an attention whose output projection never runs as a module, dropout inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x + self.position)


def test_every_parameter_is_seen_somewhere():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(3, 5, 8)
    probe = Features(model, None, x)
    assert max(probe.read().values()) < 1e-6  # nothing moved: dropout draws the same, in every layer
    assert {key.partition("/")[2] for key in probe.read() if key.startswith("update/")} == {
        name for name, _ in model.named_parameters()
    }
    assert probe.indirect == {"position", "block.self_attn.out_proj.weight", "block.self_attn.out_proj.bias"}
    model.block.self_attn.out_proj.weight.data.mul_(1.5)
    read = probe.read()
    assert read["update/block.self_attn.out_proj.weight"] == pytest.approx(read["features/block.self_attn"])
    assert read["features/block.self_attn"] > 0.01
    assert read["update/block.linear1.weight"] == read["update/position"] == pytest.approx(0, abs=1e-6)
    model.position.data.add_(1.0)
    assert probe.read()["update/position"] > 0


def test_an_embedding_that_renormalizes_itself_is_left_alone():
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.1), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    Features(model, None, torch.arange(10)).read()
    assert torch.equal(model[0].weight, before)


def test_a_layer_whose_samples_change_is_left_out():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.expert = nn.Linear(4, 1), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.expert(x[self.gate(x).squeeze(1) > 0]).sum() + x.sum(1, keepdim=True)

    torch.manual_seed(0)
    model = Experts()
    probe = Features(model, None, torch.randn(16, 4))
    model.gate.bias.data.add_(10.0)
    read = probe.read()
    assert "features/gate" in read
    assert "features/expert" not in read


def test_what_a_network_may_return():
    @dataclass
    class Answer:
        logits: torch.Tensor

    class Net(nn.Linear):
        wraps = staticmethod(Answer)

        def forward(self, x: torch.Tensor):
            return self.wraps(super().forward(x))

    x = torch.ones(2, 3)
    assert Features(Net(3, 2), None, x).read()["output"] == 0
    Net.wraps = staticmethod(str)
    with pytest.raises(ValueError, match="Net returns no tensor of real numbers"):
        Features(Net(3, 2), None, x)


@pytest.mark.parametrize("size", [1e-24, 1.0, 1e30])
def test_the_largest_eigenvalue_at_any_size(size):
    X = torch.randn(1, 700, 600, generator=torch.Generator().manual_seed(0))
    M = X.mT @ X / 700
    truth = torch.linalg.eigvalsh(M)[0, -1].item()
    assert largest_eigenvalue(MatrixFactor(size * M)) == pytest.approx(size * truth, rel=1e-3)


def test_no_eigenvalue_is_no_crash():
    assert math.isnan(largest_eigenvalue(MatrixFactor(torch.full((1, 600, 600), math.nan))))
    assert math.isnan(largest_eigenvalue(RowsFactor(torch.full((1, 4, 600), math.nan), 4)))


def test_first_tensor():
    x = torch.ones(2)
    assert first_tensor((None, {"ids": torch.ones(2, dtype=torch.long), "logits": x})) is x
    assert first_tensor("none") is None


def test_rates_of_plain_sgd_are_its_learning_rates():
    torch.manual_seed(0)
    model = MLP(16, inputs=5, classes=3)
    plan = mukron.parametrize(model, mukron.base_shapes(lambda width: MLP(width, inputs=5, classes=3), 8))
    optimizer = torch.optim.SGD(plan.param_groups("sgd", lr=0.1))
    rates = Rates(model, optimizer, None)
    assert rates.read() == {}
    model.fc3.weight.requires_grad_(False)
    F.mse_loss(model(torch.randn(4, 5)), torch.zeros(4, 3)).backward()
    optimizer.step()
    assert rates.read() == pytest.approx({"rate/fc1.weight": 0.2, "rate/fc2.weight": 0.1}, rel=1e-4)


def test_rates_show_the_preconditioner():
    """(B + rho)^-1 G (A + rho)^-1 over G, for factors that are all but their damping: 1 / rho^2."""
    torch.manual_seed(0)
    model = MLP(16, inputs=5, classes=3)
    optimizer = mukron.KFAC(model, lr=1e3, damping=mukron.Constant(1e3), momentum=0.0, trust=None)
    rates = Rates(model, optimizer, None)
    F.cross_entropy(model(torch.randn(4, 5)), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()
    assert rates.read()["rate/fc2.weight"] == pytest.approx(1e-3, rel=0.02)
