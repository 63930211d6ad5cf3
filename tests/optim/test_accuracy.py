"""A float32 step agrees with the same step in float64, or the layer that does not is named in a warning.

Error: |change in float32 - change in float64| / |change in float64|, Frobenius norms of the weights' change at one
step, for each layer and for the whole network. The reference is the same optimizer with ``form="matrix"`` on a float64
copy of the model and the data; it is compared once with the plain formula, solved densely.

Weights are put back before every step, so that an error of one step does not become a difference of the next.
"""

from __future__ import annotations

import copy
import re
import warnings
from functools import cache

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import EMA, FOOF, KFAC, GaussNewton

BATCH, FEW, WIDTH, BAR = 64, 16, 256, 1e-2
DAMPINGS = {"1": 1.0, "2^-8": 2.0**-8, "1e-3": 1e-3, "1e-4": 1e-4}
FORMS = {
    "auto": {},
    "rows": {"form": "rows"},
    "matrix": {"form": "matrix"},
    "fused": {"fused": True},
}
METHODS = {
    "empirical": (KFAC, {"fisher": "empirical"}),
    "exact": (KFAC, {"fisher": "exact"}),
    "mc": (KFAC, {"fisher": "mc"}),
    "foof": (FOOF, {}),
    "gauss-newton": (GaussNewton, {}),
}


class MLP(nn.Module):
    """64-256-256-10, with logits of the given type."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.logits = torch.float32
        self.first = nn.Linear(64, WIDTH, bias)
        self.hidden = nn.Linear(WIDTH, WIDTH, bias)
        self.head = nn.Linear(WIDTH, 10, bias)

    def forward(self, x):
        return self.head(F.relu(self.hidden(F.relu(self.first(x))))).to(self.logits)


@cache
def network(bias: bool) -> MLP:
    torch.manual_seed(0)
    return MLP(bias)


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]


@cache
def batches(data: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = digits()
    return [made_of(data, *batch) for batch in list(zip(x.split(BATCH), y.split(BATCH), strict=True))[:count]]


def made_of(data: str, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if data == "4 samples, repeated":
        return x[:4].repeat(BATCH // 4, 1), y[:4].repeat(BATCH // 4)
    if data == "constant inputs":
        return x[:1].repeat(BATCH, 1), y
    if data == "some inputs zero":
        return x * (torch.arange(BATCH) % 3 > 0)[:, None], y
    return x, y


# What is done beside a plain step: data, biases, steps, micro-batches, options, and a change of the gradient.
PLAIN = {"data": "digits", "bias": True, "steps": 1, "parts": 1, "options": {}, "gradient": None}
CASES = {
    "plain": {},
    "4 samples, repeated": {"data": "4 samples, repeated"},
    "constant inputs": {"data": "constant inputs"},
    "some inputs zero": {"data": "some inputs zero"},
    "no biases": {"bias": False},
    "4 samples, no biases": {"data": "4 samples, repeated", "bias": False},
    "between refreshes": {"steps": 2, "options": {"inverse_every": 2}},
    "clipped": {"gradient": "clipped"},
    "noise": {"gradient": "noise"},
    "micro-batches": {"parts": 2},
    "ema": {"steps": 3, "options": {"memory": EMA(0.9)}},
}


def changed_gradient(model: nn.Module, how: str | None) -> None:
    if how == "clipped":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    elif how == "noise":  # the same in both precisions, a thousandth of the gradient
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.grad += 1e-3 * float(parameter.grad.norm()) / parameter.numel() ** 0.5 * noise


def change(case: str, method: str, rho: float, dtype: torch.dtype, **options) -> tuple[dict[str, torch.Tensor], list]:
    """The change of every parameter in the last step, in float64, and the warnings of all steps."""
    setting = {**PLAIN, **CASES[case]}
    model = copy.deepcopy(network(setting["bias"])).to(dtype)
    model.logits = torch.float64 if method == "mc" else dtype
    start = copy.deepcopy(model.state_dict())
    make, own = METHODS[method]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = make(model, lr=1.0, damping=rho, trust=None, **own, **setting["options"], **options)
        for x, y in batches(setting["data"], setting["steps"]):
            model.load_state_dict(start)
            optimizer.zero_grad()
            size = FEW if method == "gauss-newton" else BATCH  # it has one row a sample and output
            parts = setting["parts"]
            for inputs, targets in zip(x[:size].to(dtype).chunk(parts), y[:size].chunk(parts), strict=True):
                (F.cross_entropy(model(inputs), targets) / parts).backward()
            changed_gradient(model, setting["gradient"])
            optimizer.step()
    assert optimizer.skipped == 0
    moved = {name: (value.double() - start[name].double()) for name, value in model.state_dict().items()}
    return moved, [(warning.category, str(warning.message)) for warning in said]


@cache
def expected(case: str, method: str, rho: float) -> dict[str, torch.Tensor]:
    form = {} if method == "gauss-newton" else {"form": "matrix"}
    return change(case, method, rho, torch.float64, **form)[0]


def layers_of(changes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The change of each layer as one vector, weight and bias."""
    names = dict.fromkeys(name.rpartition(".")[0] for name in changes)
    return {
        layer: torch.cat([value.flatten() for name, value in changes.items() if name.startswith(f"{layer}.")])
        for layer in names
    }


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def told(layer: str, said: list) -> bool:
    """Whether a RuntimeWarning names the layer and tells to raise the damping."""
    return any(
        issubclass(category, RuntimeWarning) and re.search(rf"\b{layer}\b", text) and "raise the damping" in text
        for category, text in said
    )


def check(case: str, method: str, form: str, rho: float, quiet: bool = False) -> None:
    changes, said = change(case, method, rho, torch.float32, **FORMS[form])
    ours, theirs = layers_of(changes), layers_of(expected(case, method, rho))
    errors = {layer: relative(ours[layer], theirs[layer]) for layer in ours}
    if quiet:
        assert said == []
    trusted = [layer for layer in ours if not told(layer, said)]
    wrong = {layer: errors[layer] for layer in trusted if not errors[layer] <= BAR}
    assert not wrong, f"no warning, and errors of {wrong}; warnings: {said}"
    if trusted:
        whole = relative(torch.cat([ours[layer] for layer in trusted]), torch.cat([theirs[layer] for layer in trusted]))
        assert whole <= BAR


def dense(fisher: str | None, rho: float) -> dict[str, torch.Tensor]:
    """-(B + rho_B)^-1 G (A + rho_A)^-1 with rho_A = rho tr(A) / d, dense in float64; without a Fisher FOOF's step."""
    model = copy.deepcopy(network(True)).double()
    (x, y) = batches("digits", 1)[0]
    h = [x.double()]
    u = []
    for layer in (model.first, model.hidden, model.head):
        u.append(layer(h[-1]))
        h.append(F.relu(u[-1]))
    p = u[-1].detach().softmax(1)
    if fisher == "empirical":
        vectors = [p - F.one_hot(y, 10)]
    else:
        vectors = [p[:, c, None].sqrt() * (F.one_hot(torch.tensor(c), 10) - p) for c in range(10)]
    signals = [torch.autograd.grad(u[-1], u, vector, retain_graph=True) for vector in vectors]
    F.cross_entropy(u[-1], y).backward()
    moves = {}
    for index, name in enumerate(("first", "hidden", "head")):
        layer, rows = getattr(model, name), h[index].detach()
        A = rows.T @ rows / BATCH
        A = A + rho * A.trace() / len(A) * torch.eye(len(A), dtype=A.dtype)
        B = sum(each[index].T @ each[index] for each in signals) / BATCH
        B = B + rho * B.trace() / len(B) * torch.eye(len(B), dtype=B.dtype)
        left = (lambda G: G) if fisher is None else (lambda G, B=B: torch.linalg.solve(B, G))
        moves[f"{name}.weight"] = -torch.linalg.solve(A, left(layer.weight.grad).T).T
        moves[f"{name}.bias"] = -left(layer.bias.grad[:, None])[:, 0]
    return moves


@pytest.mark.parametrize(
    ("method", "rho"), [("empirical", 1.0), ("empirical", 1e-4), ("exact", 1e-3), ("foof", 2.0**-8), ("foof", 1e-4)]
)
def test_the_reference_is_the_plain_formula(method, rho):
    plain = dense(None if method == "foof" else method, rho)
    for name, move in expected("plain", method, rho).items():
        assert relative(move, plain[name]) < 1e-6, name


@pytest.mark.parametrize("rho", DAMPINGS.values(), ids=DAMPINGS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["empirical", "foof"])
def test_by_damping(method, form, rho):
    check("plain", method, form, rho, quiet=rho == 1)


@pytest.mark.parametrize(
    ("form", "rho"),
    [*(("auto", rho) for rho in DAMPINGS.values()), ("rows", 1e-3), ("matrix", 1e-3), ("fused", 1e-3), ("fused", 1e-4)],
)
def test_exact_by_damping(form, rho):
    check("plain", "exact", form, rho, quiet=rho == 1)


@cache
def draws_are_equal() -> bool:
    """Logits are float64 in both models: the draws are equal where they are made in the precision of the logits."""
    ours, theirs = change("plain", "mc", 1.0, torch.float32, form="matrix")[0], expected("plain", "mc", 1.0)
    return relative(ours["hidden.weight"], theirs["hidden.weight"]) < BAR


@pytest.mark.parametrize("rho", DAMPINGS.values(), ids=DAMPINGS)
@pytest.mark.parametrize("form", FORMS)
def test_drawn_targets(form, rho):
    assert draws_are_equal()
    check("plain", "mc", form, rho, quiet=rho == 1)


CASES_AND_FORMS = [  # a fused step leaves no gradient to change
    (case, form)
    for case, setting in CASES.items()
    for form in FORMS
    if setting and not (form == "fused" and "gradient" in setting)
]


@pytest.mark.parametrize(("case", "form"), CASES_AND_FORMS)
def test_by_case(case, form):
    check(case, "empirical", form, 1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
@pytest.mark.parametrize("form", ["auto", "matrix"])
def test_by_case_with_more_damping(case, form):
    check(case, "empirical", form, 2.0**-8)


@pytest.mark.parametrize(("case", "form"), CASES_AND_FORMS)
def test_foof_by_case(case, form):
    check(case, "foof", form, 1e-4)


@pytest.mark.parametrize("case", ["4 samples, repeated", "constant inputs", "noise", "between refreshes", "ema"])
@pytest.mark.parametrize("form", ["auto", "matrix"])
def test_exact_by_case(case, form):
    check(case, "exact", form, 1e-3)


@pytest.mark.parametrize(
    ("case", "rho"),
    [
        *(
            ("plain", 1.0),
            ("plain", 2.0**-8),
            ("plain", 1e-4),
            ("4 samples, repeated", 1e-4),
            ("constant inputs", 1e-4),
        ),
        *(("some inputs zero", 1e-4), ("noise", 1e-4), ("micro-batches", 1e-4), ("no biases", 1e-3), ("clipped", 1e-3)),
    ],
)
def test_gauss_newton(case, rho):
    check(case, "gauss-newton", "auto", rho, quiet=rho == 1)


SMALL_CASES = {
    "exact, matrices": (KFAC, {"damping": 1e-3, "fisher": "exact", "form": "matrix"}, 4),
    "ema": (KFAC, {"damping": mukron.MaxEigenvalue(1e-4), "fisher": "empirical", "memory": "ema:0.9"}, 4),
    "window": (FOOF, {"damping": 1e-3, "memory": "window:2"}, 16),
    "momentum": (
        FOOF,
        {"damping": mukron.Constant(1e-3), "form": "rows", "momentum": mukron.GradientMomentum(0.9)},
        16,
    ),
}


@pytest.mark.parametrize("case", SMALL_CASES)
def test_small_networks_whose_sides_are_both_ill_conditioned(case):
    """Neither condition number is large alone: rounding of the gradient itself meets both."""
    method, options, samples = SMALL_CASES[case]
    changes, said = [], []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)]
        model = nn.Sequential(*layers).to(dtype)
        start = copy.deepcopy(model.state_dict())
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(3, (samples,), generator=generator)
        x = (torch.randn(samples, 6, generator=generator) + 2).to(dtype)
        optimizer = method(model, lr=1e-3, **{"trust": None, **options})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        said = [(warning.category, str(warning.message)) for warning in caught]
        changes.append({n: v.double() - start[n].double() for n, v in model.state_dict().items()})
    ours, theirs = layers_of(changes[1]), layers_of(changes[0])
    wrong = {layer: relative(ours[layer], theirs[layer]) for layer in ours if not told(layer, said)}
    assert all(error <= BAR for error in wrong.values()), wrong
