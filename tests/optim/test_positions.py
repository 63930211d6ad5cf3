"""Positions of a sample (tokens, pixels), wherever the model puts them and however many there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import FOOF, KFAC, GaussNewton
from networks import INPUTS

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("lengths", [(2, 20), (20, 2)])
def test_positions_are_averaged_over_micro_batches(lengths):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(1, 2), nn.AdaptiveAvgPool1d(5))
    optimizer = FOOF(model, lr=1.0, trust=None)
    for length in lengths:
        F.cross_entropy(model(torch.randn(6, length, 4)), Y[:6]).backward()
    gradient = model[0].bias.grad.clone()
    before = model[0].bias.detach().clone()
    optimizer.step()
    assert torch.allclose(before - model[0].bias, gradient / 11, rtol=1e-5)  # (2 + 20) / 2 positions a sample


class Folded(nn.Module):
    """The same layer over positions, folded into the samples, or put first, or left in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.head, self.how = nn.Linear(4, 6), nn.Linear(6, 5), how

    def forward(self, x):
        samples, length, _ = x.shape
        if self.how == "folded":
            h = self.inner(x.reshape(samples * length, 4)).reshape(samples, length, 6)
        elif self.how == "first":
            h = self.inner(x.transpose(0, 1)).transpose(0, 1)
        else:
            h = self.inner(x)
        return self.head(torch.tanh(h).mean(1))


@pytest.mark.parametrize("how", ["folded", "first"])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(
    "method",
    [
        lambda m: KFAC(m, lr=0.1, fisher="exact", trust=None),
        lambda m: KFAC(m, lr=0.1, fisher="exact", sharing="reduce", trust=None),
        lambda m: GaussNewton(m, lr=0.1, trust=None),
    ],
)
def test_positions_wherever_the_model_puts_them(how, samples, method):
    torch.manual_seed(0)
    plain, other = Folded("plain").double(), Folded(how).double()
    other.load_state_dict(plain.state_dict())
    x, y = torch.randn(samples, 7, 4).double(), Y[:samples]
    for model in (plain, other):
        optimizer = method(model)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for ours, theirs in zip(values(other), values(plain), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
