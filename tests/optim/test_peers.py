"""Against other libraries on the same tensors."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import KFAC, Constant, Shampoo

with warnings.catch_warnings():  # of their own imports
    warnings.simplefilter("ignore")
    from curvlinops import KFACLinearOperator
    from pytorch_optimizer import Shampoo as OtherShampoo

SAMPLES, CLASSES = 5, 4


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Tokens(nn.Module):
    """Linear layers over positions, averaged at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).mean(1)


def conv():
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, CLASSES))


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES)), (SAMPLES, 3)),
    "conv": (conv, (SAMPLES, 2, 5, 5)),
    "tokens": (Tokens, (SAMPLES, 7, 3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["categorical", "gaussian"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("fisher", "theirs"), [("exact", "type-2"), ("empirical", "empirical")])
@pytest.mark.parametrize("network", NETWORKS)
def test_kfac_factors_are_curvlinops(network, fisher, theirs, sharing, loss):
    """Each layer's A (x) B, which does not depend on how a constant is shared out between A and B."""
    make, shape = NETWORKS[network]
    model, x = make(), torch.randn(shape)
    if loss == "categorical":
        y, loss_func = torch.randint(CLASSES, (SAMPLES,)), nn.CrossEntropyLoss()
    else:  # theirs is of the squared distance, ours of half of it
        y, loss_func = torch.randn(SAMPLES, CLASSES), nn.MSELoss(reduction="sum")
    other = KFACLinearOperator(
        *(model, loss_func, list(model.parameters()), [(x, y)]),
        **{"fisher_type": theirs, "kfac_approx": sharing, "check_deterministic": False},
    )
    other.compute_kronecker_factors()
    optimizer = KFAC(
        model, fisher=fisher, likelihood=loss, sharing=sharing, form="matrix", reduction="mean", trust=None
    )
    f = model(x)
    (F.cross_entropy(f, y) if loss == "categorical" else (f - y).square().sum(1).mean() / 2).backward()
    scale = float(SAMPLES) if fisher == "empirical" else 1.0  # its signals are of the loss's mean
    for name, A in other._input_covariances.items():
        gathered = optimizer.capture.gather()[name]
        ours = torch.kron(gathered.B.factor(scale**2).M[0], gathered.A.factor().M[0])
        expected = torch.kron(other._gradient_covariances[name], A)
        if loss == "gaussian":
            expected = expected / SAMPLES / (2 if fisher == "exact" else 4)
        assert torch.allclose(ours, expected, rtol=1e-8, atol=1e-12 * float(expected.abs().max())), name


def test_shampoo_is_pytorch_optimizers():
    """Ten steps with sums of moments and a constant epsilon."""
    model = nn.Sequential(nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Linear(6, CLASSES, bias=False))
    other = copy.deepcopy(model)
    x, y = torch.randn(SAMPLES, 3), torch.randint(CLASSES, (SAMPLES,))
    ours = Shampoo(model, lr=0.1, damping=Constant(1e-3), trust=None)
    theirs = OtherShampoo(other.parameters(), lr=0.1, matrix_eps=1e-3)
    for _ in range(10):
        for network, optimizer in ((model, ours), (other, theirs)):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    for mine, his in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, his, rtol=1e-7)
