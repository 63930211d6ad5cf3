"""A step is committed whole or not at all, whatever the options.

If a number is not finite, nothing is changed but the counter ``skipped``: not the curvature memory, the operators,
the peaks, momentum, the moments of a fallback or a graft, the weights, nor the generator of Monte-Carlo targets. A step
whose factorization is rescued counts once.

Two designs cross this promise with the options. In the first, what keeps a state of its own (fallback, graft, momentum)
is crossed in full for every method; the gradient of one bias is bad, so that all other numbers are finite and could be
kept by mistake. In the second, every pair of values of all options occurs, the cause of the bad step and its place
among them; ``transactions.EXCLUDED_PAIRS`` says which pairs cannot be.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import warnings

import pytest
import torch
from transactions import (
    CAUSES,
    EXCLUDED_PAIRS,
    METHODS,
    MOMENTUM,
    OPTIONS,
    TRUST,
    WIDTH,
    backward,
    bad_step,
    batches,
    build,
    counters,
    covering,
    differences,
    excluded,
    moments,
    name_of,
    snapshot,
    train,
)

import mukron

# Bad numbers are written into gradients here, which fused=True warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradients were changed between the backward pass and step")

STATEFUL = [
    (method, {"cause": "nan-bias-gradient", "fallback": fallback, "trust": trust, "momentum": momentum})
    for method in METHODS
    for fallback, trust, momentum in itertools.product(("sgd", "adamw"), TRUST, MOMENTUM)
    if trust in OPTIONS[method].get("trust", (None,))
]
COVERING = {method: covering(method) for method in METHODS}
PAIRWISE = [(method, case) for method, (cases, _) in COVERING.items() for case in cases]


def ids(cases):
    return [name_of(method, case) for method, case in cases]


def check_skipped(method, case, then=2, **options):
    """The three parts of the promise, for one bad batch; then: good batches after it."""
    after, cause = case.get("after", 2), case["cause"]
    *good, bad = batches(case, after + then + 1)
    model, optimizer = build(method, case, **options)
    twin, twin_optimizer = build(method, case, **options)  # which never sees the bad batch
    for data in good[:after]:
        train(model, optimizer, data)
        train(twin, twin_optimizer, data)
    before = snapshot(model, optimizer)

    bad_step(method, model, optimizer, bad, cause)
    counts = [(optimizer.skipped, optimizer.steps)]
    changed = differences(before, snapshot(model, optimizer))
    moved = []
    for data in good[after:]:
        weights = copy.deepcopy(model.state_dict())
        train(model, optimizer, data)
        train(twin, twin_optimizer, data)
        counts.append((optimizer.skipped, optimizer.steps))
        moved.append(differences(weights, model.state_dict()) != [])
    found = {
        "changed by the skipped step": changed,
        "(skipped, steps) after it and each good batch": counts,
        "good batches move the weights": moved,
        "different from training without the bad batch": differences(
            snapshot(model, optimizer), snapshot(twin, twin_optimizer)
        ),
    }
    assert found == {
        "changed by the skipped step": [],
        "(skipped, steps) after it and each good batch": [(1, after + count) for count in range(then + 1)],
        "good batches move the weights": [True] * then,
        "different from training without the bad batch": [],
    }


@pytest.mark.parametrize(("method", "case"), STATEFUL, ids=ids(STATEFUL))
def test_skipped_step_with_every_fallback_trust_and_momentum(method, case):
    memory = {"memory": "ema"} if "memory" in OPTIONS[method] else {}
    check_skipped(method, {**case, **memory, "after": 1}, then=1)


@pytest.mark.parametrize(("method", "case"), PAIRWISE, ids=ids(PAIRWISE))
def test_skipped_step_with_every_pair_of_options(method, case):
    check_skipped(method, case)


@pytest.mark.parametrize("method", METHODS)
def test_design_covers_every_pair(method):
    cases, impossible = COVERING[method]
    assert not any(excluded(method, case) for case in cases)
    seen = {pair for case in cases for pair in itertools.combinations(case.items(), 2)}
    space = OPTIONS[method]
    wanted = {((a, x), (b, y)) for a, b in itertools.combinations(space, 2) for x in space[a] for y in space[b]}
    assert wanted - seen == set(impossible) == set(EXCLUDED_PAIRS)


@pytest.mark.parametrize("method", ["kfac", "foof", "shampoo"])
def test_fused_forms_no_gradient_of_the_middle_layer(method):
    """Otherwise the cases with ``fused`` would show nothing."""
    model, optimizer = build(method, {"fused": True})
    first, second = batches({}, 2)
    train(model, optimizer, first)
    optimizer.zero_grad()
    backward(model, second)
    assert model.hidden.weight.shape == (WIDTH, WIDTH)
    assert model.hidden.weight.grad is None


# Settings as values: the same promise, and the same numbers as the short names.

TYPED = {
    "kfac,momentum=HeavyBall": ("kfac", {"momentum": 0.9}, lambda: {"momentum": mukron.HeavyBall(0.9)}),
    "kfac,momentum=HeavyBall(nesterov)": (
        "kfac",
        {"momentum": 0.9, "nesterov": True},
        lambda: {"momentum": mukron.HeavyBall(0.9, nesterov=True)},
    ),
    "shampoo,momentum=HeavyBall": ("shampoo", {"momentum": 0.9}, lambda: {"momentum": mukron.HeavyBall(0.9)}),
    "kfac,fallback=AdamStep": ("kfac", {"fallback": "adamw"}, lambda: {"fallback": mukron.AdamStep()}),
    "kfac,fallback=SGDStep": ("kfac", {"fallback": "sgd"}, lambda: {"fallback": mukron.SGDStep()}),
    "shampoo,graft=AdamStep": ("shampoo", {"trust": "graft:adam"}, lambda: {"trust": mukron.Graft()}),
    "shampoo,graft=SGDStep": ("shampoo", {"trust": "graft:sgd"}, lambda: {"trust": mukron.Graft("sgd")}),
    "gauss-newton,graft=AdamStep": ("gauss-newton", {"trust": "graft:adam"}, lambda: {"trust": mukron.Graft()}),
    "kfac,fisher=MonteCarlo": ("kfac", {"fisher": "mc"}, lambda: {"fisher": mukron.MonteCarlo(draws=1)}),
    "kfac,fisher=Empirical": ("kfac", {"fisher": "empirical"}, lambda: {"fisher": mukron.Empirical(reduction="mean")}),
    "kfac,fisher=Exact": ("kfac", {"fisher": "exact"}, lambda: {"fisher": mukron.Exact()}),
    "kfac,solver=Cholesky": ("kfac", {"solver": "cholesky"}, lambda: {"solver": mukron.Cholesky()}),
    "foof,solver=Eigh": ("foof", {"solver": "eigh"}, lambda: {"solver": mukron.Eigh()}),
    "kfac,solver=Newton": ("kfac", {"solver": "newton"}, lambda: {"solver": mukron.Newton()}),
    "shampoo,solver=Eigh": ("shampoo", {"solver": "eigh"}, lambda: {"solver": mukron.Eigh()}),
    "shampoo,solver=Tracked": ("shampoo", {"solver": "tracked"}, lambda: {"solver": mukron.Tracked(tolerance=0.02)}),
}


@pytest.mark.parametrize("name", TYPED)
def test_skipped_step_with_settings_as_values(name):
    method, short, make = TYPED[name]
    check_skipped(method, {"cause": "nan-input"}, **make())
    pairs = [build(method, {}, **options) for options in (short, make())]
    for data in batches({}, 3):
        for model, optimizer in pairs:
            train(model, optimizer, data)
    (model, _), (other, _) = pairs
    assert not differences(model.state_dict(), other.state_dict())


def test_skipped_step_with_several_draws():
    check_skipped("kfac", {"cause": "nan-input"}, fisher=mukron.MonteCarlo(draws=3))


# Saving, copying, closures, accumulation, and many bad batches in a row.

FULL = {
    "kfac": {"memory": "ema", "solver": "cholesky", "fisher": "mc", "every": "1/2"},
    "foof": {"memory": "window", "solver": "cholesky", "every": "2/2"},
    "shampoo": {"memory": "sum", "solver": "tracked"},
    "soap": {"memory": "ema", "solver": "qr", "every": "1/2"},
    "muon": {},
    "gauss-newton": {},
}
FULL = {
    method: {**case, "fallback": "adamw", "trust": "graft:adam", "momentum": "heavy-ball"}
    for method, case in FULL.items()
}


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def trained(method, steps=2):
    """Two equal runs with much state, after some steps."""
    runs = [build(method, FULL[method]) for _ in range(2)]
    for data in batches({}, steps):
        for run in runs:
            train(*run, data)
    return runs


def assert_same_training(run, other, seed=1):
    for data in batches({}, 3, seed):
        train(*run, data)
        train(*other, data)
    assert not differences(snapshot(*run), snapshot(*other))


@pytest.mark.parametrize("cause", ["nan-input", "nan-bias-gradient"])
def test_state_saved_after_a_skipped_step_resumes_bit_for_bit(method, cause):
    (model, optimizer), clean = trained(method)
    bad_step(method, model, optimizer, batches({}, 1, seed=2)[0], cause)
    fresh, fresh_optimizer = build(method, FULL[method])
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert fresh_optimizer.skipped == 1
    assert not differences(snapshot(model, optimizer), snapshot(fresh, fresh_optimizer))
    assert_same_training((fresh, fresh_optimizer), clean)


@pytest.mark.parametrize("cause", ["nan-input", "nan-bias-gradient"])
def test_copy_made_after_a_skipped_step_continues_bit_for_bit(method, cause):
    run, clean = trained(method)
    bad_step(method, *run, batches({}, 1, seed=2)[0], cause)
    copied = copy.deepcopy(run)
    assert copied[1].skipped == 1
    assert not differences(snapshot(*run), snapshot(*copied))
    assert_same_training(copied, clean)


def test_skipped_step_holds_no_memory(method):
    """What it tried, a second set of operators and statistics, is let go of."""
    (model, optimizer), _ = trained(method)
    optimizer.zero_grad()
    before = len(pickle.dumps(optimizer))
    bad_step(method, model, optimizer, batches({}, 1, seed=2)[0], "nan-bias-gradient")
    optimizer.zero_grad()
    assert optimizer.skipped == 1
    assert abs(len(pickle.dumps(optimizer)) - before) < 0.01 * before


def test_skipped_step_by_a_closure(method):
    (model, optimizer), clean = trained(method)
    before = snapshot(model, optimizer)
    good, bad = batches({}, 2, seed=2)
    bad.x[0, 1] = float("nan")

    def closure_of(data):
        def closure():
            optimizer.zero_grad()
            return backward(model, data)

        return closure

    assert torch.isnan(optimizer.step(closure_of(bad)))
    assert (optimizer.skipped, optimizer.steps) == (1, 2)
    assert not differences(before, snapshot(model, optimizer))
    assert torch.isfinite(optimizer.step(closure_of(good)))
    assert (optimizer.skipped, optimizer.steps) == (1, 3)
    train(*clean, good)
    assert_same_training((model, optimizer), clean)


@pytest.mark.parametrize("bad", [0, 1])
def test_one_bad_micro_batch_skips_the_whole_step(method, bad):
    (model, optimizer), clean = trained(method)
    before = snapshot(model, optimizer)
    parts = batches({}, 2, seed=2)
    parts[bad].x[0, 1] = float("nan")
    optimizer.zero_grad()
    for part in parts:
        backward(model, part, 0.5)
    optimizer.step()
    assert (optimizer.skipped, optimizer.steps) == (1, 2)
    assert not differences(before, snapshot(model, optimizer))
    for run in ((model, optimizer), clean):
        run[1].zero_grad()
        for part in batches({}, 2, seed=3):
            backward(run[0], part, 0.5)
        run[1].step()
    assert (optimizer.skipped, optimizer.steps) == (1, 3)
    assert_same_training((model, optimizer), clean)


@pytest.mark.parametrize("cause", ["overflow", "nan-gain-gradient"])
def test_many_bad_batches_in_a_row_warn_once_and_change_nothing(method, cause):
    run, clean = trained(method)
    before = snapshot(*run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, data in enumerate(batches({}, 12, seed=2), start=1):
            bad_step(method, *run, data, cause)
            assert len(caught) == (number >= 10)
    assert caught[0].category is RuntimeWarning
    assert re.search("10 steps in a row were skipped.*(lower the learning rate|check the data)", str(caught[0].message))
    assert (run[1].skipped, run[1].steps) == (12, 2)
    assert not differences(before, snapshot(*run))
    assert_same_training(run, clean)


def test_different_causes_one_after_the_other(method):
    """Bad and good batches take turns, and every good one counts as if the others had not been."""
    run, clean = trained(method)
    good = batches({}, len(CAUSES), seed=2)
    for skipped, (cause, data) in enumerate(zip(CAUSES, good, strict=True), start=1):
        before = snapshot(*run)
        bad_step(method, *run, data, cause)  # "overflow" comes after four steps, at a refresh
        assert run[1].skipped == skipped, cause
        assert not differences(before, snapshot(*run)), cause
        train(*run, data)
        train(*clean, data)
    assert_same_training(run, clean, seed=3)


# Numbers that leave the finite ones late in a step, after all that came before was sound.


@pytest.mark.parametrize("momentum", ["none", "heavy-ball", "nesterov", "gradient"])
@pytest.mark.parametrize("method", ["kfac", "foof", "gauss-newton"])
def test_direction_that_overflows_changes_nothing(method, momentum):
    """Gradients are finite, factors are tiny and finite, but their inverse times the gradient is not."""
    case = {"fallback": "adamw", "momentum": momentum}
    if method != "gauss-newton":
        case["memory"] = "ema"
    run, clean = build(method, case), build(method, case)
    model, optimizer = run
    before = snapshot(*run)
    data, good = batches({}, 2)
    backward(model, data._replace(x=data.x * 1e-16))
    model.first.weight.grad *= 1e33  # at the first step: later ones remember the size of earlier factors
    assert all(float(p.grad.norm()) < 1e19 for p in model.parameters())  # their squares are finite too
    optimizer.step()
    assert (optimizer.skipped, optimizer.steps) == (1, 0)
    assert not differences(before, snapshot(*run))
    train(*run, good)
    train(*clean, good)
    assert_same_training(run, clean)


@pytest.mark.parametrize("momentum", ["none", "heavy-ball", "nesterov", "gradient"])
def test_weights_that_would_overflow_are_not_written(method, momentum):
    """Gradients, factors and directions are finite, but the learning rate times a direction is not."""
    case = {"momentum": momentum, "fallback": "sgd"}
    run, clean = build(method, case), build(method, case)
    model, optimizer = run
    first, data = batches({}, 2)
    train(*run, first)
    train(*clean, first)
    before = snapshot(*run)
    optimizer.zero_grad()
    backward(model, data)
    model.norm.weight.grad *= 1e10
    for group in optimizer.param_groups:
        group["lr"] = 1e35
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    assert (optimizer.skipped, optimizer.steps) == (1, 1)
    assert not differences(before, snapshot(*run))
    assert_same_training(run, clean)


# Factorizations that fail. A rescued step is a step like any other.


class Failing:
    """A factorization of torch's that fails at its first call ("once"), for all float32 matrices, or always."""

    def __init__(self, monkeypatch, name, how):
        self.name, self.how, self.failures = name, how, 0
        self.real = getattr(torch.linalg, name)
        monkeypatch.setattr(torch.linalg, name, self)

    def __call__(self, M, *arguments, **options):
        fails = {"once": self.failures == 0, "float32": M.dtype == torch.float32, "always": True}[self.how]
        if not fails:
            return self.real(M, *arguments, **options)
        self.failures += 1
        if self.name == "eigh":
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        lower, info = self.real(M, *arguments, **options)
        return torch.full_like(lower, float("nan")), torch.ones_like(info)


HOW = ("once", "float32")
FACTORIZATIONS = {
    "kfac,cholesky": ("kfac", {"solver": "cholesky"}, "cholesky_ex"),
    "kfac,ema,cholesky": ("kfac", {"solver": "cholesky", "memory": "ema"}, "cholesky_ex"),
    "kfac,eigh": ("kfac", {"solver": "eigh"}, "eigh"),
    "foof,cholesky": ("foof", {"solver": "cholesky"}, "cholesky_ex"),
    "shampoo,eigh": ("shampoo", {"solver": "eigh"}, "eigh"),
    "shampoo,tracked": ("shampoo", {"solver": "tracked", "memory": "batch"}, "eigh"),
    "gauss-newton": ("gauss-newton", {}, "cholesky_ex"),
}
RESCUED = [  # momentum without a graft: test_momentum_is_applied_once_in_a_rescued_step
    *((*each, "adamw", "graft:adam", momentum) for *each, momentum in itertools.product(FACTORIZATIONS, HOW, MOMENTUM)),
    *((factorization, "once", "adamw", None, "heavy-ball") for factorization in FACTORIZATIONS),
    *((factorization, "float32", "sgd", "graft:adam", "heavy-ball") for factorization in FACTORIZATIONS),
]


@pytest.fixture
def rescued(monkeypatch):
    """Runs one step in which a factorization fails; returns what was warned of."""

    def run(model, optimizer, data, name, how):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            failing = Failing(patch, name, how)
            train(model, optimizer, data)
        assert failing.failures, "nothing failed: this case shows nothing"
        return caught

    return run


@pytest.mark.parametrize(
    ("factorization", "how", "fallback", "trust", "momentum"),
    RESCUED,
    ids=[f"{f},{how},fallback={fb},trust={g},momentum={m}" for f, how, fb, g, m in RESCUED],
)
def test_rescued_step_counts_once(rescued, factorization, how, fallback, trust, momentum):
    """Beside the same step without a failure: the same counts and moments, and the same weights at the same damping."""
    method, case, name = FACTORIZATIONS[factorization]
    case = {**case, "fallback": fallback, "trust": trust, "momentum": momentum}
    first, second, third = batches(case, 3)
    runs = [build(method, case) for _ in range(2)]
    for run in runs:
        train(*run, first)
    before = copy.deepcopy(runs[0][0].state_dict())
    caught = rescued(*runs[0], second, name, how)
    train(*runs[1], second)
    (model, optimizer), (clean, clean_optimizer) = runs
    assert (optimizer.skipped, optimizer.steps) == (0, 2)

    assert counters(optimizer) == counters(clean_optimizer) != {}
    assert moments(optimizer), "this case shows nothing"
    assert not differences(moments(optimizer), moments(clean_optimizer))
    assert torch.equal(model.norm.weight, clean.norm.weight), "the fallback's step does not depend on a factorization"
    if not any("damping" in str(warning.message) for warning in caught):
        for key, value in model.state_dict().items():
            moved, expected = value - before[key], clean.state_dict()[key] - before[key]
            assert float((moved - expected).norm()) <= 1e-3 * float(expected.norm()), key
    train(model, optimizer, third)
    assert (optimizer.skipped, optimizer.steps) == (0, 3)


@pytest.mark.parametrize("factorization", FACTORIZATIONS)
def test_step_with_the_last_inverses_counts_once(rescued, factorization):
    """Nothing can be factorized, and the inverses of the step before are used: everything else goes on as ever."""
    method, case, name = FACTORIZATIONS[factorization]
    case = {**case, "fallback": "adamw", "trust": "graft:adam", "momentum": "heavy-ball"}
    first, second, third = batches(case, 3)
    run, clean = build(method, case), build(method, case)
    train(*run, first)
    train(*clean, first)
    caught = rescued(*run, second, name, "always")
    train(*clean, second)
    assert {warning.category for warning in caught} == {RuntimeWarning}
    assert (run[1].skipped, run[1].steps) == (0, 2)
    assert torch.equal(run[0].norm.weight, clean[0].norm.weight)
    counted, expected = (
        {path: count for path, count in counters(optimizer).items() if "renewals" not in path}  # of a tracked basis
        for _, optimizer in (run, clean)
    )
    assert counted == expected != {}
    assert moments(run[1]), "this case shows nothing"
    assert not differences(moments(run[1]), moments(clean[1]))
    train(*run, third)
    assert (run[1].skipped, run[1].steps) == (0, 3)


@pytest.mark.parametrize("factorization", FACTORIZATIONS)
def test_rescued_step_warns(rescued, factorization):
    """A plain second attempt that succeeds changes nothing, and nothing is said; another precision or damping does."""
    method, case, name = FACTORIZATIONS[factorization]
    first, second = batches(case, 2)
    model, optimizer = build(method, case)
    train(model, optimizer, first)
    caught = rescued(model, optimizer, second, name, "float32")
    assert [warning.category for warning in caught if warning.category is not RuntimeWarning] == []
    assert caught, "a RuntimeWarning says which layer was rescued"
    assert 'layer "' in str(caught[0].message)


@pytest.mark.parametrize("momentum", ["heavy-ball", "nesterov", "gradient"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("factorization", FACTORIZATIONS)
def test_momentum_is_applied_once_in_a_rescued_step(rescued, factorization, how, momentum):
    """The first step with momentum is that without (Nesterov: 1.9 times it), whatever the rescue did to the damping."""
    method, case, name = FACTORIZATIONS[factorization]
    (data,) = batches(case, 1)
    moves = []
    for each in ("none", momentum):
        model, optimizer = build(method, {**case, "dtype": "float32", "momentum": each})
        before = copy.deepcopy(model.state_dict())
        rescued(model, optimizer, data, name, how)
        assert (optimizer.skipped, optimizer.steps) == (0, 1)
        moves.append({key: value - before[key] for key, value in model.state_dict().items()})
    times = 1.9 if momentum == "nesterov" else 1.0
    for key, plain in moves[0].items():
        assert torch.allclose(moves[1][key], times * plain, rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("momentum", ["none", "heavy-ball", "gradient"])
@pytest.mark.parametrize("factorization", FACTORIZATIONS)
def test_first_step_that_cannot_be_factorized_raises_and_changes_nothing(monkeypatch, factorization, momentum):
    """There is no earlier inverse to keep. The error leaves everything as it was."""
    method, case, name = FACTORIZATIONS[factorization]
    case = {**case, "fallback": "adamw", "trust": "graft:adam", "momentum": momentum}
    run, clean = build(method, case), build(method, case)
    before = snapshot(*run)
    (data,) = batches(case, 1)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        Failing(patch, name, "always")
        with pytest.raises(RuntimeError, match="raise the damping"):
            train(*run, data)
    assert not differences(before, snapshot(*run))
    assert_same_training(run, clean)


@pytest.mark.parametrize("factorization", FACTORIZATIONS)
def test_failed_factorization_in_a_bad_step_is_not_rescued(monkeypatch, factorization):
    """A bad batch is skipped, without a warning and without a change, even if a factorization fails beside it."""
    method, case, name = FACTORIZATIONS[factorization]
    case = {**case, "fallback": "adamw", "trust": "graft:adam", "momentum": "heavy-ball"}
    run, clean = build(method, case), build(method, case)
    first, bad = batches(case, 2)
    train(*run, first)
    train(*clean, first)
    before = snapshot(*run)
    with monkeypatch.context() as patch:
        Failing(patch, name, "float32")
        bad_step(method, *run, bad, "nan-gain-gradient")
    assert (run[1].skipped, run[1].steps) == (1, 1)
    assert not differences(before, snapshot(*run))
    assert_same_training(run, clean)


def test_a_watcher_that_raises_is_told_after_the_step():
    """A step is whole before anybody hears of it."""
    model, optimizer = build("kfac", {})

    def watcher(*arguments):
        raise ValueError("of the user's own")

    optimizer.watch(watcher)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    backward(model, batches({}, 1)[0])
    with pytest.raises(ValueError, match="of the user's own"):
        optimizer.step()
    assert optimizer.steps == 1
    assert not optimizer.capture.passes
    assert not all(map(torch.equal, before, model.parameters()))
