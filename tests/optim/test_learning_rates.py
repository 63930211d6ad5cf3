"""Every parameter has the learning rate of its method, its group and its parametrization."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, GaussNewton, Shampoo
from networks import INPUTS, Net

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}


DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


@pytest.fixture(params=METHODS)
def method(request):
    torch.manual_seed(0)
    return METHODS[request.param]


def wide(base=8, width=32, scheme="mup"):
    torch.manual_seed(0)
    model = Net(width)
    return model, mukron.parametrize(model, mukron.base_shapes(Net, width=base), scheme)


def test_learning_rates_follow_the_method(method):
    """The optimizer applies its own exponents: FOOF's hidden step is r_out times SP's with the same curvature."""
    model, plan = wide()
    optimizer = method(model, plan, lr=0.1, trust=None)
    scales = plan.scales(optimizer.method)
    for name, _ in model.named_parameters():
        expected = plan.scales("sgd")[name].lr if name.startswith("norm") else scales[name].lr
        assert optimizer.rate(name) == pytest.approx(0.1 * expected)
    grafted = method(model, plan, lr=0.1, trust="graft:sgd")
    assert grafted.rate("head.weight") == pytest.approx(0.1 * plan.scales("sgd")["head.weight"].lr)
    other = method(model, plan, lr=0.1, fallback="adamw", fallback_lr=0.01, trust=None)
    assert other.rate("norm.weight") == pytest.approx(0.01 * plan.scales("adamw")["norm.weight"].lr)


def test_decay_of_the_fallback_goes_with_its_own_learning_rate():
    model = Net(8)
    optimizer = KFAC(model, lr=0.1, fallback_lr=1e-4, weight_decay=0.1, trust=None)
    optimizer.zero_grad()
    (model(X) * 0).sum().backward()
    optimizer.step()
    assert torch.allclose(model.norm.weight, torch.full((8,), 1 - 1e-5))


class Words(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, width), nn.Linear(width, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)).mean(1))


@pytest.mark.parametrize("trust", ["spectral", "kl:0.001", "graft:adam", "rms:0.2", None])
@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo])
def test_a_chosen_learning_rate_of_embeddings_counts_within_every_bound(method, trust):
    """A bound that acts would undo a factor that it is told of, as it undoes those of the laws."""
    tokens, labels = torch.randint(7, (8, 5)), torch.randint(3, (8,))

    def moved(exponent):
        torch.manual_seed(0)
        model = Words(32)
        plan = mukron.parametrize(model, mukron.base_shapes(Words, width=8), embedding_lr=exponent)
        optimizer = method(model, plan, lr=1e-3, trust=trust, exclude=(), momentum=0.0, weight_decay=0.1)
        before = model.embedding.weight.detach().clone()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        decayed = before * (1 - 1e-3 * 0.1)  # by the learning rate before that factor
        return (model.embedding.weight.detach() - decayed).norm().item()

    assert moved("-1/2") / moved(0) == pytest.approx(4**-0.5, rel=1e-3)
