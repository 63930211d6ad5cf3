"""The point of the product: under muP every method moves every layer's features alike at every width."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, GaussNewton, Heuristic, Shampoo
from mukron.models import MLP
from networks import features

WIDTHS, SEEDS, STEPS, BASE, CLASSES = (256, 512, 1024, 2048), range(2), (1, 10), 64, 4
METHODS = {
    "kfac": (KFAC, {"lr": 0.01}),
    "foof": (FOOF, {"lr": 0.02}),
    # the inverse roots are made once: eigendecompositions of width x width matrices are all of the time
    "shampoo": (Shampoo, {"lr": 0.005, "damping": 1e-3, "inverse_every": 10}),
    "gauss-newton": (GaussNewton, {"lr": 0.01}),
}


def make(width: int) -> nn.Sequential:
    return MLP(width, inputs=16, classes=CLASSES)


def changes(method, options, width, seed) -> dict[int, list[float]]:
    """The size of each layer's change after each of STEPS."""
    data = torch.Generator().manual_seed(1)
    x = torch.randn(32, 16, generator=data)
    y = torch.randint(CLASSES, (32,), generator=data)
    torch.manual_seed(seed)
    model = make(width)
    plan = mukron.parametrize(model, mukron.base_shapes(make, width=BASE))
    optimizer = method(model, plan, **{"trust": None, **options})
    before, found = features(model, x), {}
    for step in range(1, max(STEPS) + 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step in STEPS:
            pairs = zip(features(model, x), before, strict=True)
            found[step] = [float((h - h0).square().mean().sqrt()) for h, h0 in pairs]
    return found


def slopes(method, options, widths=WIDTHS) -> dict[int, list[float]]:
    measured = [[changes(method, options, width, seed) for seed in SEEDS] for width in widths]
    return {
        step: np.polyfit(
            np.log(widths), np.log([np.mean([run[step] for run in runs], axis=0) for runs in measured]), 1
        )[0].tolist()
        for step in STEPS
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_features_at_every_width(name):
    widths = [width // 2 for width in WIDTHS] if name == "shampoo" else WIDTHS
    for step, found in slopes(*METHODS[name], widths).items():
        assert all(abs(slope) < 0.12 for slope in found), (step, found)


@pytest.mark.filterwarnings("ignore:damping heuristic.* does not follow the width")
def test_the_heuristic_damping_of_kfac_starves_the_input_layer():
    for step, found in slopes(KFAC, {"lr": 0.01, "damping": Heuristic(1e-3)}).items():
        assert found[0] < -0.5, (step, found)
