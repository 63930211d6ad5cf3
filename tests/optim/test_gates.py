"""Layers whose curvature is negligible: behind gates at zero, with dead units, with signals that vanish.

Without a bound K-FAC and Gauss-Newton move them by any multiple of what a weight should move by. With
``trust=Spectral()`` nothing does.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton, Shampoo, Spectral

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}
WIDTH, STEPS = 24, 30
ESTIMATE = 1.25  # the estimate of a norm may be that much too small


class ZeroNorm(nn.Module):
    """A residual branch that ends in a norm whose gain is zero, as with ``zero_init_residual``."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        return x + self.norm(self.fc2(F.relu(self.fc1(x))))


class ZeroProjection(nn.Module):
    """Attention over four tokens whose output projection is zero: q and k have no gradient at first."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        tokens = x.unflatten(1, (4, -1)).repeat(1, 1, 4)
        attention = (self.q(tokens) @ self.k(tokens).mT / WIDTH**0.5).softmax(-1)
        return x + self.out(attention @ self.v(tokens)).mean(1)


class DeadUnits(nn.Module):
    """Half of the hidden units are zero for every input."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.fc1.bias[: WIDTH // 2] = -20.0

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(x)))


class Vanishing(nn.Module):
    """What the branch does is multiplied by 1e-12, and so are the signals that reach it."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + 1e-12 * self.fc2(F.relu(self.fc1(x)))


BLOCKS = {"zero norm": ZeroNorm, "zero projection": ZeroProjection, "dead units": DeadUnits, "vanishing": Vanishing}


def train(block, method, steps=STEPS, lr=0.03, **options):
    """Losses before and after on all samples; by weight, its longest move over lr (d_out / d_in)^1/2; the warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), BLOCKS[block](), BLOCKS[block](), nn.Linear(WIDTH, 4))
    data = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=data)
    y = (x[:, :4] + x[:, 4:]).argmax(1)
    with torch.no_grad():
        first = float(F.cross_entropy(model(x), y))
    if method != "gauss-newton":
        options["memory"] = "sum" if method == "shampoo" else "batch"
    optimizer = METHODS[method](model, lr=lr, momentum=0.0, **options)
    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    longest = dict.fromkeys(weights, 0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            chosen = torch.randint(len(x), (64,), generator=data)
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            before = {name: weight.detach().clone() for name, weight in weights.items()}
            optimizer.step()
            for name, weight in weights.items():
                move = (weight.detach() - before[name]).double()
                size = float(torch.linalg.svdvals(move)[0]) / (move.shape[0] / move.shape[1]) ** 0.5
                longest[name] = max(longest[name], size / lr)
    with torch.no_grad():
        last = float(F.cross_entropy(model(x), y))
    return first, last, longest, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("refresh", [{}, {"inverse_every": 10}, {"inverse_every": 10, "refresh_warmup": 5}], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", BLOCKS)
def test_no_layer_moves_by_more_than_its_trust(block, method, refresh):
    if method == "gauss-newton" and refresh:
        pytest.skip("it refreshes every step")
    first, last, longest, _ = train(block, method, trust=Spectral(), **refresh)
    assert max(longest.values()) < ESTIMATE, longest
    assert last < (0.9 if method in ("foof", "shampoo") else 0.7) * first


@pytest.mark.parametrize("method", ["kfac", "gauss-newton"])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_plain_step_blows_up(block, method):
    """Steps of FOOF and Shampoo do not: no B, and powers that add to one half."""
    _, _, longest, _ = train(block, method, trust=None)
    assert max(longest.values()) > 10
    inside = [name for name in longest if name.startswith(("2.", "3."))]
    assert max(longest, key=longest.__getitem__) in inside


@pytest.mark.parametrize("method", ["kfac", "gauss-newton"])
def test_a_layer_whose_curvature_is_negligible_is_named_once(method):
    _, _, _, said = train("vanishing", method, trust=Spectral())
    for name in ("2.fc1", "2.fc2", "3.fc1", "3.fc2"):
        assert sum(f'"{name}"' in text for text in said) == 1
    assert len(said) == 1  # all that one step finds are in one warning
    assert "shortened by more than 1e+04" in said[0]
    assert '"0"' not in said[0]
    assert '"4"' not in said[0]


@pytest.mark.parametrize("block", ["zero norm", "zero projection", "dead units"])
@pytest.mark.parametrize("method", METHODS)
def test_others_are_not_named(block, method):
    assert train(block, method, trust=Spectral())[3] == []


def test_a_stale_inverse_names_no_layer():
    """A move may be long between refreshes, whatever the signals are."""
    assert train("dead units", "kfac", trust=Spectral(1e-3), inverse_every=10)[3] == []


def test_before_the_start_no_layer_is_named():
    assert train("vanishing", "kfac", trust=Spectral(), start=STEPS)[3] == []
