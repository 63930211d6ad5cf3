"""The damping that a step uses: what the width does to it, what a bare number means, none at all, fitted data."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, Constant, Fixed, GaussNewton, Heuristic, MaxEigenvalue, MeanEigenvalue, Rescaled, Shampoo
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def backward(model, x=X, scale=1.0):
    (F.cross_entropy(model(x).float(), Y) * scale).backward()


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def wide(base=8, width=32, scheme="mup"):
    torch.manual_seed(0)
    model = Net(width)
    return model, mukron.parametrize(model, mukron.base_shapes(Net, width=base), scheme)


def damping_of(optimizer, model, layer, factor, x=X):
    """What was added to a factor, read back from the prepared inverse."""
    backward(model, x)
    M = getattr(optimizer.capture.gather()[layer], factor).factor().M[0]
    optimizer.step()
    operator = optimizer.state[optimizer.layers[layer].anchor]["operators"]["weight"][factor]
    P = operator.right(torch.eye(len(M)).to(M)[None])[0]
    return float((torch.linalg.inv(P) - M).diagonal().mean()), M


@pytest.mark.parametrize(
    ("factor", "layer", "growth"), [("A", "hidden", 4), ("A", "first", 1), ("B", "hidden", 4), ("B", "head", 1)]
)
def test_rescaled_damping_divides_by_the_base_size(factor, layer, growth):
    """At four times the width: rho tr(M) / (d / 4) on an infinite side, rho tr(M) / d on a finite one."""
    model, plan = wide()
    model = model.double()
    optimizer = KFAC(model, plan, lr=0.0, damping=Rescaled(0.3), fisher="exact", form="matrix", trust=None)
    rho, M = damping_of(optimizer, model, layer, factor, X.double())
    assert rho == pytest.approx(0.3 * float(M.trace()) / len(M) * growth, rel=1e-6)


def test_fixed_damping_follows_the_theory():
    model, plan = wide()
    optimizer = KFAC(model, plan, lr=0.0, damping=Fixed(a=0.5, b=0.2), fisher="exact", form="matrix", trust=None)
    rho, _ = damping_of(optimizer, model, "hidden", "A")
    assert rho == pytest.approx(0.5 * 4, rel=1e-2)
    model, plan = wide()
    optimizer = KFAC(model, plan, lr=0.0, damping=Fixed(a=0.5, b=0.2), fisher="exact", form="matrix", trust=None)
    rho, _ = damping_of(optimizer, model, "hidden", "B")
    assert rho == pytest.approx(0.2 / 4, rel=1e-2)


def test_a_bare_number_means_the_rule_that_mup_allows():
    assert KFAC(Net(8), damping=2.0, trust=None).param_groups[0]["damping_rule"] == Rescaled(2.0).plain()
    assert FOOF(Net(8), damping=2.0, trust=None).param_groups[0]["damping_rule"] == Rescaled(2.0).plain()
    assert GaussNewton(Net(8), damping=2.0, trust=None).param_groups[0]["damping_rule"] == Rescaled(2.0).plain()
    assert Shampoo(Net(8), damping=2.0, trust=None).param_groups[0]["damping_rule"] == MaxEigenvalue(2.0).plain()


@pytest.mark.parametrize(
    ("method", "damping"),
    [(KFAC, Heuristic(1e-3)), *((method, Constant(1e-3)) for method in (KFAC, FOOF, Shampoo, GaussNewton))],
)
def test_a_rule_that_does_not_follow_the_width_is_told_once(method, damping):
    model, plan = wide()
    with pytest.warns(UserWarning, match="does not follow the width.*although .* has a plan") as caught:
        optimizer = method(model, plan, params=[{"params": [p]} for p in model.parameters()], damping=damping)
    assert len(caught) == 1
    assert f"{damping.text()}: " in str(optimizer.plan())
    assert "; it does not follow the width" in str(optimizer.plan())


def test_rules_that_follow_the_width_or_have_no_plan_to_follow_pass():
    for damping in (0.5, Rescaled(1.0), MeanEigenvalue(1.0), MaxEigenvalue(1e-3), Fixed(1.0, 0.1), Constant(0.0)):
        model, plan = wide()
        shown = str(KFAC(model, plan, damping=damping).plan())
        assert f"damping {(Rescaled(0.5) if damping == 0.5 else damping).text()}: " in shown
        assert "does not follow" not in shown
    assert "damping heuristic:0.001: its root" in str(KFAC(Net(8), damping=Heuristic(1e-3)).plan())
    model, plan = wide(scheme="sp")
    assert "does not follow" not in str(KFAC(model, plan, damping=Heuristic(1e-3)).plan())
    assert "damping" not in str(mukron.Muon(Net(8)).plan())


@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo, GaussNewton])
def test_no_damping_gives_no_nan(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 5))  # most tokens do not occur
    optimizer = method(model, lr=1e-6, damping=0.0, trust=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, optimizer, torch.randint(10, (10, 3)))
    assert all(value.isfinite().all() for value in values(model))
    assert {warning.category for warning in caught} <= {RuntimeWarning}
    told = [str(warning.message) for warning in caught]
    small = [text for text in told if re.fullmatch('layer ".*": its damping is so small .*; raise the damping.*', text)]
    assert all(re.search("by (about [0-9]?[0-9]%|more than its own size);", text) for text in small)
    helped = [text for text in told if "factorized with" in text]  # a rescue may have to help
    assert all("the usual size of a weight" in text for text in told if text not in small + helped)
    if method in (KFAC, GaussNewton):  # B and K are singular here, and no roots are taken of them
        assert small


@pytest.mark.parametrize("options", [{}, {"lr": 0.03, "momentum": 0.9}])
def test_kfac_stays_put_when_the_data_are_fitted(options):
    """A confident model's own draws make B fall faster than the gradient: the damping must not follow it to zero.

    About one run in ten walks off again, and rounding decides which: most stay.
    """
    fitted = []
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(256, 8)
        y = x[:, :3].argmax(1)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        optimizer = KFAC(model, **{"lr": 0.1, "trust": None, **options})
        for _ in range(150):
            step(model, optimizer, x, y)
        assert optimizer.skipped == 0
        fitted.append(float(F.cross_entropy(model(x), y).detach()) < 0.02)
    assert sum(fitted) >= 6


@pytest.mark.parametrize(("floor", "shrinks"), [(1.0, True), (0.0, False)])
def test_steps_of_shampoo_shrink_once_gradients_have(floor, shrinks):
    """Its steps do not depend on the size of the gradient; the floor of the damping lets training come to an end."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    options = {"memory": "batch", "momentum": 0, "trust": None, "damping": MaxEigenvalue(1e-6, floor)}
    optimizer = Shampoo(model, lr=1e-4, **options)
    sizes = []
    for scale in (1.0, 1e-6):
        before = values(model)
        optimizer.zero_grad()
        (F.cross_entropy(model(X[:, :8]), Y) * scale).backward()
        optimizer.step()
        sizes.append(float((model[0].weight.detach() - before[0]).norm()))
    assert (sizes[1] < 0.05 * sizes[0]) is shrinks


@pytest.mark.parametrize(
    ("options", "rho"),
    [
        ({}, 1e-6),
        ({"memory": "sum"}, 1e-4),
        ({"memory": "batch", "trust": "graft:adam"}, 1e-2),
        ({"memory": "batch", "damping": 1e-6}, 1e-6),
        ({"memory": "batch", "trust": None}, 1e-6),
        ({"trust": None}, 1e-6),
    ],
)
def test_roots_of_few_gradients_are_damped_more(options, rho):
    assert Shampoo(Net(8), **options).param_groups[0]["damping"] == rho
