"""What an optimizer finds out of the loss is saved, copied and loaded with it; what it is told wrongly is said."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 6, 5, generator=generator), torch.randint(4, (4, 6, 5), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x, y = images(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("way", ["load", "deepcopy", "pickle"])
@pytest.mark.parametrize("trust", ["spectral", None])
def test_foof_remembers_where_the_classes_are(way, trust):
    """The step after a copy measures nothing: what was found before it must not be lost."""
    model = convolutions()
    optimizer = mukron.FOOF(model, lr=0.1, trust=trust, factor_every=5, refresh_warmup=0)
    train(model, optimizer, range(12))
    if way == "load":
        other = convolutions()
        other.load_state_dict(model.state_dict())
        second = mukron.FOOF(other, lr=0.1, trust=trust, factor_every=5, refresh_warmup=0)
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        other, second = copy.deepcopy((model, optimizer)) if way == "deepcopy" else pickled(model, optimizer)
    assert second.capture.class_dim == optimizer.capture.class_dim == 1
    train(model, optimizer, range(12, 24))
    train(other, second, range(12, 24))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def pickled(*things):
    return pickle.loads(pickle.dumps(things))


def test_a_loss_that_is_none_of_the_three_is_not_judged_again():
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def steps(network: nn.Module, optimizer: torch.optim.Optimizer, sizes: list[int]) -> None:
        for number, size in enumerate(sizes):
            generator = torch.Generator().manual_seed(number)
            x, y = torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)
            optimizer.zero_grad()
            (10 * F.cross_entropy(network(x), y)).backward()
            optimizer.step()

    first, second = model(), model()
    optimizer, other = mukron.KFAC(first), mukron.KFAC(second)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps(first, optimizer, [64, 64, 64])
    assert len([warning for warning in said if "no mean over either" in str(warning.message)]) == 1
    second.load_state_dict(first.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(first, optimizer, [10, 10, 64])  # of ten samples, ten times a mean looks like a sum
    steps(second, other, [10, 10, 64])
    assert not optimizer.found_reduction
    assert not other.found_reduction
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fisher", ["signs", "mc"])
def test_a_wrong_dimension_of_classes_is_told(fisher):
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    tokens = torch.randint(20, (8, 12), generator=torch.Generator().manual_seed(0))
    for class_dim, wrong in ((1, True), (-1, False), (2, False)):
        network = copy.deepcopy(model)
        optimizer = mukron.KFAC(network, class_dim=class_dim, fisher=fisher)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(network(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
                optimizer.step()
        told = [str(warning.message) for warning in said if "class_dim=" in str(warning.message)]
        assert len(told) == wrong
        assert not wrong or "Pass class_dim=2" in told[0]


@pytest.mark.parametrize(
    ("returned", "place"),
    [("tuple", r"returned\[0\]"), ("dict", r'returned\["logits"\]'), ("object", "returned.logits")],
)
def test_where_an_output_is_said_to_be(returned, place):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            f = self.linear(x)
            if returned == "object":
                return type("Output", (), {"logits": f})()
            return (f, None) if returned == "tuple" else {"logits": f}

    model = Model()
    optimizer = mukron.KFAC(model)
    assert optimizer.layers
    with pytest.raises(TypeError, match=f"output=lambda returned: {place}"):
        model(torch.randn(2, 3))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m: mukron.KFAC(m, class_dim="a"), TypeError, "class_dim"),
        (lambda m: mukron.KFAC(m, class_dim=1.5), TypeError, "class_dim"),
        (lambda m: mukron.KFAC(m, fused="yes"), TypeError, "fused"),
        (lambda m: mukron.KFAC(m, output=3), TypeError, "output must be a function"),
        (lambda m: mukron.KFAC(m, grad_scaler=3), TypeError, "GradScaler"),
        (lambda m: mukron.Shampoo(m, max_size="a"), TypeError, "max_size"),
        (lambda m: mukron.Shampoo(m, max_size=0), ValueError, "max_size must be at least 1"),
        (lambda m: mukron.FOOF(m, damping="heuristic:1"), ValueError, "balances A against B"),
        (lambda m: mukron.Shampoo(m, damping=mukron.Heuristic(1.0)), ValueError, "balances A against B"),
    ],
)
def test_wrong_values_are_refused_when_the_optimizer_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make(nn.Linear(4, 3))


def test_embeddings_far_beyond_their_trust_are_named():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tokens, self.inner, self.out = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 5)

        def forward(self, tokens):
            return self.out(torch.relu(self.inner(1e-8 * self.tokens(tokens).mean(1))) + 1.0)

    for trust in ("kl:0.001", "spectral"):
        model = Model()
        optimizer = mukron.KFAC(model, exclude=(), trust=trust)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                tokens, y = (
                    torch.randint(30, (32, 4), generator=generator),
                    torch.randint(5, (32,), generator=generator),
                )
                optimizer.zero_grad()
                F.cross_entropy(model(tokens), y).backward()
                optimizer.step()
        assert any('"tokens"' in str(warning.message) for warning in said), trust


@pytest.mark.parametrize("memory", [None, "batch"])
def test_shampoo_makes_no_moves_of_a_bias_whose_gradient_is_rounding(memory):
    """Before a batch norm it has no other; full moves of it are a random walk that the running mean cannot follow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    optimizer = mukron.Shampoo(model, memory=memory)
    start = [model[0].bias.detach().clone(), model[4].bias.detach().clone()]
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(32, 1, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    moved = [
        (now - before).square().mean().sqrt() for now, before in zip((model[0].bias, model[4].bias), start, strict=True)
    ]
    assert moved[0] < 0.01
    assert moved[1] > 0.02  # a bias with a gradient of its own goes its way


CLASSES_FOUND = {
    "foof": lambda model: mukron.FOOF(model, lr=0.1),
    "kfac": lambda model: mukron.KFAC(model, fisher="empirical"),
    "gauss-newton": mukron.GaussNewton,
}


@pytest.mark.parametrize("method", CLASSES_FOUND)
def test_a_bad_first_batch_says_nothing_of_where_the_classes_are(method):
    (model, optimizer), (twin, twins) = (
        (model, CLASSES_FOUND[method](model)) for model in (convolutions(), convolutions())
    )
    x, y = images(99)
    (F.cross_entropy(model(x), y) * float("nan")).backward()
    optimizer.step()
    assert (optimizer.skipped, optimizer.capture.class_dim, optimizer.found_class_dim) == (1, None, None)
    train(model, optimizer, range(4))
    train(twin, twins, range(4))
    assert optimizer.found_class_dim == twins.found_class_dim == 1
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", CLASSES_FOUND)
def test_a_first_batch_without_targets_leaves_it_open(method):
    model = convolutions()
    optimizer = CLASSES_FOUND[method](model)
    x, y = images(99)
    F.cross_entropy(model(x), torch.full_like(y, -100), reduction="sum").backward()
    optimizer.step()
    train(model, optimizer, range(3))
    assert optimizer.found_class_dim == optimizer.capture.class_dim == 1


def test_what_the_user_says_counts_more_than_what_was_saved():
    tokens = torch.randint(20, (8, 12), generator=torch.Generator().manual_seed(0))

    def step(model, optimizer):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        optimizer.step()

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))

    wrong, right = (mukron.KFAC(make(), class_dim=dim) for dim in (1, 2))
    with pytest.warns(UserWarning, match="Pass class_dim=2"):
        step(wrong.model, wrong)
    right.load_state_dict(wrong.state_dict())
    step(right.model, right)
    assert right.capture.class_dim == right.found_class_dim == 2
