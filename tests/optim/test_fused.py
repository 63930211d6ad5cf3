"""fused=True: weights whose gradient is never formed move exactly as those whose gradient is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, FOOF, KFAC, Shampoo, Window

BATCH, WIDE = 6, 24


def mlp(bias: bool = False) -> nn.Sequential:
    layers = [nn.Linear(20, WIDE, bias), nn.ReLU(inplace=True), nn.Linear(WIDE, WIDE, bias), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDE, 4, bias)).double()


# Plain steps at this learning rate are long ones.
pytestmark = pytest.mark.filterwarnings("ignore:the curvature of:RuntimeWarning")


def cnn() -> nn.Sequential:
    last = [nn.Conv2d(8, 40, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 4, 4)]
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.ReLU(inplace=True), *last).double()


def data(shape, steps=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        yield x, torch.randint(4, (shape[0],), generator=generator)


def trained(model, method, fused, shape=(BATCH, 20), loss=None, passes=1, **options):
    """The model after five steps, and the layers whose weight had no gradient at the last of them."""
    model = copy.deepcopy(model)
    optimizer = method(model, lr=0.05, fused=fused, **{"trust": None, **options})
    for x, y in data(shape):
        optimizer.zero_grad()
        for part, wanted in zip(x.chunk(passes), y.chunk(passes), strict=True):
            value = F.cross_entropy(model(part), wanted) / passes
            (value if loss is None else value + loss(model)).backward()
        without = [name for name, p in model.named_parameters() if p.grad is None]
        optimizer.step()
    assert optimizer.skipped == 0
    assert all(p.requires_grad for p in model.parameters())
    return model, without


def alike(model, method=KFAC, **options):
    """Trains both ways, and returns the weights that had no gradient."""
    torch.manual_seed(0)
    plain, none = trained(model, method, False, **options)
    fused, without = trained(model, method, True, **options)
    assert none == []
    for (name, p), q in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    moved = max(
        float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert moved > 1e-3
    return without


@pytest.fixture
def model():
    torch.manual_seed(0)
    return mlp()


@pytest.mark.parametrize("method", [KFAC, FOOF])
def test_no_weight_of_an_mlp_gets_a_gradient(model, method):
    assert alike(model, method) == ["0.weight", "2.weight", "4.weight"]


@pytest.mark.parametrize(
    "options",
    [
        {"fisher": "empirical"},
        {"fisher": "exact"},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"maximize": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled": False},
        {"trust": "kl:0.001"},
        {"trust": "graft:sgd"},
        {"trust": "graft:adam"},
        {"trust": "spectral:0.5"},
        {"factor_every": 2, "inverse_every": 4},
        {"memory": EMA(0.5)},
        {"memory": Window(2)},
        {"passes": 2},
        {"passes": 3, "fisher": "empirical"},
    ],
    ids=str,
)
def test_every_option_is_followed(model, options):
    assert "2.weight" in alike(model, **options)


def test_biases_keep_their_gradients(model):
    torch.manual_seed(0)
    assert alike(mlp(bias=True)) == ["0.weight", "2.weight", "4.weight"]


@pytest.mark.filterwarnings("ignore:the gradient of layer")
def test_a_penalty_on_a_weight_joins_its_gradient(model):
    """It reaches the weight beside its layer: then there is a gradient, and what the layer adds to it."""
    assert alike(model, loss=lambda m: 0.1 * m[2].weight.square().sum()) == ["0.weight", "4.weight"]


def test_convolutions():
    """A layer of many positions has more rows than its gradient has numbers: that one is formed as ever."""
    torch.manual_seed(0)
    without = alike(cnn(), shape=(2, 2, 4, 4))
    assert "0.weight" not in without
    assert "2.weight" in without


def test_sequences():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.Flatten(), nn.Linear(3 * WIDE, 4))
    for sharing in ("expand", "reduce"):
        assert alike(model.double(), shape=(2, 3, 20), sharing=sharing)


def test_a_failing_layer_leaves_its_weight_as_it_was(model):
    optimizer = KFAC(model, fused=True, trust=None)
    for x, y in data((BATCH, 20), steps=2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 3, dtype=torch.float64))
    assert all(p.requires_grad for p in model.parameters())


def test_paused_and_evaluated_passes_are_left_alone(model):
    optimizer = KFAC(model, fused=True, trust=None)
    for x, y in data((BATCH, 20), steps=2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.paused():
        F.cross_entropy(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_pass_that_is_not_differentiated_leaves_no_trace(model):
    other = copy.deepcopy(model)
    one, two = (
        KFAC(model, lr=0.05, fused=True, fisher="empirical", trust=None),
        KFAC(other, lr=0.05, fused=True, fisher="empirical", trust=None),
    )
    for x, y in data((BATCH, 20)):
        for net, optimizer in ((model, one), (other, two)):
            optimizer.zero_grad()
            if net is other:
                net(2 * x)
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_no_grad_scaler():
    with pytest.raises(ValueError, match="leaves no gradients for a GradScaler"):
        KFAC(mlp(), fused=True, grad_scaler=torch.amp.GradScaler("cpu"), trust=None)


def test_a_saved_state_goes_on_alike(model):
    other = copy.deepcopy(model)
    one = KFAC(model, lr=0.05, momentum=0.9, fused=True, trust=None)
    batches = list(data((BATCH, 20), steps=6))

    def run(net, optimizer, part):
        for x, y in part:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    run(model, one, batches[:3])
    two = KFAC(other, lr=0.05, momentum=0.9, fused=True, trust=None)
    other.load_state_dict(model.state_dict())
    two.load_state_dict(one.state_dict())
    run(model, one, batches[3:])
    run(other, two, batches[3:])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("memory", [None, EMA(0.5)], ids=["sum", "ema"])
@pytest.mark.parametrize("solver", ["eigh", "newton", "tracked"])
def test_shampoo(model, solver, memory):
    """Its factors, its roots and its steps, from D and H alone; tracked ones within their tolerance."""
    options = {"damping": 1e-2, "solver": solver, **({} if memory is None else {"memory": memory})}
    plain, none = trained(model, Shampoo, False, **options)
    fused, without = trained(model, Shampoo, True, **options)
    assert none == []
    assert without == ["0.weight", "2.weight"]
    for (name, start), p, q in zip(model.named_parameters(), plain.parameters(), fused.parameters(), strict=True):
        moved, off = (p - start).detach(), (p - q).detach()
        assert float(moved.norm()) > 1e-3, name
        assert float(off.norm() / moved.norm()) < (0.02 if solver == "tracked" else 1e-6), name


def test_shampoo_with_every_option(model):
    for options in (
        {"momentum": 0.9},
        {"factor_every": 2, "inverse_every": 4},
        {"passes": 2},
        {"weight_decay": 0.1, "decoupled": False},
        {"trust": "graft:sgd"},
        {"trust": "kl:0.001"},
        {"maximize": True},
    ):
        plain, _ = trained(model, Shampoo, False, damping=1e-2, **options)
        fused, _ = trained(model, Shampoo, True, damping=1e-2, **options)
        for p, q in zip(plain.parameters(), fused.parameters(), strict=True):
            torch.testing.assert_close(
                q, p, rtol=1e-6, atol=1e-8, msg=lambda text, options=options: f"{options}: {text}"
            )


def test_shampoo_of_a_batch_without_signals(model):
    """Signals that are all zero make factors of zeros, and no step."""
    optimizer = Shampoo(model, lr=0.05, fused=True, trust=None)
    before = [p.detach().clone() for p in model.parameters()]
    for x, y in data((BATCH, 20), steps=3):
        optimizer.zero_grad()
        (0.0 * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
