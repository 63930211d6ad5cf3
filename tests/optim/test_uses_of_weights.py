"""A weight that is used beside its layer's own forward pass is told of; ordinary gradients are not suspected."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def backward(model, x=X, scale=1.0):
    (F.cross_entropy(model(x).float(), Y) * scale).backward()


@pytest.mark.parametrize("method", [KFAC, FOOF, GaussNewton])
def test_a_weight_that_is_used_behind_its_layers_back_is_told(method):
    """Tied in the forward pass alone, where no module shows it."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)

        def forward(self, tokens):
            return F.linear(torch.tanh(self.mix(self.embedding(tokens).mean(1))), self.embedding.weight)

    torch.manual_seed(0)
    model = Tied()
    optimizer = method(model, lr=0.01, trust=None)
    F.cross_entropy(model(torch.randint(7, (10, 3))), Y).backward()
    with pytest.warns(UserWarning, match=r'layer "embedding" is not that of its own forward pass.*exclude='):
        optimizer.step()


def test_ordinary_gradients_are_not_suspected():
    """Clipped, accumulated, unscaled, reduced, under autocast: still the layer's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"sharing": "reduce"}, {"fisher": "empirical"}):
            torch.manual_seed(0)
            model = nn.Sequential(
                *(nn.Conv1d(1, 4, 3, groups=1), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3, groups=2)),
                *(nn.Flatten(), nn.Linear(32, 5)),
            )
            optimizer = KFAC(model, lr=0.01, **{"trust": None, **options})
            for rows in (slice(0, 3), slice(3, 10)):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(X[rows, None]), Y[rows])
                (loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_a_gradient_is_recognized_at_any_size(size):
    """Its layer's own, whatever its size; the check must not see rounding to zero as another use of the weight."""
    model = Net(64)
    optimizer = KFAC(model, lr=0.05, fallback_lr=0.0, trust=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the loss gives the log-likelihood")  # of the factor, rightly
        warnings.filterwarnings("ignore", "the curvature of")  # the move is that much larger
        backward(model, scale=size)
        optimizer.step()
    assert optimizer.skipped == 0
