"""Options are values with their own settings; the strings and numbers that stand for them mean the same."""

from __future__ import annotations

import copy
import math
import re

import pytest
import reference as plain
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import mukron
from mukron import EMA, FOOF, KFAC, Batch, Constant, GaussNewton, Shampoo, Sum
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)) for _ in range(4)]


def net() -> Net:
    torch.manual_seed(0)
    return Net(8)


def mlp(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(INPUTS, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 5)]
    return nn.Sequential(*layers).to(dtype)


def train(model, optimizer, factor=1.0, reduction="mean"):
    dtype = next(model.parameters()).dtype
    for x, y in BATCHES:
        optimizer.zero_grad()
        (factor * F.cross_entropy(model(x.to(dtype)), y, reduction=reduction)).backward()
        optimizer.step()
    assert optimizer.skipped == 0
    assert optimizer.steps == len(BATCHES)
    return dict(model.named_parameters())


# Method, options in short, and the same with values. The values are named late: they may not exist yet.
PAIRS = {
    "eigh": (KFAC, {"solver": "eigh"}, lambda: {"solver": mukron.Eigh()}),
    "cholesky": (KFAC, {"solver": "cholesky"}, lambda: {"solver": mukron.Cholesky()}),
    "newton": (KFAC, {"solver": "newton"}, lambda: {"solver": mukron.Newton()}),
    "foof, eigh": (FOOF, {"solver": "eigh"}, lambda: {"solver": mukron.Eigh()}),
    "shampoo, eigh": (Shampoo, {"solver": "eigh"}, lambda: {"solver": mukron.Eigh()}),
    "shampoo, newton": (Shampoo, {"solver": "newton"}, lambda: {"solver": mukron.Newton()}),
    "tracked": (Shampoo, {"solver": "tracked"}, lambda: {"solver": mukron.Tracked()}),
    "tracked, tolerance": (
        Shampoo,
        {"solver": "tracked", "tolerance": 0.05},
        lambda: {"solver": mukron.Tracked(tolerance=0.05)},
    ),
    "mc": (KFAC, {"fisher": "mc"}, lambda: {"fisher": mukron.MonteCarlo(draws=1)}),
    "mc, by default": (KFAC, {}, lambda: {"fisher": mukron.MonteCarlo()}),
    "exact": (KFAC, {"fisher": "exact"}, lambda: {"fisher": mukron.Exact()}),
    "empirical": (KFAC, {"fisher": "empirical"}, lambda: {"fisher": mukron.Empirical()}),
    "empirical, sum": (
        KFAC,
        {"fisher": "empirical", "reduction": "sum"},
        lambda: {"fisher": mukron.Empirical(reduction="sum")},
    ),
    "momentum": (KFAC, {"momentum": 0.9}, lambda: {"momentum": mukron.HeavyBall(0.9)}),
    "nesterov": (
        KFAC,
        {"momentum": 0.9, "nesterov": True},
        lambda: {"momentum": mukron.HeavyBall(0.9, nesterov=True)},
    ),
    "shampoo, nesterov": (
        Shampoo,
        {"momentum": 0.9, "nesterov": True},
        lambda: {"momentum": mukron.HeavyBall(0.9, nesterov=True)},
    ),
    "gauss-newton, momentum": (GaussNewton, {"momentum": 0.9}, lambda: {"momentum": mukron.HeavyBall(0.9)}),
    "adamw": (KFAC, {"fallback": "adamw"}, lambda: {"fallback": mukron.AdamStep()}),
    "sgd": (KFAC, {"fallback": "sgd"}, lambda: {"fallback": mukron.SGDStep()}),
    "graft, adam": (KFAC, {"trust": "graft:adam"}, lambda: {"trust": mukron.Graft(mukron.AdamStep())}),
    "graft, sgd": (Shampoo, {"trust": "graft:sgd"}, lambda: {"trust": mukron.Graft("sgd")}),
    "ema": (KFAC, {"memory": "ema:0.9"}, lambda: {"memory": EMA(0.9)}),
    "batch": (Shampoo, {"memory": "batch"}, lambda: {"memory": Batch()}),
    "sum": (KFAC, {"memory": "sum"}, lambda: {"memory": Sum()}),
}


@pytest.mark.parametrize(("method", "short", "values"), PAIRS.values(), ids=PAIRS)
def test_a_shorthand_is_its_value(method, short, values):
    first, second = net(), net()
    reduction = short.get("reduction", "mean")
    brief = train(first, method(first, lr=0.05, damping=0.1, **{"trust": None, **short}), reduction=reduction)
    typed = train(second, method(second, lr=0.05, damping=0.1, **{"trust": None, **values()}), reduction=reduction)
    for name, parameter in brief.items():
        assert torch.equal(parameter, typed[name]), name


# Adam's numbers.


def test_the_fallbacks_betas_and_eps():
    """The norm follows torch's AdamW with the same numbers."""
    betas, eps, lr = (0.8, 0.9), 1e-6, 0.01
    model = net().double()
    optimizer = KFAC(model, lr=0.05, fallback_lr=lr, fallback=mukron.AdamStep(betas=betas, eps=eps), trust=None)
    norm = [parameter.detach().clone().requires_grad_() for parameter in model.norm.parameters()]
    theirs = torch.optim.AdamW(norm, lr=lr, betas=betas, eps=eps, weight_decay=0.0)
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        for parameter, copied in zip(model.norm.parameters(), norm, strict=True):
            copied.grad = parameter.grad.clone()
        optimizer.step()
        theirs.step()
        for parameter, copied in zip(model.norm.parameters(), norm, strict=True):
            torch.testing.assert_close(parameter.detach(), copied.detach(), rtol=1e-10, atol=1e-12)


def test_the_grafts_betas_and_eps():
    """Every parameter moves by the length of Adam's step with the same numbers, in K-FAC's direction."""
    betas, eps, lr = (0.8, 0.9), 1e-2, 0.05
    model = mlp()
    optimizer = KFAC(model, lr=lr, trust=mukron.Graft(mukron.AdamStep(betas=betas, eps=eps)))
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    theirs = torch.optim.Adam(copies, lr=lr, betas=betas, eps=eps)
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        start = [copied.detach().clone() for copied in copies]
        for parameter, copied in zip(model.parameters(), copies, strict=True):
            copied.grad = parameter.grad.clone()
        optimizer.step()
        theirs.step()
        ours = [float((p.detach() - q).norm()) for p, q in zip(model.parameters(), before, strict=True)]
        lengths = [float((p.detach() - q).norm()) for p, q in zip(copies, start, strict=True)]
        assert ours == pytest.approx(lengths, rel=1e-9)


# Draws.


def test_more_draws_come_closer_to_the_exact_fisher():
    """B is the mean over draws: the error falls like draws^-1/2."""
    torch.manual_seed(0)
    x, y = torch.randn(16, INPUTS).double(), torch.randint(5, (16,))

    def change(**options):
        model = mlp()
        start = copy.deepcopy(model[0].weight.detach())
        optimizer = KFAC(model, lr=1.0, damping=Constant(1.0), **{"trust": None, **options})
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return model[0].weight.detach() - start

    exact = change(fisher=mukron.Exact())
    draws = (1, 4, 16, 64)
    errors = []
    for count in draws:
        fisher = mukron.MonteCarlo(draws=count)
        squares = [float((change(fisher=fisher, seed=seed) - exact).square().sum()) for seed in range(16)]
        errors.append(math.sqrt(sum(squares) / len(squares)))
    logs = [math.log(count) for count in draws]
    mean, height = sum(logs) / len(logs), sum(map(math.log, errors)) / len(logs)
    slope = sum((a - mean) * (math.log(e) - height) for a, e in zip(logs, errors, strict=True))
    slope /= sum((a - mean) ** 2 for a in logs)
    assert slope == pytest.approx(-0.5, abs=0.12)


# Momentum of the gradient.


def preconditioned(model, x, y, gradients, rho, method):
    """(B + rho)^-1 m (A + rho)^-1 of every layer, dense; a bias by B alone."""
    f, seen = plain.watch(copy.deepcopy(model), x)
    vectors = plain.fisher_vectors(f, "empirical", "categorical", y, seed=0)
    moves = {}
    for name, parts in seen.items():
        A, B, _ = plain.kfac_factors(*parts, f, vectors)
        A = A + rho * torch.eye(len(A), dtype=A.dtype)
        B = B + rho * torch.eye(len(B), dtype=B.dtype) if method is KFAC else torch.eye(len(B), dtype=B.dtype)
        weight, bias = gradients[f"{name}.weight"], gradients[f"{name}.bias"]
        moves[f"{name}.weight"] = torch.linalg.solve(B, weight) @ torch.linalg.inv(A)
        moves[f"{name}.bias"] = torch.linalg.solve(B, bias)
    return moves


@pytest.mark.parametrize("options", [{}, {"form": "matrix"}, {"form": "rows"}], ids=["auto", "matrix", "rows"])
@pytest.mark.parametrize("method", [KFAC, FOOF])
def test_momentum_of_the_gradient(method, options):
    """Step k preconditions m_k / (1 - beta^k) with m_k = beta m_(k-1) + (1 - beta) g_k."""
    beta, lr, rho = 0.9, 0.1, 0.1
    fisher = {"fisher": "empirical"} if method is KFAC else {}
    model = mlp()
    momentum = mukron.GradientMomentum(beta)
    optimizer = method(
        model, lr=lr, damping=Constant(rho), momentum=momentum, memory=Batch(), **fisher, **{"trust": None, **options}
    )
    average = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for k, (inputs, y) in enumerate(BATCHES, start=1):
        x = inputs.double()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, parameter in model.named_parameters():
            average[name] = beta * average[name] + (1 - beta) * parameter.grad
        corrected = {name: m / (1 - beta**k) for name, m in average.items()}
        moves = preconditioned(model, x, y, corrected, rho, method)
        expected = {name: p.detach() - lr * moves[name] for name, p in model.named_parameters()}
        optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), expected[name], rtol=1e-8, atol=1e-10, msg=f"{name}, step {k}"
            )


def test_momentum_of_the_gradient_goes_on_after_loading():
    def make(model):
        return KFAC(model, lr=0.1, fisher="empirical", momentum=mukron.GradientMomentum(0.9), trust=None)

    model = mlp()
    optimizer = make(model)
    train(model, optimizer)
    other = copy.deepcopy(model)
    again = make(other)
    again.load_state_dict(optimizer.state_dict())
    for part, own in ((model, optimizer), (other, again)):
        x, y = BATCHES[0]
        own.zero_grad()
        F.cross_entropy(part(x.double()), y).backward()
        own.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


KINDS = {
    "number": lambda value: value,
    "heavy ball": lambda value: mukron.HeavyBall(value, nesterov=False),
    "nesterov": lambda value: mukron.HeavyBall(value, nesterov=True),
    "gradient": lambda value: mukron.GradientMomentum(value),  # noqa: PLW0108
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_schedule_moves_the_momentum(kind):
    """``group["momentum"]`` is the number in force: a schedule that holds it at 0.8 makes the steps of 0.8."""

    def trained(first, momentum):
        model = mlp()
        optimizer = KFAC(model, lr=0.1, fisher="empirical", momentum=kind(first), trust=None)
        assert optimizer.param_groups[0]["momentum"] == first
        low, high = momentum
        schedule = OneCycleLR(
            optimizer, max_lr=0.1, total_steps=8, cycle_momentum=True, base_momentum=low, max_momentum=high
        )
        numbers = []
        for x, y in BATCHES:
            optimizer.zero_grad()
            F.cross_entropy(model(x.double()), y).backward()
            numbers.append(optimizer.param_groups[0]["momentum"])
            optimizer.step()
            schedule.step()
        return [parameter.detach() for parameter in model.parameters()], numbers

    held, numbers = trained(0.5, (0.8, 0.8))
    assert numbers == pytest.approx([0.8] * 4)
    own, _ = trained(0.8, (0.8, 0.8))
    moved, numbers = trained(0.8, (0.5, 0.95))
    assert len(set(numbers)) > 2
    assert all(map(torch.equal, held, own))
    assert not any(map(torch.equal, moved, own))


# Numbers and names that are refused.

REFUSED = {
    "Tracked(tolerance=0)": (lambda: mukron.Tracked(tolerance=0), r"\b0\b"),
    "Tracked(tolerance=-1)": (lambda: mukron.Tracked(tolerance=-1.0), r"-1"),
    "MonteCarlo(draws=0)": (lambda: mukron.MonteCarlo(draws=0), r"\b0\b"),
    "HeavyBall(1.0)": (lambda: mukron.HeavyBall(1.0), r"\b1\b"),
    "HeavyBall(-0.1)": (lambda: mukron.HeavyBall(-0.1), r"-0\.1"),
    "HeavyBall(0, nesterov=True)": (
        lambda: mukron.HeavyBall(0, nesterov=True),
        "nesterov.*momentum|momentum.*nesterov",
    ),
    "GradientMomentum(1.0)": (lambda: mukron.GradientMomentum(1.0), r"\b1\b"),
    "AdamStep(betas=(1, 0.9))": (lambda: mukron.AdamStep(betas=(1, 0.9)), r"\b1\b"),
    "AdamStep(betas=(0.9, 1.5))": (lambda: mukron.AdamStep(betas=(0.9, 1.5)), r"1\.5"),
    "AdamStep(eps=-1)": (lambda: mukron.AdamStep(eps=-1.0), "-1"),
    "Empirical(reduction='none')": (lambda: mukron.Empirical(reduction="none"), "none"),
    "momentum=1.0": (lambda: KFAC(net(), momentum=1.0, trust=None), r"momentum must lie in \[0, 1\), got 1\.0"),
    "tolerance=0": (lambda: Shampoo(net(), solver="tracked", tolerance=0, trust=None), r"\b0\b"),
    "memory='ema:2'": (lambda: KFAC(net(), memory="ema:2", trust=None), r"\b2\b"),
}


@pytest.mark.parametrize(("attempt", "named"), REFUSED.values(), ids=REFUSED)
def test_a_bad_value_is_refused_by_its_value(attempt, named):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        attempt()
    assert re.search(named, str(caught.value)), str(caught.value)


UNKNOWN = {
    "solver": (KFAC, {"solver": "lu"}, ("cholesky", "eigh", "newton")),
    "shampoo's solver": (Shampoo, {"solver": "lu"}, ("eigh", "newton", "tracked")),
    "fisher": (KFAC, {"fisher": "true"}, ("mc", "exact", "empirical")),
    "fallback": (KFAC, {"fallback": "rmsprop"}, ("sgd", "adamw")),
    "trust": (KFAC, {"trust": "trust-region"}, ("spectral", "kl", "graft", "rms", "none")),
    "graft": (KFAC, {"trust": "graft:rmsprop"}, ("sgd", "adam")),
    "memory": (KFAC, {"memory": "mean:0.9"}, ("batch", "ema", "sum", "window")),
}


@pytest.mark.parametrize(("method", "options", "known"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_name_lists_the_known_ones(method, options, known):
    with pytest.raises(ValueError, match=re.escape(next(iter(options.values())))) as caught:
        method(net(), **{"trust": None, **options})
    for name in known:
        assert name in str(caught.value).lower()


# Shampoo.


def relative(ours, theirs, start) -> float:
    pairs = [(p.detach() - s, q.detach() - s) for p, q, s in zip(ours, theirs, start, strict=True)]
    return math.sqrt(
        sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(b.square().sum()) for _, b in pairs)
    )


SCALED = {
    "eigh": {},
    "newton": {"solver": "newton"},
    "tracked": {"solver": "tracked", "tolerance": 1e-3},
    "ema": {"memory": EMA(0.9)},
    "batch": {"memory": Batch()},
    "momentum": {"momentum": 0.9},
    "fused": {"fused": True},
}


@pytest.mark.parametrize("factor", [1e-30, 1e15])
@pytest.mark.parametrize("options", SCALED.values(), ids=SCALED)
def test_shampoo_does_not_see_the_scale_of_the_loss(options, factor):
    """With e = 1/2 and damping relative to the largest eigenvalue a factor of the loss cancels, in float32 too."""
    model, scaled = mlp(torch.float32), mlp(torch.float32)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, Shampoo(model, lr=0.05, damping=1e-3, **{"trust": None, **options}))
    train(scaled, Shampoo(scaled, lr=0.05, damping=1e-3, **{"trust": None, **options}), factor)
    assert relative(scaled.parameters(), model.parameters(), start) < 1e-3


@pytest.mark.parametrize("solver", ["eigh", "newton", "tracked"])
@pytest.mark.parametrize("rho", [1e-3, 1e-1])
def test_shampoo_takes_a_bias_for_a_vector(solver, rho):
    """An order-one tensor has one side and the whole exponent: (L + rho)^-1/2 g with L = sum g g^T (Gupta et al.)."""
    model, lr = mlp(), 0.1
    optimizer = Shampoo(model, lr=lr, damping=rho, solver=solver, trust=None)
    sums = {name: 0.0 for name, _ in model.named_parameters() if name.endswith("bias")}
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        parameters = dict(model.named_parameters())
        expected = {}
        for name, earlier in sums.items():
            g = parameters[name].grad
            sums[name] = earlier + torch.outer(g, g)
            values, Q = torch.linalg.eigh(sums[name])
            damped = values.clamp_min(0) + rho * values[-1]
            expected[name] = parameters[name].detach() - lr * (Q * damped**-0.5) @ (Q.T @ g)
        before = {name: parameters[name].detach().clone() for name in sums}
        optimizer.step()
        for name, after in expected.items():
            change = after - before[name]
            error = float((parameters[name].detach() - after).norm() / change.norm())
            assert error < (0.02 if solver == "tracked" else 1e-5), name
