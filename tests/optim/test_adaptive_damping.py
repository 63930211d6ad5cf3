"""Damping that adapts: its reduction ratio is 1 where the model is exact; the second evaluation leaves no trace."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from states import contents
from torch import nn
from torch.nn import functional as F
from transactions import MLP, base_shapes

import mukron
from mukron import FOOF, KFAC, Adaptive, Constant, Fixed, GaussNewton, GradientMomentum, Heuristic, Rescaled, Shampoo

METHODS = {
    "kfac": KFAC,
    "kfac-exact": lambda *args, **options: KFAC(*args, fisher="exact", **{"trust": None, **options}),
    "foof": lambda *args, **options: FOOF(*args, **{"trust": None, **options}),
    "gauss-newton": GaussNewton,
}
EXACT = {  # methods whose quadratic model is the loss itself for one linear layer and half the squared distance
    "kfac": lambda *args, **options: KFAC(*args, fisher="exact", likelihood="gaussian", **{"trust": None, **options}),
    "foof": lambda *args, **options: FOOF(*args, **{"trust": None, **options}),
}
NO_DAMPING = Adaptive(Rescaled(1e-11), every=1, lowest=1e-12)


def half_squares(f, y):
    return (f - y).square().sum(1).mean() / 2


def closure_of(optimizer, model, x, y, loss=F.cross_entropy):
    def closure():
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        return value

    return closure


def ratio_of(optimizer):
    return optimizer.param_groups[0]["adaptive"]["ratio"]


def number_of(optimizer):
    return optimizer.param_groups[0]["damping"]


def linear_problem():
    torch.manual_seed(0)
    return nn.Linear(5, 3, bias=False).double(), torch.randn(20, 5).double(), torch.randn(20, 3).double()


def digits_like(samples=24, classes=3):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(classes, (samples,), generator=generator)
    return x, y


def train(optimizer, model, steps, first=0):
    """Some steps, each on a batch of its own."""
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)
        optimizer.step(closure_of(optimizer, model, x, y))


# The ratio.


@pytest.mark.parametrize("lr", [1.0, 0.3, 0.01])
@pytest.mark.parametrize("method", EXACT)
def test_the_ratio_is_one_where_the_model_is_exact(method, lr):
    model, x, y = linear_problem()
    optimizer = EXACT[method](model, lr=lr, damping=NO_DAMPING)
    optimizer.step(closure_of(optimizer, model, x, y, half_squares))
    assert ratio_of(optimizer) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"trust": "spectral:0.01"},
        {"trust": "kl:1e-4"},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": GradientMomentum(0.5)},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled": False},
        {"memory": "sum", "inverse_every": 2},
        {"fused": True},
        {"maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", EXACT)
def test_the_ratio_stays_one_whatever_shortens_or_prolongs_the_step(method, options):
    """It is of the move alone, as long as that is: momentum, decay and trust do not spoil the prediction."""
    model, x, y = linear_problem()
    optimizer = EXACT[method](model, lr=0.3, damping=NO_DAMPING, **options)
    sign = -1 if optimizer.param_groups[0]["maximize"] else 1
    for _ in range(2):
        optimizer.step(closure_of(optimizer, model, x, y, lambda f, y: sign * half_squares(f, y)))
        assert ratio_of(optimizer) == pytest.approx(1, abs=1e-8)


def test_the_ratio_is_one_for_an_embedding_whose_tokens_are_shortened_one_by_one():
    torch.manual_seed(0)
    model = nn.Embedding(6, 3).double()
    tokens, y = torch.randint(6, (20,)), torch.randn(20, 3).double()
    optimizer = EXACT["kfac"](model, lr=0.5, damping=NO_DAMPING, trust="spectral:1", exclude=())
    before = model.weight.detach().clone()
    optimizer.step(closure_of(optimizer, model, tokens, y, half_squares))
    lengths = (model.weight - before).norm(dim=1)
    assert lengths.max() > 1.1 * lengths[lengths > 0].min()  # some were shortened, and some were not
    assert ratio_of(optimizer) == pytest.approx(1, abs=1e-8)


def test_gauss_newton_is_exact_where_all_errors_are_one():
    """Its matrix weighs outputs by their squared errors."""
    _, x, _ = linear_problem()
    model = nn.Linear(5, 1, bias=False).double()
    y = model(x).detach() + torch.randn(20, 1).double().sign()
    optimizer = GaussNewton(model, lr=0.3, damping=Adaptive(Rescaled(1e-7), every=1, lowest=1e-8), trust=None)
    optimizer.step(closure_of(optimizer, model, x, y, half_squares))
    assert ratio_of(optimizer) == pytest.approx(1, abs=1e-6)  # in sample space rounding is divided by the damping


def test_the_damping_is_part_of_the_model():
    """By hand: -eta <G, U> + eta^2 / 2 <U, G>, where the loss has the curvature without damping, which is smaller."""
    model, x, y = linear_problem()
    eta, rho = 0.8, 0.5
    W, A = model.weight.detach().clone(), x.T @ x / len(x)
    G = (x @ W.T - y).T @ x / len(x)
    U = G @ torch.linalg.inv(A + rho * A.trace() / 5 * torch.eye(5).double())
    change = -eta * (G * U).sum() + eta**2 / 2 * (U @ A * U).sum()
    optimizer = FOOF(model, lr=eta, damping=Adaptive(Rescaled(rho), every=1), trust=None)
    optimizer.step(closure_of(optimizer, model, x, y, half_squares))
    expected = float(change / (-(eta - eta**2 / 2) * (G * U).sum()))
    assert expected > 1.1
    assert ratio_of(optimizer) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_ratio_by_hand(method, plan):
    """Of a whole network with biases; the norm between its layers takes the fallback rule, and does not move."""
    torch.manual_seed(0)
    model = MLP(20).double()
    parametrization = mukron.parametrize(model, base_shapes("mlp")) if plan else None
    x, y = digits_like()
    optimizer = METHODS[method](model, parametrization, 0.2, damping=Adaptive(1.0, every=1), trust=None)
    before = copy.deepcopy(model)
    loss = float(optimizer.step(closure_of(optimizer, model, x.double(), y)).detach())
    predicted = 0.0
    with torch.no_grad():
        for name, old in before.named_parameters():
            if name.startswith("norm"):
                continue
            new, scale = model.get_parameter(name), optimizer.entries[name].scale
            U = (old - new) / (0.2 * scale)
            predicted += float(scale * (-0.2 + 0.2**2 / 2) * (U * new.grad).sum())
            old.copy_(new)
        change = float(F.cross_entropy(before(x.double()), y)) - loss
    if plan and method == "foof":
        assert max(entry.scale for entry in optimizer.entries.values()) == 4
    assert ratio_of(optimizer) == pytest.approx(change / predicted, rel=1e-6)


def test_a_change_below_the_rounding_of_the_loss_tests_nothing():
    model, x, y = linear_problem()
    optimizer = FOOF(model, lr=1.0, damping=NO_DAMPING, trust=None)
    for expected in (pytest.approx(1), None):  # the first step arrives at the optimum
        optimizer.step(closure_of(optimizer, model, x, y, half_squares))
        assert ratio_of(optimizer) == expected
    assert number_of(optimizer) == pytest.approx(0.95e-11)


# What it does to the damping.


@pytest.mark.parametrize("method", METHODS)
def test_the_damping_falls_where_the_model_is_good(method):
    torch.manual_seed(0)
    model, (x, y) = MLP(10), digits_like()
    optimizer = METHODS[method](model, lr=0.01, damping=Adaptive(1.0, every=2, decay=0.9), trust=None)
    calls = []
    for step in range(1, 7):
        closure = closure_of(optimizer, model, x, y)
        optimizer.step(lambda closure=closure, step=step: (calls.append(step), closure())[1])
        assert number_of(optimizer) == pytest.approx(0.9 ** (step // 2 * 2))
    assert calls == [1, 2, 2, 3, 4, 4, 5, 6, 6]  # tested at every second step


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        *(("kfac", rule) for rule in (Rescaled(1e-3), Heuristic(1e-3), Constant(1e-3))),
        *((method, rule) for method in ("foof", "gauss-newton") for rule in (Rescaled(1e-3), Constant(1e-3))),
    ],
    ids=str,
)
def test_the_damping_rises_where_the_learning_rate_is_too_large(method, rule):
    torch.manual_seed(0)
    model, (x, y) = MLP(10).double(), digits_like()
    optimizer = METHODS[method](model, lr=1.5, damping=Adaptive(rule, every=1, decay=0.5), trust=None)
    scale = 300 if method == "foof" else 1  # no reduction is that large: it is no part of the curvature, and adds to lr
    closure = closure_of(optimizer, model, x.double(), y, lambda f, y: scale * F.cross_entropy(f, y))
    optimizer.step(closure)
    assert ratio_of(optimizer) < 1 / 4
    assert number_of(optimizer) == 2e-3
    assert Rescaled.of_group(optimizer.param_groups[0]).rho == 2e-3


def test_a_loss_that_is_not_finite_after_the_step_raises_the_damping():
    model, x, y = linear_problem()
    calls = []

    def loss(f, y):
        calls.append(0)
        return half_squares(f, y) * (math.inf if len(calls) > 1 else 1.0)

    optimizer = FOOF(model, lr=0.1, damping=Adaptive(Rescaled(1.0), every=1, decay=0.5), trust=None)
    optimizer.step(closure_of(optimizer, model, x, y, loss))
    assert (optimizer.steps, optimizer.skipped, number_of(optimizer)) == (1, 0, 2.0)


@pytest.mark.parametrize(("lr", "bound"), [(0.001, 0.7), (1.5, 1.3)])
def test_bounds_hold(lr, bound):
    torch.manual_seed(0)
    model, (x, y) = MLP(10), digits_like()
    optimizer = KFAC(
        model, lr=lr, damping=Adaptive(Rescaled(1.0), every=1, decay=0.8, lowest=0.7, highest=1.3), trust=None
    )
    numbers = []
    for _ in range(4):
        optimizer.step(closure_of(optimizer, model, x, y))
        numbers.append(number_of(optimizer))
    assert numbers[-1] == bound
    assert all(0.7 <= number <= 1.3 for number in numbers)


def test_a_scheduler_may_move_the_number():
    model, x, y = linear_problem()
    optimizer = FOOF(model, lr=0.01, damping=Adaptive(Rescaled(1.0, floor=0.5), every=1, decay=0.5), trust=None)
    optimizer.param_groups[0]["damping"] = 8.0
    optimizer.step(closure_of(optimizer, model, x, y, half_squares))
    assert number_of(optimizer) == 4.0
    assert optimizer.rule_of(optimizer.layers[""], "weight") == Rescaled(4.0, floor=0.5)
    optimizer.param_groups[0]["damping"] = Constant(6.0)
    optimizer.step(closure_of(optimizer, model, x, y, half_squares))
    assert number_of(optimizer) == Constant(3.0)


def test_groups_adapt_each_by_its_own_schedule():
    torch.manual_seed(0)
    model, (x, y) = MLP(10), digits_like()
    groups = [
        {"params": [*model.first.parameters(), *model.norm.parameters()]},
        {"params": model.hidden.parameters(), "damping": Adaptive(Rescaled(1.0), every=2, decay=0.5)},
        {"params": model.head.parameters(), "damping": Rescaled(3.0)},
    ]
    optimizer = KFAC(model, lr=0.01, damping=Adaptive(Rescaled(2.0), every=1, decay=0.5), params=groups, trust=None)
    for expected in ([1.0, 1.0, 3.0], [0.5, 0.25, 3.0]):
        optimizer.step(closure_of(optimizer, model, x, y))
        assert [group["damping"] for group in optimizer.param_groups] == expected
    assert "adaptive damping of group 1: 0.25 now, last reduction ratio" in str(optimizer.plan())


def test_under_a_plan_one_number_adapts_and_every_layer_keeps_its_multiplier():
    torch.manual_seed(0)
    model, (x, y) = MLP(20), digits_like()
    plan = mukron.parametrize(model, base_shapes("mlp"))
    optimizer = KFAC(model, plan, 0.01, damping=Adaptive(Fixed(a=1.0, b=0.1), every=1, decay=0.5), trust=None)
    seen = []
    optimizer.watch(lambda layer, block, factors, rho: seen.append((layer, {k: float(v[0]) for k, v in rho.items()})))
    for _ in range(3):
        optimizer.step(closure_of(optimizer, model, x, y))
    for step, number in enumerate((1.0, 0.5, 0.25)):
        rho = dict(seen[3 * step : 3 * step + 3])
        assert rho["hidden"] == pytest.approx({"A": 4 * number, "B": 0.1 / 4 * number})
        assert rho["head"] == pytest.approx({"A": 4 * number, "B": 0.1 * number})


def test_the_plan_shows_the_damping():
    torch.manual_seed(0)
    model, (x, y) = MLP(10), digits_like()
    optimizer = KFAC(model, lr=0.01, damping=Adaptive(1.0, every=1), trust=None)
    assert "adaptive damping: 1 now" in str(optimizer.plan())
    optimizer.step(closure_of(optimizer, model, x, y))
    assert "adaptive damping: 0.95 now, last reduction ratio" in str(optimizer.plan())
    assert "adaptive" not in str(KFAC(MLP(10), lr=0.01, trust=None).plan())


def test_nothing_is_tested_before_preconditioning_starts():
    torch.manual_seed(0)
    model = MLP(10)
    optimizer = KFAC(model, lr=0.01, damping=Adaptive(1.0, every=1), start=2, trust=None)
    for expected in (1.0, 1.0, 0.95):
        train(optimizer, model, 1)
        assert number_of(optimizer) == expected


# No trace.


class Noisy(nn.Module):
    """With dropout, which draws, and BatchNorm, which remembers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(6, 30), nn.BatchNorm1d(30), nn.Dropout(0.5)
        self.head = nn.Linear(30, 3)

    def forward(self, x):
        return self.head(self.dropout(torch.relu(self.norm(self.first(x)))))


CASES = [
    ("kfac", {}),
    ("kfac", {"fused": True}),
    ("kfac", {"momentum": 0.9, "weight_decay": 0.01, "trust": "spectral:0.1"}),
    ("kfac", {"memory": "ema:0.9", "factor_every": 2, "inverse_every": 2, "fallback": "adamw"}),
    ("kfac", {"fisher": "empirical", "momentum": GradientMomentum(0.9), "trust": "kl:1e-3"}),
    ("foof", {"fallback": "adamw", "fused": True}),
    ("gauss-newton", {"momentum": 0.9}),
]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("method", "options"), CASES, ids=str)
def test_the_second_evaluation_leaves_no_trace(method, options, set_to_none):
    """With bounds that hold the number where it is, steps are those of the plain rule, bit for bit."""
    found = []
    for damping in (Rescaled(1.0), Adaptive(Rescaled(1.0), every=1, lowest=1.0, highest=1.0)):
        torch.manual_seed(0)
        model = Noisy()
        optimizer = METHODS[method](model, lr=0.05, damping=damping, **{"trust": None, **options})
        calls = 0
        for _ in range(5):
            x, y = torch.randn(12, 6), torch.randint(3, (12,))

            def closure(optimizer=optimizer, model=model, x=x, y=y):
                nonlocal calls
                calls += 1
                optimizer.zero_grad(set_to_none)
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group.pop("adaptive")
        found.append((calls, [model.state_dict(), gradients, state, torch.get_rng_state()]))
    (calls, plain), (calls_of_adaptive, adaptive) = found
    assert (calls, calls_of_adaptive) == (5, 10)
    assert_same(plain, adaptive)


def assert_same(a, b, where=""):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same(left, right, f"{where}/{number}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def test_both_evaluations_see_the_same_function():
    """Dropout drops the same units: with a step of (nearly) no length the loss is the same."""
    torch.manual_seed(0)
    model, (x, y) = Noisy(), digits_like()
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    optimizer = FOOF(model, lr=1e-4, damping=Adaptive(1.0, every=1), trust=None)
    optimizer.step(closure)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert ratio_of(optimizer) == pytest.approx(1, rel=0.1)


def test_draws_of_the_second_evaluation_alone_are_undone():
    model, x, y = linear_problem()
    optimizer = FOOF(model, lr=0.1, damping=Adaptive(1.0, every=1), trust=None)
    states = []

    def closure():
        torch.rand(len(states))
        states.append(torch.get_rng_state())
        return closure_of(optimizer, model, x, y, half_squares)()

    optimizer.step(closure)
    assert not torch.equal(*states)
    assert torch.equal(torch.get_rng_state(), states[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_both_evaluations_drop_the_same_units():
    torch.manual_seed(0)
    model, (x, y) = Noisy().cuda(), digits_like()
    optimizer = FOOF(model, lr=1e-4, damping=Adaptive(1.0, every=1), trust=None)
    states = []

    def closure():
        loss = closure_of(optimizer, model, x.cuda(), y.cuda())()
        states.append((torch.cuda.get_rng_state(), float(loss.detach())))
        return loss

    optimizer.step(closure)
    (state, first), (_, second) = states
    assert first == pytest.approx(second, rel=1e-3)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_an_error_in_the_second_evaluation_changes_nothing():
    torch.manual_seed(0)
    model = Noisy()
    optimizer = KFAC(model, lr=0.05, damping=Adaptive(1.0, every=1), trust=None)
    train(optimizer, model, 2)
    x, y = digits_like()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    buffers, calls = {}, []  # the first evaluation changes the statistics of BatchNorm

    def closure():
        calls.append(0)
        if len(calls) == 2:
            model(x)
            raise KeyError("second")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        buffers.update({name: buffer.clone() for name, buffer in model.named_buffers()})
        return loss

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert_same({**before[0], **buffers}, model.state_dict())
    assert_same(before[1], optimizer.state_dict())
    assert not optimizer.capture.paused


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_skipped_step_leaves_the_damping(method, every):
    torch.manual_seed(0)
    model, (x, y) = MLP(10), digits_like()
    optimizer = METHODS[method](model, lr=0.01, damping=Adaptive(1.0, every=every), trust=None)
    train(optimizer, model, 2)
    before = [copy.deepcopy(model.state_dict()), contents(optimizer)]
    optimizer.step(closure_of(optimizer, model, x * math.nan, y))
    assert optimizer.skipped == 1
    before[1]["mukron"]["skipped"] = 1
    assert_same(before, [model.state_dict(), contents(optimizer)])
    train(optimizer, model, 1)
    assert number_of(optimizer) == pytest.approx(0.95**3)


@pytest.mark.parametrize("split", [2, 3, 4])
@pytest.mark.parametrize(("method", "options"), [("kfac", {"momentum": 0.9}), ("foof", {}), ("gauss-newton", {})])
def test_resuming_is_bit_for_bit(method, options, split):
    """In the middle between two tests, and at one."""

    def built():
        torch.manual_seed(0)
        model = Noisy()
        return model, METHODS[method](
            model, lr=0.1, damping=Adaptive(1.0, every=3, decay=0.8), **{"trust": None, **options}
        )

    model, optimizer = built()
    train(optimizer, model, split)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], file)
    train(optimizer, model, 5, first=split)
    resumed, its_optimizer = built()
    weights, state, random = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed.load_state_dict(weights)
    its_optimizer.load_state_dict(state)
    torch.set_rng_state(random)
    train(its_optimizer, resumed, 5, first=split)
    assert number_of(optimizer) != 1
    assert_same([model.state_dict(), optimizer.state_dict()], [resumed.state_dict(), its_optimizer.state_dict()])


def test_a_copy_goes_on_by_itself():
    torch.manual_seed(0)
    model = MLP(10)
    optimizer = KFAC(model, lr=0.01, damping=Adaptive(1.0, every=2), trust=None)
    train(optimizer, model, 3)
    other = copy.deepcopy(optimizer)
    for one in (optimizer, other):
        train(one, one.model, 3, first=3)
    assert_same([model.state_dict(), optimizer.state_dict()], [other.model.state_dict(), other.state_dict()])


def test_a_state_from_before_there_was_adaptive_damping_is_loaded():
    torch.manual_seed(0)
    model = MLP(10)
    optimizer = KFAC(model, lr=0.01, trust=None)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["adaptive"]
    optimizer.load_state_dict(state)
    train(optimizer, model, 1)
    assert optimizer.steps == 1
    assert "adaptive" not in str(optimizer.plan())


# What is refused.


def test_a_step_without_a_closure_says_what_to_pass():
    model, x, y = linear_problem()
    optimizer = FOOF(model, lr=0.1, damping=Adaptive(1.0), trust=None)
    half_squares(model(x), y).backward()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"pass a closure, optimizer\.step\(closure\)"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.steps == 0


def test_a_closure_that_returns_no_loss_is_refused():
    model, x, y = linear_problem()
    optimizer = FOOF(model, lr=0.1, damping=Adaptive(1.0, every=1), trust=None)
    with pytest.raises(TypeError, match="the closure must return the loss, one number; got None"):
        optimizer.step(lambda: half_squares(model(x), y).backward())
    assert optimizer.steps == 0


def test_methods_and_trusts_that_are_no_quadratic_model_are_refused():
    with pytest.raises(ValueError, match=r"Shampoo divides gradients by a root .* KFAC, FOOF and GaussNewton alone"):
        Shampoo(nn.Linear(3, 2), damping=Adaptive(1e-3), trust=None)
    for trust in ("graft:adam", "rms:0.2"):
        with pytest.raises(ValueError, match=f'length of a step with trust="{trust}"'):
            KFAC(nn.Linear(3, 2), damping=Adaptive(1.0), trust=trust)
    with pytest.raises(ValueError, match="needs lr below 2, got 2"):
        KFAC(nn.Linear(3, 2), lr=2.0, damping=Adaptive(1.0), trust=None)


def test_several_processes_and_opposite_groups_are_refused():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "maximize": True}]
    optimizer = FOOF(model, damping=Adaptive(1.0), params=groups, trust=None)
    with pytest.raises(ValueError, match="some groups maximize"):
        optimizer.step(lambda: 0.0)
    optimizer.exchange = object()
    with pytest.raises(ValueError, match="across processes"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every counts steps"),
        ({"decay": 1.0}, "decay must lie between 0 and 1"),
        ({"lowest": 0.0}, r"between lowest=0 \(above 0\)"),
        ({"lowest": 2.0}, "starts at 1, which must lie between lowest=2"),
        ({"highest": 0.5}, "highest=0.5"),
    ],
)
def test_wrong_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Adaptive(Rescaled(1.0), **arguments)


def test_what_is_no_rule_is_refused():
    with pytest.raises(TypeError, match="takes a damping rule or a number"):
        Adaptive("rescaled")
