"""A saved state is loaded into an optimizer of the same kinds of options, or refused in one line."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, FOOF, KFAC, Adaptive, GaussNewton, Shampoo, Spectral

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, 4, generator=DATA), torch.randint(3, (10,), generator=DATA)


def trained(method, steps=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = method(model, **options)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer


KINDS = {"trust": ("spectral", "kl", "rms", "graft:sgd", "graft:adam", None), "fallback": ("sgd", "adamw")}
MEMORIES = ("batch", "sum", "ema", "auto", "window:3")


@pytest.mark.parametrize(
    ("method", "name", "kinds"),
    [
        *[(method, name, kinds) for method in (KFAC, FOOF, Shampoo, GaussNewton) for name, kinds in KINDS.items()],
        (KFAC, "memory", MEMORIES),
        (FOOF, "memory", MEMORIES),
        (Shampoo, "memory", MEMORIES[:3]),
    ],
)
def test_a_state_of_another_kind_is_refused(method, name, kinds):
    usual = {"memory": "ema"} if name != "memory" and method is not GaussNewton else {}
    usual = {**usual, **({"fallback": "sgd"} if name != "fallback" else {})}
    states = {kind: trained(method, **usual, **{name: kind}).state_dict() for kind in kinds}
    for kind in kinds:
        for saved, state in states.items():
            optimizer = trained(method, 0, **usual, **{name: kind})
            if saved == kind:
                optimizer.load_state_dict(state)
                continue
            with pytest.raises(ValueError, match=f"saved with {name}=.*this optimizer has {name}=") as caught:
                optimizer.load_state_dict(state)
            assert "\n" not in str(caught.value)
            assert optimizer.steps == 0


def test_numbers_of_options_may_differ():
    state = trained(KFAC, trust=Spectral(1.0), memory=EMA(0.9)).state_dict()
    optimizer = trained(KFAC, 0, trust=Spectral(0.5), memory=EMA(0.8))
    optimizer.load_state_dict(state)
    assert optimizer.steps == 2


def test_adaptive_damping_is_not_loaded_where_the_constructor_refuses_it():
    state = trained(KFAC, trust="spectral", damping=Adaptive(1.0)).state_dict()
    with pytest.raises(ValueError, match="this optimizer has trust=rms"):
        trained(KFAC, 0, trust="rms").load_state_dict(state)


def test_an_older_format_is_refused_in_one_line():
    state = trained(KFAC).state_dict()
    state["mukron"] = {"format": 3}
    with pytest.raises(ValueError, match=r"format 3, and this version of mukron reads 6") as caught:
        trained(KFAC, 0).load_state_dict(state)
    assert "\n" not in str(caught.value)


def test_what_was_told_is_not_told_again():
    options = {"damping": 1e-6, "trust": "spectral", "memory": "batch"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = trained(KFAC, **options)
    assert caught
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = trained(KFAC, 0, **options)
    other.load_state_dict(first.state_dict())
    assert other.told == first.told != set()
