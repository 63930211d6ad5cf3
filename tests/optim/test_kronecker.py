"""K-FAC's factors to any powers: against a plain reference, against the methods that it contains, and its law."""

from __future__ import annotations

import copy
from fractions import Fraction

import pytest
import reference as plain
import torch
from test_features import slopes
from test_reference import LR, loss_of, run, setup

import mukron
from mukron import FOOF, KFAC, Fixed, FOOFMirror, Kronecker
from mukron.theory import Role, solve
from networks import Net

POWERS = [("1/2", "1/2"), ("1", "1/2"), ("1/4", "3/4"), ("0", "1/2"), ("1/3", "0"), ("2", "1")]


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
@pytest.mark.parametrize(("e_A", "e_B"), POWERS)
def test_a_step_is_that_of_dense_matrices(network, e_A, e_B):
    rule, a, b = Fixed(0.3, 0.2), float(Fraction(e_A)), float(Fraction(e_B))
    model, x, y = setup(network)
    expected = copy.deepcopy(model)
    f, seen = plain.watch(expected, x)
    vectors = plain.fisher_vectors(f, "exact", "categorical", y, seed=5)
    layers = {name: plain.kfac_factors(*parts, f, vectors, "expand") for name, parts in seen.items()}
    loss_of(f, y).backward()
    with torch.no_grad():
        for name, (module, _, _) in seen.items():
            A, B, positions = layers[name]
            step = plain.kronecker_step(module.weight.grad.flatten(1), A, B, rule.a, rule.b, a, b)
            module.weight -= LR * step.reshape(module.weight.shape)
            damped = plain.power(B + rule.b * torch.eye(len(B)), b)
            module.bias -= LR * torch.linalg.solve(damped, module.bias.grad) / positions**a
    run(Kronecker(model, None, LR, e_A=e_A, e_B=e_B, damping=rule, fisher="exact", seed=5, trust=None), model, x, y)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10), name


@pytest.mark.parametrize(
    ("method", "powers"), [(KFAC, ("1", "1")), (FOOF, ("1", "0")), (FOOFMirror, ("0", "1"))], ids=str
)
@pytest.mark.parametrize("trust", [None, "spectral"])
def test_known_methods_are_special_cases(method, powers, trust):
    e_A, e_B = powers
    found = []
    for make, options in ((method, {}), (Kronecker, {"e_A": e_A, "e_B": e_B})):
        model, x, y = setup("cnn")
        optimizer = make(model, lr=0.1, trust=trust, **options)
        for _ in range(3):
            run(optimizer, model, x, y)
        found.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_newton_is_close_to_eigenvalues():
    found = []
    for solver in ("eigh", "newton"):
        model, x, y = setup("mlp")
        before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
        run(Kronecker(model, lr=0.1, solver=solver, trust=None), model, x, y)
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before)
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.02


@pytest.mark.parametrize(("e_A", "e_B"), [*POWERS, ("1", "1")])
def test_learning_rates_and_damping_follow_the_powers(e_A, e_B):
    model = Net(32)
    plan = mukron.parametrize(model, mukron.base_shapes(Net, width=8))
    optimizer = Kronecker(model, plan, lr=0.1, e_A=e_A, e_B=e_B)
    exponents, hidden = solve(f"kronecker:{e_A},{e_B}")[Role.HIDDEN], optimizer.layers["hidden"]
    assert hidden.blocks["weight"].scale == pytest.approx(4.0 ** -float(exponents.c.total))
    for name, scale in hidden.sides["weight"].scales.items():
        assert scale == pytest.approx(4.0 ** -float(exponents.d[name].total))
    assert set(hidden.sides["weight"].scales) == {name for name, e in (("A", e_A), ("B", e_B)) if e != "0"}


@pytest.mark.parametrize(("e_A", "e_B"), [(0, 0), ("-1/2", 1), (1, -1)])
def test_powers_that_make_no_sense_are_refused(e_A, e_B):
    with pytest.raises(ValueError, match="e_A and e_B must be 0 or more, and not both 0"):
        Kronecker(torch.nn.Linear(2, 2), e_A=e_A, e_B=e_B)


def test_the_mirror_has_no_powers_to_choose():
    with pytest.raises(TypeError, match="FOOFMirror has the powers 0 and 1: e_A would have no effect"):
        FOOFMirror(torch.nn.Linear(2, 2), e_A=1)


LAWS = {("1/2", "1/2"): 0.005, ("1", "1/2"): 0.005, ("1/2", "1"): 0.005, ("0", "1"): 0.01, ("1/4", "3/4"): 0.005}


@pytest.mark.slow
@pytest.mark.parametrize(("powers", "lr"), LAWS.items(), ids=str)
def test_features_are_learned_at_every_width(powers, lr):
    """Roots of whole matrices are made once, at the first step, and at widths that two cores can take."""
    torch.set_default_dtype(torch.float32)
    e_A, e_B = powers
    widths = (256, 512, 1024, 2048) if {e_A, e_B} <= {"0", "1"} else (128, 256, 512)
    options = {"lr": lr, "e_A": e_A, "e_B": e_B, "inverse_every": 10, "fisher": "exact"}
    for step, found in slopes(Kronecker, options, widths).items():
        assert all(abs(slope) < 0.12 for slope in found), (step, found)
