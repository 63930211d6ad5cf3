"""Laws measured: other people's optimizers with our groups, eps, and weight decay of our own optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.exponents import fit_exponent
from mukron.models import MLP
from networks import INPUTS, Net

try:
    import pytorch_optimizer as theirs
except ImportError:
    theirs = None
needs_theirs = pytest.mark.skipif(theirs is None, reason="pytorch_optimizer is not installed")

WIDTHS, BASE = (64, 256, 1024), 64
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 10


def factory(width: int) -> nn.Module:
    return MLP(width, inputs=32)


def outputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found, x = {}, X
    with torch.no_grad():
        for name, module in model.named_children():
            x = module(x)
            if isinstance(module, nn.Linear):
                found[name] = x
    return found


def note(changes, width, model, before) -> None:
    for name, after in outputs_of(model).items():
        change = (after - before[name]).square().mean().sqrt().item()
        changes.setdefault(name, []).append((width, change))


def fitted(changes) -> dict[str, float]:
    return {name: fit_exponent(*zip(*pairs, strict=True)).slope for name, pairs in changes.items() if name != "fc3"}


def slopes(make) -> dict[str, float]:
    """Of the change of every hidden layer's output by one step, over the width."""
    changes: dict[str, list[tuple[int, float]]] = {}
    for width in WIDTHS:
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = factory(width)
            plan = mukron.parametrize(model, mukron.base_shapes(factory, BASE))
            optimizers, before = make(model, plan), outputs_of(model)
            F.cross_entropy(model(X), Y).backward()
            for optimizer in optimizers:
                optimizer.step()
            note(changes, width, model, before)
    return fitted(changes)


def adamw_beside(plan, method):
    return torch.optim.AdamW(plan.param_groups("adamw", lr=1e-3, beside=method))


def inner(model):
    return [model.fc1.weight, model.fc2.weight]


def of_muon(plan, **options):
    groups = plan.param_groups("muon", lr=0.002, **options)
    return groups + plan.param_groups("adamw", lr=1e-3, beside="muon")


# With our groups, and the same optimizer without them.
OPTIMIZERS = {
    "lion": (
        lambda model, plan: [theirs.Lion(plan.param_groups("lion", lr=1e-3))],
        lambda model, plan: [theirs.Lion(model.parameters(), lr=1e-3)],
    ),
    "shampoo": (
        lambda model, plan: [theirs.Shampoo(plan.param_groups("shampoo", lr=0.002)), adamw_beside(plan, "shampoo")],
        lambda model, plan: [theirs.Shampoo(inner(model), lr=0.002)],
    ),
    "muon": (
        lambda model, plan: [theirs.Muon(of_muon(plan))],
        lambda model, plan: [theirs.Muon(of_muon(plan), use_adjusted_lr=True)],  # scales by itself in another way
    ),
    "muon, adjusted": (
        lambda model, plan: [theirs.Muon(of_muon(plan, scaling="match_rms_adamw"), use_adjusted_lr=True)],
        lambda model, plan: [
            theirs.Muon([{"params": inner(model), "lr": 0.002, "use_muon": True}], use_adjusted_lr=True)
        ],
    ),
}


@needs_theirs
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_features_move_alike_with_groups_and_not_without(optimizer):
    with_groups, without = OPTIMIZERS[optimizer]
    measured = slopes(with_groups)
    assert max(map(abs, measured.values())) < 0.12, measured
    assert max(map(abs, slopes(without).values())) > 0.3


def slopes_in_training(rows: int, make) -> dict[str, float]:
    """Of the change of every hidden layer's output by the 21st step, each on a batch of its own, over the width."""
    changes: dict[str, list[tuple[int, float]]] = {}
    targets = torch.randn(32, 10, generator=torch.Generator().manual_seed(3))
    for width in (64, 128, 256):
        for seed in (0, 1):
            torch.manual_seed(seed)
            model, draws = factory(width), torch.Generator().manual_seed(seed)
            plan = mukron.parametrize(model, mukron.base_shapes(factory, BASE))
            optimizers = make(model, plan)
            for _ in range(21):
                x = torch.randn(rows, 32, generator=draws)
                labels = torch.multinomial((x @ targets).softmax(1), 1, generator=draws)[:, 0]
                before = outputs_of(model)
                model.zero_grad()
                F.cross_entropy(model(x), labels).backward()
                for optimizer in optimizers:
                    optimizer.step()
            note(changes, width, model, before)
    return fitted(changes)


def their_soap(plan, eps=None, change=lambda groups: groups):
    groups = change(plan.param_groups("soap", lr=1e-3, eps=eps))
    return [theirs.SOAP(groups, weight_decay=0.0, precondition_frequency=10), adamw_beside(plan, "soap")]


@needs_theirs
@pytest.mark.parametrize("rows", [16, 1024])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_soap_moves_features_alike_in_training(rows, eps):
    measured = slopes_in_training(rows, lambda _, plan: their_soap(plan, eps))
    assert max(map(abs, measured.values())) < 0.12, measured


@needs_theirs
def test_soap_with_the_law_of_its_first_step_moves_wide_features_more():
    """And with an eps that stays as it is, less."""
    measured = slopes_in_training(64, lambda _, plan: their_soap(plan, change=as_at_first))
    assert min(measured.values()) > 0.3, measured
    measured = slopes_in_training(64, lambda _, plan: their_soap(plan, change=lambda groups: unscaled(groups, 1e-3)))
    assert max(measured.values()) < -0.3, measured


BOUNDED = {
    "kfac": lambda model, plan: [mukron.KFAC(model, plan, lr=0.03)],
    "shampoo": lambda model, plan: [mukron.Shampoo(model, plan, lr=0.02)],
    "soap": lambda model, plan: [mukron.SOAP(model, plan, lr=0.02)],
    "muon": lambda model, plan: [mukron.Muon(model, plan, lr=0.005)],
}


@pytest.mark.parametrize("method", BOUNDED)
def test_bounded_steps_move_features_alike_in_training(method):
    """Nearly: what noise adds below the bound grows with the width."""
    measured = slopes_in_training(1024, BOUNDED[method])
    assert max(map(abs, measured.values())) < 0.2, measured


def test_noise_makes_plain_steps_of_soap_grow():
    measured = slopes_in_training(1024, lambda model, plan: [mukron.SOAP(model, plan, lr=0.001, trust=None)])
    assert min(measured.values()) > 0.25, measured


def as_at_first(groups):
    """With the law of the first step, (r_out / r_in)^1/2: both matrices have the width as their longest side."""
    return [{**group, "lr": group["lr"] * (max(group["params"][0].shape) / BASE) ** 0.5} for group in groups]


def unscaled(groups, eps):
    return [{**group, "eps": eps} for group in groups]


EPS = 1e-3  # as large as entries of gradients at the base width
ADAMS = {
    "torch": lambda model, plan: [torch.optim.AdamW(plan.param_groups("adamw", lr=1e-3, eps=EPS))],
    "fallback": lambda model, plan: [
        mukron.Muon(*(model, plan, 1e-6), exclude=("fc1", "fc2"), fallback=mukron.AdamStep(eps=EPS), fallback_lr=1e-3)
    ],
    "graft": lambda model, plan: [mukron.KFAC(model, plan, 1e-3, trust=mukron.Graft(mukron.AdamStep(eps=EPS)))],
}


@pytest.mark.parametrize("adam", ADAMS)
def test_a_large_eps_does_not_break_the_law(adam):
    measured = slopes(ADAMS[adam])
    assert max(map(abs, measured.values())) < 0.12, measured


# An eps as large as singular values of gradients, and as their squares.
LARGE_EPS = {
    "shampoo": (theirs, "Shampoo", "matrix_eps", 0.01),
    "muon": (torch.optim, "Muon", "eps", 1.0),
}


@needs_theirs
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("method", LARGE_EPS)
def test_eps_of_matrix_methods_follows_the_gradient(method):
    library, name, key, eps = LARGE_EPS[method]
    make = getattr(library, name)
    scaled = slopes(lambda _, plan: [make(plan.param_groups(method, lr=0.002, eps=eps)), adamw_beside(plan, method)])
    assert max(map(abs, scaled.values())) < 0.12, scaled
    constant = slopes(lambda _, plan: [make([{**group, key: eps} for group in plan.param_groups(method, lr=0.002)])])
    assert constant["fc1"] < -0.15, constant  # (r_out)^-1/2 is what its gradient shrinks by


def test_an_eps_that_is_not_scaled_breaks_the_law():
    """Gradients shrink like 1 / width, and the same eps becomes larger than they are."""
    for eps, low, high in ((EPS, -1.0, -0.4), (1e-12, -0.12, 0.12)):
        measured = slopes(
            lambda _, plan, eps=eps: [torch.optim.AdamW(unscaled(plan.param_groups("adamw", lr=1e-3), eps))]
        )
        assert all(low < slope < high for slope in measured.values()), measured


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_the_fallback_rule_takes_the_steps_of_torchs_adamw_with_groups(eps):
    """Same eps, learning rates and decay, at four times the base width."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(32).double())
    plans = [mukron.parametrize(model, mukron.base_shapes(Net, 8), decay="1/width") for model in models]
    left = ("first", "head")
    rule = mukron.AdamStep(eps=eps)
    ours = mukron.Muon(models[0], plans[0], lr=0.1, fallback=rule, fallback_lr=0.01, weight_decay=0.3, exclude=left)
    adamw = torch.optim.AdamW(plans[1].param_groups("adamw", lr=0.01, weight_decay=0.3, eps=eps))
    x = torch.randn(16, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for model, optimizer in zip(models, (ours, adamw), strict=True):
        model(x).square().mean().backward()
        optimizer.step()
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    for (name, a), b in pairs:
        if name != "hidden.weight":  # Muon's own
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


METHODS = {
    "kfac": mukron.KFAC,
    "foof": mukron.FOOF,
    "shampoo": mukron.Shampoo,
    "gauss-newton": mukron.GaussNewton,
    "muon": mukron.Muon,
    "soap": mukron.SOAP,
}
LAWS = {"constant": 0, "1/width": 1, "1/2": 0.5}


@pytest.mark.parametrize("decay", LAWS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("r", [1, 4])
def test_how_much_a_step_takes_off(method, decay, r):
    """A step with and one without weight decay differ by lr weight_decay r_in^-k W, k the law's exponent."""
    torch.manual_seed(0)
    start = Net(8 * r).double()
    mukron.parametrize(start, mukron.base_shapes(Net, 8), decay=decay)
    x = torch.randn(16, INPUTS, dtype=torch.float64)
    after, rates = [], {}
    for weight_decay in (0.0, 0.1):
        model = copy.deepcopy(start)
        plan = mukron.parametrize(model, mukron.base_shapes(Net, 8), decay=decay)
        optimizer = METHODS[method](model, plan, lr=0.1, weight_decay=weight_decay)
        F.cross_entropy(model(x), torch.arange(16) % 5).backward()
        optimizer.step()
        after.append(dict(model.named_parameters()))
        rates = {name: optimizer.rate(name) / entry.scale for name, entry in optimizer.entries.items()}
    for name, weight in start.named_parameters():
        r_in = r if name in ("hidden.weight", "head.weight") else 1
        expected = rates[name] * 0.1 * r_in ** -LAWS[decay] * weight
        torch.testing.assert_close(after[0][name] - after[1][name], expected, rtol=1e-7, atol=1e-12)


def test_decay_that_is_preconditioned_has_no_law():
    model = Net(32)
    plan = mukron.parametrize(model, mukron.base_shapes(Net, 8), decay="1/width")
    with pytest.raises(ValueError, match=r"decoupled=False: .* the plan has decay=1"):
        mukron.KFAC(model, plan, weight_decay=0.1, decoupled=False)
    optimizer = mukron.KFAC(model, plan, decoupled=False)  # no decay at all
    with pytest.raises(ValueError, match="decoupled=False"):
        optimizer.add_param_group({"params": [], "weight_decay": 0.1})
