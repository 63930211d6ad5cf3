"""Classes of optimizers that a plan takes: their eps, their weight decay, and their steps at the base width."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from mukron.params import ParametrizationError, base_shapes, parametrize
from networks import INPUTS, Net

BASE = 8
PAGE = Path(__file__).parents[2] / "docs/parametrization.md"
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)
OF_TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
METHODS = {  # whose law each of torch's follows, where it does not follow by itself
    "SGD": None,
    "ASGD": "sgd",
    "Adam": None,
    "AdamW": None,
    "Muon": None,
    "Rprop": "lion",
    **dict.fromkeys(("Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "SparseAdam"), "adamw"),
}
REFUSED = {
    "Adadelta": "Adadelta: its eps is also the length of its first steps",
    "Adafactor": "Adafactor: its eps is (None, 0.001). What an eps is multiplied by",
    "LBFGS": "LBFGS doesn't support per-parameter options",  # torch's own words
}
ACCEPTED = [name for name in OF_TORCH if name not in REFUSED]


def plan_of(width: int, factory=Net):
    torch.manual_seed(0)
    model = factory(width).double()
    return model, parametrize(model, base_shapes(factory, width=BASE))


def train(model, optimizer, steps, sparse=False):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X.double()), Y).backward()
        for p in model.parameters():
            p.grad = p.grad.to_sparse() if sparse else p.grad
        optimizer.step()


def test_every_class_of_torch_is_here():
    assert OF_TORCH.keys() <= METHODS.keys() | REFUSED.keys()
    assert not METHODS.keys() & REFUSED.keys()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ACCEPTED)
def test_at_the_base_width_steps_are_the_classes_own(name, decay):
    """Bit for bit, without an eps that is given: docs/migrating.md says so."""
    kind = OF_TORCH[name]
    (model, plan), (other, _) = plan_of(BASE), plan_of(BASE)
    options = {"weight_decay": decay} if decay or name in ("AdamW", "Muon") else {}
    if decay and name in ("Adam", "NAdam", "RAdam"):
        options["decoupled_weight_decay"] = True
    if decay and name in ("Adagrad", "Adamax", "RMSprop", "Rprop", "SparseAdam"):
        with pytest.raises(ParametrizationError, match=r"mixes weight decay into|has no weight decay"):
            plan.optimizer(kind, 0.05, method=METHODS[name], **options)
        return
    if not options.keys() <= inspect.signature(kind).parameters.keys():
        pytest.skip("torch has the option from 2.7 on")
    optimizer = plan.optimizer(kind, 0.05, method=METHODS[name], **options)
    trained = [other.first.weight, other.hidden.weight] if name == "Muon" else other.parameters()
    start = other.hidden.weight.detach().clone()
    own = kind(trained, lr=0.05, **options)
    train(model, optimizer, 8, sparse=name == "SparseAdam")
    train(other, own, 8, sparse=name == "SparseAdam")
    assert not torch.equal(other.hidden.weight, start)
    for (parameter, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), parameter


@pytest.mark.parametrize("name", REFUSED)
def test_classes_without_a_law(name):
    _model, plan = plan_of(BASE)
    for eps in ({}, {"eps": 1e-8}) if name.startswith("Ada") else ({},):
        with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
            plan.optimizer(OF_TORCH[name], 0.1, method="adamw" if eps or name != "LBFGS" else "sgd", **eps)


@pytest.mark.parametrize("name", [name for name in ACCEPTED if name not in ("SparseAdam", "Muon")])
def test_features_move_alike_at_every_width(name):
    """With the class's own eps, scaled; after the first five steps of RAdam, which are not normalized."""
    assert abs(slope(lambda plan: plan.optimizer(OF_TORCH[name], 0.01, method=METHODS[name]))) < 0.08


def test_features_do_not_move_alike_with_adadelta():
    """Why it is refused: neither with an eps that follows the width nor with one that does not."""
    for scheme in ("scaled", "same"):

        def make(plan, scheme=scheme):
            groups = plan.param_groups("adamw", lr=1.0, eps=1e-6)
            if scheme == "same":
                groups = [{**group, "eps": 1e-6} for group in groups]
            return torch.optim.Adadelta(groups)

        assert abs(slope(make)) > 0.2, scheme


def slope(make) -> float:
    """Of the change of the hidden layer's features over ten steps, against the width."""

    def factory(width):
        return nn.Sequential(
            nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5)
        )

    widths, changes = [32, 128, 512], []
    for width in widths:
        torch.manual_seed(0)
        model = factory(width)
        plan = parametrize(model, base_shapes(factory, width=widths[0]))
        optimizer, before = make(plan), model[:3](X).detach()
        for _ in range(10):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
        changes.append(float((model[:3](X).detach() - before).square().mean()) ** 0.5)
    return float(np.polyfit(np.log(widths), np.log(changes), 1)[0])


def test_the_eps_is_that_of_the_class_and_follows_the_width():
    class Later(torch.optim.Adagrad):
        """Hands its options on."""

        def __init__(self, params, lr, **options):
            super().__init__(params, lr, **options)

    _model, plan = plan_of(4 * BASE)
    for kind, own in ((torch.optim.Adagrad, 1e-10), (torch.optim.RMSprop, 1e-8), (Later, 1e-10)):
        for given in (None, 1e-3):
            options = {} if given is None else {"eps": given}
            groups = plan.optimizer(kind, 0.1, method="adamw", **options).param_groups
            eps = {group["role"]: group["eps"] for group in groups}
            base = own if given is None else given
            assert eps == pytest.approx(
                {"input": base / 4, "hidden": base / 4, "vector": base / 4, "output": base, "scalar": base}
            )
    with pytest.raises(ParametrizationError, match=r"eps=1e-08: Rprop takes no eps"):
        plan.optimizer(torch.optim.Rprop, 0.1, method="adamw", eps=1e-8)


def decouples(kind, options) -> bool:
    """Measured: without gradients, decoupled decay takes the same part off large and small weights."""
    weight = nn.Parameter(torch.tensor([[1.0, 1000.0], [1000.0, 1.0]], dtype=torch.float64))
    optimizer = kind([weight], lr=0.01, weight_decay=0.1, **options)
    for _ in range(12):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    left = weight.detach() / torch.tensor([[1.0, 1000.0], [1000.0, 1.0]])
    steps = 11 if kind.__name__ == "SOAP" else 12  # its first moves nothing
    return torch.allclose(left, torch.full_like(left, math.pow(1 - 0.001, steps)), rtol=1e-4)


def of_pytorch_optimizer(name):
    return getattr(pytest.importorskip("pytorch_optimizer"), name)


DECAYS = [  # class, method, the option that decouples weight decay
    *((name, "adamw", "decoupled_weight_decay") for name in ("Adam", "NAdam", "RAdam")),
    *((name, "adamw", None) for name in ("AdamW", "Adagrad", "Adamax", "RMSprop")),
    ("Muon", "muon", None),
    ("pytorch_optimizer.SOAP", "soap", None),
    *((f"pytorch_optimizer.{name}", "adamw", "weight_decouple") for name in ("AdaBelief", "ADOPT")),
    ("pytorch_optimizer.Lion", "lion", "weight_decouple"),
]


@pytest.mark.parametrize(
    ("name", "method", "flag", "option"),
    [(*of_class, option) for of_class in DECAYS for option in ("default", True, False)[: 3 if of_class[2] else 1]],
)
def test_weight_decay_is_taken_if_and_only_if_it_is_decoupled(name, method, flag, option):
    """What is known of each class, against what it does."""
    if "." in name:
        kind = of_pytorch_optimizer(name.rpartition(".")[2])
    elif name not in OF_TORCH:
        pytest.skip("torch has Muon from 2.9 on")
    else:
        kind = OF_TORCH[name]
    options = {} if option == "default" else {flag: option}
    if "." not in name and flag not in (None, *inspect.signature(kind).parameters):
        pytest.skip("torch has the option from 2.7 on")
    measured = decouples(kind, options)
    _model, plan = plan_of(4 * BASE)
    if measured:
        plan.optimizer(kind, 0.01, method=method, weight_decay=0.1, **options)
    else:
        way_out = "Use an optimizer that decouples it" if flag is None else f"Pass {flag}=True"
        with pytest.raises(ParametrizationError, match=f"mixes weight decay into its normalized gradient.*{way_out}"):
            plan.optimizer(kind, 0.01, method=method, weight_decay=0.1, **options)
    plan.optimizer(kind, 0.01, method=method, **options)


@pytest.mark.parametrize("width", [BASE, 4 * BASE])
@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam", "AdamW"])
def test_a_step_takes_the_same_part_off_at_every_width(name, width):
    model, plan = plan_of(width)
    options = {} if name == "AdamW" else {"decoupled_weight_decay": True}
    if options and "decoupled_weight_decay" not in inspect.signature(OF_TORCH[name]).parameters:
        pytest.skip("torch has the option from 2.7 on")
    methods = [None, "adam", "adamw"] if name in ("Adam", "AdamW") else ["adam", "adamw"]
    before = model.hidden.weight.detach().clone()
    for method in methods:
        optimizer = plan.optimizer(OF_TORCH[name], 0.01, method=method, weight_decay=0.1, **options)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    torch.testing.assert_close(model.hidden.weight.detach(), before * (1 - 0.001) ** len(methods))


def test_the_docs_say_what_coupled_decay_takes_off():
    """Of the hidden weight in one step, by groups that NAdam is given by hand."""

    def taken(width):
        moves = []
        for decay in (0.0, 0.1):
            torch.manual_seed(0)
            model = Net(width).double()
            plan = parametrize(model, base_shapes(Net, width=16))
            start = model.hidden.weight.detach().clone()
            train(model, torch.optim.NAdam(plan.param_groups("adamw", lr=0.01, weight_decay=decay)), 1)
            moves.append(model.hidden.weight.detach() - start)
        return 100 * float(((moves[0] - moves[1]) * start).sum() / start.square().sum())

    narrow, wide = taken(16), taken(256)
    said = f"one step of NAdam takes {narrow:.1f}% off a weight at width 16 and {wide:.1f}% at 256, instead of 0.1%"
    assert said in PAGE.read_text()


class Unknown(torch.optim.Adagrad):
    """Of somebody else: whether it decouples weight decay cannot be seen."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, lr, weight_decay=weight_decay)


def test_unknown_classes_are_asked_about():
    _model, plan = plan_of(4 * BASE)
    with pytest.raises(ParametrizationError, match=r"Unknown: it is not known .* say so, decoupled_weight_decay=True"):
        plan.optimizer(Unknown, 0.1, method="adamw", weight_decay=0.1)
    with pytest.raises(ParametrizationError, match="Unknown mixes weight decay"):
        plan.optimizer(Unknown, 0.1, method="adamw", weight_decay=0.1, decoupled_weight_decay=False)
    optimizer = plan.optimizer(Unknown, 0.1, method="adamw", weight_decay=0.1, decoupled_weight_decay=True)
    assert [g["lr_multiplier"] * g["weight_decay"] for g in optimizer.param_groups] == pytest.approx(
        [0.1] * len(optimizer.param_groups)
    )
    assert plan.optimizer(Unknown, 0.1, method="sgd", weight_decay=0.1)  # in proportion to the gradient


def test_an_option_that_a_class_does_not_have():
    _model, plan = plan_of(4 * BASE)
    with pytest.raises(ParametrizationError, match="RMSprop mixes weight decay"):
        plan.optimizer(torch.optim.RMSprop, 0.1, method="adamw", weight_decay=0.1, decoupled_weight_decay=True)
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        plan.optimizer(torch.optim.SGD, 0.1, weight_decay=0.1, decoupled_weight_decay=True)
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        plan.optimizer(torch.optim.AdamW, 0.1, weight_decay=0.1, decoupled_weight_decay=False)
    assert plan.optimizer(torch.optim.AdamW, 0.1, weight_decay=0.1, decoupled_weight_decay=True)
    for method in ("lion", "sgd"):
        with pytest.raises(ParametrizationError, match="Rprop has no weight decay; leave weight_decay out"):
            plan.optimizer(torch.optim.Rprop, 0.1, method=method, weight_decay=0.1)


def test_what_the_groups_say_counts():
    """pytorch_optimizer's Shampoo couples by default, and the groups for it say that it must not."""
    _model, plan = plan_of(4 * BASE)
    optimizer = plan.optimizer(of_pytorch_optimizer("Shampoo"), 0.1, method="shampoo", weight_decay=0.1)
    assert all(group["weight_decouple"] for group in optimizer.param_groups)
    assert {group["role"]: group["matrix_eps"] for group in optimizer.param_groups} == pytest.approx(
        {"input": 1e-6 / 4, "hidden": 1e-6}
    )
