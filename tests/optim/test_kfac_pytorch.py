"""With kfac-pytorch's settings ``KFAC`` takes its steps, as docs/migrating.md translates them.

Its factor of the outputs is made of derivatives of the mean loss, so it is 1 / batch^2 of ours.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron

BATCH, STEPS, LR, DAMPING, KL = 32, 6, 2.0**-10, 1e-3, 1e-6


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def batches():
    draws = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 6, generator=draws), torch.randint(4, (BATCH,), generator=draws)


def trained(model, step):
    """The weights after every step."""
    weights = []
    for x, y in batches():
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    return weights


def ours(kl_clip):
    model = network()
    return trained(
        model,
        mukron.KFAC(
            model,
            lr=LR * BATCH**2,
            damping=mukron.Fixed(a=DAMPING, b=DAMPING * BATCH**2),
            fisher="empirical",
            memory="batch",
            momentum=0.0,
            trust=None if kl_clip is None else mukron.KLClip(kl_clip * BATCH**2),
        ).step,
    )


def plain(kl_clip):
    """What kfac-pytorch documents: W <- W - lr nu (G + damping)^-1 dW (A + damping)^-1."""
    model, seen = network(), {}
    layers = [model[0], model[2]]
    for layer in layers:
        layer.register_forward_hook(lambda layer, x, y: seen.update({layer: [x[0].detach()]}))
        layer.register_full_backward_hook(lambda layer, _, g: seen[layer].append(g[0]))

    @torch.no_grad()
    def step():
        moves = []
        for layer in layers:
            h, g = seen[layer]
            A, G = h.T @ h / BATCH, g.T @ g / BATCH
            damped = [factor + DAMPING * torch.eye(len(factor)) for factor in (G, A)]
            moves.append(damped[0].inverse() @ layer.weight.grad @ damped[1].inverse())
        gain = sum(float((move * layer.weight.grad).sum()) * LR**2 for move, layer in zip(moves, layers, strict=True))
        nu = 1.0 if kl_clip is None else min(1.0, math.sqrt(kl_clip / gain))
        for move, layer in zip(moves, layers, strict=True):
            layer.weight -= LR * nu * move

    return trained(model, step)


def theirs(kl_clip):
    kfac = pytest.importorskip("kfac.preconditioner")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    options = {"damping": DAMPING, "factor_decay": 1e-12, "compute_method": "inverse", "inv_dtype": torch.float64}
    preconditioner = kfac.KFACPreconditioner(model, lr=LR, kl_clip=kl_clip or 1e30, **options)

    def step():
        preconditioner.step()
        optimizer.step()

    return trained(model, step)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kl_clip", [None, KL])
@pytest.mark.parametrize(("other", "tolerance"), [(plain, 1e-8), (theirs, 1e-3)])  # theirs inverts in float32
def test_steps_are_theirs(other, tolerance, kl_clip):
    for mine, their in zip(ours(kl_clip), other(kl_clip), strict=True):
        for here, there in zip(mine, their, strict=True):
            assert float((here - there).norm() / there.norm()) < tolerance


def test_the_clip_acts():
    assert (ours(None)[0][0] - ours(KL)[0][0]).norm() > 0.01 * ours(KL)[0][0].norm()
