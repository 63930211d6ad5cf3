"""Under muP a bounded step, too, moves every layer's features alike at every width.

Inverses are made every ten steps and batches change from step to step: inverses are stale. The tests measure after the
first step and after the second refresh.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import EMA, FOOF, KFAC, RMS, GaussNewton, GradientMomentum, Graft, KLClip, Shampoo, Spectral
from mukron.models import MLP
from networks import features

BASE, CLASSES, INPUTS, SAMPLES, BATCHES, STEPS, SEEDS = 64, 4, 16, 32, 4, (1, 12), range(2)
FLAT = 0.12  # the largest slope of log change against log width, as for the plain step
WIDTHS = (128, 384, 1024)
ROOTS = (64, 192, 512)  # eigendecompositions of width x width matrices are all of Shampoo's time
SIZE, KAPPA = 0.01, 1e-6  # so small that the bound is active in every layer, step and width
METHODS = {
    "kfac": (KFAC, 0.001, {"inverse_every": 10, "refresh_warmup": 0}),
    "foof": (FOOF, 0.02, {"inverse_every": 10, "refresh_warmup": 0}),
    "shampoo": (Shampoo, 0.005, {"inverse_every": 10, "refresh_warmup": 0, "damping": 1e-3}),
    "gauss-newton": (GaussNewton, 0.01, {}),
}
KINDS = {  # and the learning rate, where it is not the method's own
    "spectral, active": (Spectral(SIZE), 0.5),
    "spectral, active in part": (Spectral(1.0), 0.02),
    "spectral, inactive": (Spectral(1e6), None),
    "spectral, stale moves held": (Spectral(1e6, growth=1.0), None),
    "kl": (KLClip(KAPPA), None),
    "graft sgd": (Graft("sgd"), 0.1),
    "graft adam": (Graft("adam"), 0.002),
    "rms": (RMS(0.2), 0.01),
}


def make(width: int) -> nn.Sequential:
    return MLP(width, inputs=INPUTS, classes=CLASSES)


def build(method, width, seed, **options):
    """A network under muP, its optimizer, and batches, the same at every width."""
    data = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(SAMPLES, INPUTS, generator=data), torch.randint(CLASSES, (SAMPLES,), generator=data))
        for _ in range(BATCHES)
    ]
    torch.manual_seed(seed)
    model = make(width)
    plan = mukron.parametrize(model, mukron.base_shapes(make, width=BASE))
    return model, method(model, plan, **options), batches


def train(model, optimizer, batches, steps):
    for step in range(1, steps + 1):
        x, y = batches[(step - 1) % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield step


def changes(method, width, seed, **options) -> dict[int, list[float]]:
    """The root mean square of each layer's change after each of STEPS, on one fixed batch."""
    model, optimizer, batches = build(method, width, seed, **options)
    x = batches[0][0]
    before, found = features(model, x), {}
    for step in train(model, optimizer, batches, max(STEPS)):
        if step in STEPS:
            pairs = zip(features(model, x), before, strict=True)
            found[step] = [float((h - h0).square().mean().sqrt()) for h, h0 in pairs]
    assert optimizer.skipped == 0
    return found


def slopes(method, widths, **options) -> dict[int, list[float]]:
    measured = [[changes(method, width, seed, **options) for seed in SEEDS] for width in widths]
    return {
        step: np.polyfit(
            np.log(widths), np.log([np.mean([run[step] for run in runs], axis=0) for runs in measured]), 1
        )[0].tolist()
        for step in STEPS
    }


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_every_layer_learns_alike_at_every_width(name, kind, momentum):
    if name == "gauss-newton" and not momentum:
        pytest.skip("it refreshes every step, and the plain step of test_features is without momentum")
    (method, own_lr, options), (trust, lr) = METHODS[name], KINDS[kind]
    widths = ROOTS if name == "shampoo" else WIDTHS
    options = {"lr": own_lr if lr is None else lr, "trust": trust, "momentum": momentum, **options}
    for step, found in slopes(method, widths, **options).items():
        assert all(abs(slope) < FLAT for slope in found), (step, found)


@pytest.mark.parametrize("name", ["kfac", "foof", "shampoo"])
def test_stale_moves_are_held_indeed(name):
    method, lr, options = METHODS[name]
    held, free = (
        changes(method, ROOTS[0], 0, lr=lr, trust=Spectral(1e6, growth), momentum=0.0, **options)[max(STEPS)]
        for growth in (1.0, float("inf"))
    )
    assert all(less < 0.95 * more for less, more in zip(held, free, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kfac", "foof", "shampoo"])
def test_averages_of_gradients_and_factors_keep_the_law(name):
    method, _, options = METHODS[name]
    options = {"momentum": GradientMomentum(0.9), "memory": EMA(0.95), **options, "refresh_warmup": 3}
    for step, found in slopes(method, ROOTS, lr=0.02, trust=Spectral(), **options).items():
        assert all(abs(slope) < FLAT for slope in found), (step, found)


@pytest.mark.parametrize("width", [ROOTS[0], ROOTS[-1]])
@pytest.mark.parametrize("name", METHODS)
def test_the_spectral_bound_is_active_in_every_layer_and_step(name, width):
    method, _, options = METHODS[name]
    model, optimizer, batches = build(method, width, 0, lr=0.5, trust=Spectral(SIZE), momentum=0.0, **options)
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    before = [weight.detach().clone() for weight in weights]
    for step in train(model, optimizer, batches, max(STEPS)):
        moves = [weight.detach() - old for weight, old in zip(weights, before, strict=True)]
        before = [weight.detach().clone() for weight in weights]
        if step in STEPS:
            for move in moves:
                size = float(torch.linalg.matrix_norm(move, 2)) / (move.shape[0] / move.shape[1]) ** 0.5
                assert 0.5 * SIZE * 0.999 < size < 0.5 * SIZE * 1.25


@pytest.mark.parametrize("width", [ROOTS[0], ROOTS[-1]])
@pytest.mark.parametrize("name", METHODS)
def test_the_kl_bound_is_active_in_every_step(name, width):
    """The sum of eta <step, gradient> is then (kappa S)^1/2, above kappa, with S the same sum of the plain step."""
    method, lr, options = METHODS[name]
    model, optimizer, batches = build(method, width, 0, lr=lr, trust=KLClip(KAPPA), momentum=0.0, **options)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in train(model, optimizer, batches, max(STEPS)):
        predicted = 0.0
        for old, parameter in zip(before, model.parameters(), strict=True):
            predicted += lr * float(((old - parameter.detach()) * parameter.grad).sum())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        assert predicted > KAPPA


# Where the law of a normalized step is not one: more samples than features.


def own_changes(width: int, trust) -> tuple[list[float], float]:
    """By layer, the change of its output by its own update; and the stable rank of the hidden layer's update."""

    def wide(width):
        return MLP(width, inputs=256, classes=10)

    data = torch.Generator().manual_seed(1)
    x, y = torch.randn(2048, 256, generator=data), torch.randint(10, (2048,), generator=data)
    torch.manual_seed(0)
    model = wide(width)
    plan = mukron.parametrize(model, mukron.base_shapes(wide, width=BASE))
    optimizer = KFAC(model, plan, lr=0.01, trust=trust, momentum=0.0, memory="batch")
    inputs, h = [], x
    with torch.no_grad():
        for layer in model:
            inputs.append(h)
            h = layer(h)
    before = [layer.weight.detach().clone() if isinstance(layer, nn.Linear) else None for layer in model]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    found, moves = [], []
    for layer, old, h in zip(model, before, inputs, strict=True):
        if old is not None:
            moves.append(layer.weight.detach() - old)
            found.append(float((h @ moves[-1].mT).square().mean().sqrt()))
    return found, float((moves[1].norm() / torch.linalg.matrix_norm(moves[1], 2)) ** 2)


@pytest.mark.slow
def test_a_given_length_is_too_short_where_the_rank_of_updates_grows():
    """2048 samples, 64 to 512 features: the hidden layer's update gains rank, and its own change falls with RMS."""
    measured = {
        trust: [own_changes(width, trust) for width in ROOTS] for trust in (Spectral(SIZE), RMS(0.2), Graft("adam"))
    }
    slope = {
        trust: np.polyfit(np.log(ROOTS), np.log([changed[1] for changed, _ in runs]), 1)[0]
        for trust, runs in measured.items()
    }
    ranks = [rank for _, rank in measured[RMS(0.2)]]
    assert ranks[-1] > 3 * ranks[0]
    assert abs(slope[Spectral(SIZE)]) < FLAT, slope
    assert slope[RMS(0.2)] < -0.2, slope
    assert slope[Graft("adam")] < -0.2, slope
