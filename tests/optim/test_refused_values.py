"""Values that cannot be: refused when the optimizer is built, in one line that names the argument."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import (
    EMA,
    FOOF,
    KFAC,
    RMS,
    AdamStep,
    Adaptive,
    GaussNewton,
    GradientMomentum,
    HeavyBall,
    KLClip,
    Rescaled,
    Shampoo,
    Spectral,
    Window,
)

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}
INF, NAN = float("inf"), float("nan")
EVERYWHERE = [
    ("weight_decay", NAN),
    ("weight_decay", INF),
    ("weight_decay", "0.1"),
    ("weight_decay", [1]),
    ("weight_decay", True),
    ("weight_decay", None),
    ("lr", NAN),
    ("lr", INF),
    ("lr", "0.1"),
    ("lr", True),
    ("fallback_lr", NAN),
    ("fallback_lr", "0.1"),
    ("fallback_lr", True),
    ("damping", NAN),
    ("damping", INF),
    ("damping", True),
    ("damping", [1.0]),
    ("momentum", "0.9"),
    ("momentum", True),
    ("momentum", NAN),
    ("nesterov", 1),
    ("nesterov", "yes"),
    ("decoupled", 0),
    ("maximize", "no"),
    ("exclude", 5),
    ("exclude", (5,)),
    ("trust", 0.5),
    ("fallback", 3),
]
INTERVALS = [
    (name, value)
    for name in ("factor_every", "inverse_every", "refresh_warmup", "start")
    for value in (1.5, "2", True, 2.0)
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def refused(make, name):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    message = str(caught.value)
    assert name in message
    assert "\n" not in message


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "value"), EVERYWHERE, ids=str)
def test_a_bad_value_is_refused_by_every_method(method, name, value):
    for trust in ("spectral", None) if name != "trust" else (None,):
        options = {"trust": trust, name: value}
        refused(lambda options=options: METHODS[method](network(), **options), name)


@pytest.mark.parametrize("method", ["kfac", "foof", "shampoo"])
@pytest.mark.parametrize(("name", "value"), INTERVALS, ids=str)
def test_intervals_are_whole(method, name, value):
    refused(lambda: METHODS[method](network(), **{name: value}), name)


VALUES = {
    "Spectral": (lambda: Spectral("a"), "size"),
    "RMS": (lambda: RMS(None), "size"),
    "KLClip": (lambda: KLClip(None), "kappa"),
    "EMA": (lambda: EMA("x"), "decay"),
    "EMA(True)": (lambda: EMA(True), "decay"),
    "Window": (lambda: Window(1.5), "batches"),
    "Window(True)": (lambda: Window(True), "batches"),
    "AdamStep": (lambda: AdamStep(0.9), "betas"),
    "AdamStep of text": (lambda: AdamStep(("a", 0.9)), "betas"),
    "AdamStep's eps": (lambda: AdamStep(eps="1"), "eps"),
    "HeavyBall": (lambda: HeavyBall("0.9"), "momentum"),
    "HeavyBall's nesterov": (lambda: HeavyBall(0.9, 1), "nesterov"),
    "GradientMomentum": (lambda: GradientMomentum(None), "momentum"),
    "Adaptive's every": (lambda: Adaptive(1.0, every=1.5), "every"),
    "Adaptive's decay": (lambda: Adaptive(1.0, decay="x"), "decay"),
    "Adaptive's rule": (lambda: Adaptive(True), "rule"),
    "Rescaled": (lambda: Rescaled("1"), "rho"),
    "Rescaled(inf)": (lambda: Rescaled(INF), "rho"),
}


@pytest.mark.parametrize(("make", "name"), VALUES.values(), ids=VALUES)
def test_a_value_is_checked_when_it_is_made(make, name):
    refused(make, name)


def test_a_bare_number_as_trust_is_told_what_to_write():
    with pytest.raises(TypeError, match=r'"spectral:0.5" or Spectral\(0.5\)'):
        KFAC(network(), trust=0.5)


def test_damping_may_be_text_as_on_the_command_line():
    assert KFAC(network(), damping="rescaled:0.5").param_groups[0]["damping"] == 0.5
    assert KFAC(network(), damping="heuristic").param_groups[0]["damping_rule"]["rule"] == "Heuristic"
    with pytest.raises(ValueError, match="unknown damping rule 'nothing'"):
        KFAC(network(), damping="nothing:1")


# Parameter groups.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "bad",
    [
        {"momentum": "0.9"},
        {"weight_decay": [1]},
        {"lr": None},
        {"lr": "1"},
        {"nesterov": 2},
        {"damping": "a"},
        {"lr": -1},
    ],
    ids=str,
)
def test_a_group_that_is_refused_is_not_added(method, bad):
    model = network()
    optimizer = METHODS[method](model, params=[model[0].weight])
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    refused(lambda: optimizer.add_param_group({"params": [model[2].weight], **bad}), next(iter(bad)))
    assert optimizer.state_dict()["param_groups"] == before
    assert len(optimizer.entries) == 1
    optimizer.add_param_group({"params": [model[2].weight]})
    F.cross_entropy(model(torch.randn(5, 4)), torch.randint(3, (5,))).backward()
    optimizer.step()
    assert optimizer.steps == 1


def momentum_of(method, trust, top, group):
    model = network()
    own = {"params": [model[2].weight], **group}
    optimizer = method(model, trust=trust, params=[{"params": [model[0].weight]}, own], **top)
    return {name: optimizer.param_groups[1][name] for name in ("momentum", "nesterov", "momentum_on")}


@pytest.mark.parametrize("trust", ["spectral", "kl", "graft:adam", "rms", None])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "given",
    [
        {"momentum": 0.5},
        {"momentum": 0.0},
        {"momentum": None},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": HeavyBall(0.5)},
        {"momentum": HeavyBall(0.5, nesterov=True)},
        {"momentum": GradientMomentum(0.5)},
    ],
    ids=str,
)
def test_momentum_means_the_same_in_a_group_and_at_the_top(method, trust, given):
    kind = METHODS[method]
    expected = momentum_of(kind, trust, given, {})
    assert momentum_of(kind, trust, {}, given) == expected
    assert (
        momentum_of(kind, trust, {"momentum": HeavyBall(0.8, nesterov=True)}, {"nesterov": False, **given}) == expected
    )


@pytest.mark.parametrize("method", METHODS)
def test_nesterov_alone_takes_the_momentum_of_the_top(method):
    kind, wanted = METHODS[method], {"momentum": 0.8, "nesterov": True, "momentum_on": "update"}
    assert momentum_of(kind, "spectral", {"momentum": 0.8}, {"nesterov": True}) == wanted
    assert momentum_of(kind, None, {"momentum": 0.8}, {"nesterov": True}) == wanted
    assert momentum_of(kind, None, {"momentum": 0.8, "nesterov": True}, {"momentum": 0.8}) == wanted
    kept = {"momentum": 0.8, "nesterov": False, "momentum_on": "gradient"}
    assert momentum_of(kind, None, {"momentum": GradientMomentum(0.8)}, {"nesterov": False}) == kept


def test_auto_is_a_public_name():
    assert KFAC(network(), memory=mukron.Auto(0.9)).options.memory == mukron.Auto(0.9)
