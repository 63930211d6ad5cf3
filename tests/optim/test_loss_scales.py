"""The scale of the user's loss: a mean over samples, over positions or over targets that count, or a sum.

With A (x) B the curvature of that very loss, its scale drops out of a step with relative damping: all four losses give
the same step, whatever the Fisher. And s = w n of ``curvature.scale`` is tested against curvature by definition.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, KFAC, Empirical, Heuristic, Window
from mukron.curvature import AS_A_SUM, OVER_POSITIONS, OVER_SAMPLES
from mukron.curvature.scale import weigh

SAMPLES, FEATURES, WIDTH, CLASSES, IGNORED = 6, 5, 7, 4, -100
LENGTHS = (1, 16, 64)


def network(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).to(dtype)


def batch(length, samples=SAMPLES, ignored=False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, length, FEATURES, generator=generator).to(dtype)
    y = torch.randint(CLASSES, (samples, length), generator=generator)
    if ignored:
        y[:, length // 2 :] = IGNORED
    return x, y


def summed(f, y):
    return F.cross_entropy(f.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")


LOSSES = {
    OVER_SAMPLES: lambda f, y: summed(f, y) / len(y),
    OVER_POSITIONS: lambda f, y: F.cross_entropy(f.flatten(0, 1), y.flatten(), ignore_index=IGNORED),
    AS_A_SUM: summed,
}


def step(length, loss, ignored=False, model=None, samples=SAMPLES, steps=1, **options):
    """The change of every parameter in the last of some steps on one batch, and the optimizer."""
    model = network() if model is None else copy.deepcopy(model)
    x, y = batch(length, samples, ignored, next(model.parameters()).dtype)
    options = {"lr": 1.0, "damping": 0.1, "class_dim": -1, **options}
    optimizer = KFAC(model, **{"trust": None, **options})
    start = copy.deepcopy(model.state_dict())
    for _ in range(steps):
        model.load_state_dict(start)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    assert optimizer.skipped == 0
    return {name: value - start[name] for name, value in model.state_dict().items()}, optimizer


def assert_close(ours, theirs, tolerance=1e-9):
    for name, move in theirs.items():
        assert float((ours[name] - move).norm() / move.norm()) < tolerance, name


def size(moves):
    return float(torch.cat([move.flatten() for move in moves.values()]).norm())


# The step.

OPTIONS = {
    "auto": {},
    "rows": {"form": "rows"},
    "matrix": {"form": "matrix"},
    "fused": {"fused": True, "steps": 2},
    "ema": {"memory": EMA(0.9), "steps": 3},
    "window": {"memory": Window(2), "steps": 3},
    "reduce": {"sharing": "reduce"},
    "eigh": {"solver": "eigh"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("ignored", [False, True], ids=["all", "ignored"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("length", [1, 4])
def test_a_step_does_not_depend_on_the_reduction(length, fisher, ignored, options):
    moves = {}
    for name, loss in LOSSES.items():
        moves[name], optimizer = step(length, loss, ignored and length > 1, fisher=fisher, **options)
        same = length == 1 and name != AS_A_SUM  # one position a sample: a mean over either, which a later batch shows
        assert optimizer.found_reduction == (None if same else name)
    assert_close(moves[OVER_POSITIONS], moves[OVER_SAMPLES])
    assert_close(moves[AS_A_SUM], moves[OVER_SAMPLES])


@pytest.mark.parametrize("ignored", [False, True], ids=["all", "ignored"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_three_fishers_agree(length, loss, ignored):
    """Targets of the data are drawn from the model, so that all have the same expectation; 1,500 positions of it."""
    samples = max(6, 1536 // length)
    model = network()
    x, y = batch(length, samples)
    y = torch.multinomial(model(x).softmax(-1).flatten(0, 1), 1, generator=torch.Generator().manual_seed(2))
    y = y.reshape(samples, length)
    if ignored:
        y[:, (length + 1) // 2 :] = IGNORED
    moves = []
    for fisher in ("exact", "mc:40", "empirical"):
        other = copy.deepcopy(model)
        optimizer = KFAC(other, lr=1.0, damping=0.1, class_dim=-1, fisher=fisher, trust=None)
        loss(other(x), y).backward()
        for p in other.parameters():  # the same gradient for all, of no special direction
            p.grad = torch.ones_like(p)
        optimizer.capture.checks_uses = False
        optimizer.found_reduction = {value: name for name, value in LOSSES.items()}[loss]
        optimizer.step()
        moves.append(
            torch.cat([(p - q).flatten() for p, q in zip(other.parameters(), model.parameters(), strict=True)])
        )
    exact, drawn, empirical = (move.detach() for move in moves)
    assert float((drawn - exact).norm() / exact.norm()) < 0.05
    assert float((empirical - exact).norm() / exact.norm()) < 0.25


@pytest.mark.parametrize("fisher", ["exact", "mc:20", "empirical"])
def test_the_step_of_a_mean_over_positions_does_not_shrink_with_their_number(fisher):
    """The same positions over and over: the same loss, and the same step."""
    x, y = batch(1, samples=64)
    sizes = []
    for length in LENGTHS:
        model = network()
        optimizer = KFAC(model, lr=1.0, damping=0.1, class_dim=-1, fisher=fisher, trust=None)
        LOSSES[OVER_POSITIONS](model(x.expand(-1, length, -1)), y.expand(-1, length)).backward()
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        sizes.append(size({name: value - before[name] for name, value in model.state_dict().items()}))
    assert sizes == pytest.approx([sizes[0]] * len(sizes), rel=1e-9 if fisher != "mc:20" else 0.1)


def test_absolute_damping_is_beside_the_curvature_of_the_loss():
    """The heuristic's rho is in units of the loss's curvature: 7 times the loss, 7 times rho, the same step."""
    samples = 7
    once, _ = step(4, LOSSES[OVER_SAMPLES], samples=samples, damping=Heuristic(0.01), fisher="exact")
    total, _ = step(4, LOSSES[AS_A_SUM], samples=samples, damping=Heuristic(0.01 * samples), fisher="exact")
    assert_close(total, once)


# The curvature.


def factors_of(model, x, y, loss, **options):
    """A (x) B of the one layer, from the optimizer."""
    optimizer = KFAC(model, lr=0.0, class_dim=-1, form="matrix", **{"trust": None, **options})
    seen = {}
    optimizer.watch(lambda layer, block, factors, rho: seen.update(factors))
    loss(model(x), y).backward()
    optimizer.step()
    return torch.kron(seen["B"].M[0], seen["A"].M[0])


@pytest.mark.parametrize("ignored", [False, True], ids=["all", "ignored"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("length", [1, 3])
def test_curvature_of_the_loss_by_definition(length, loss, ignored):
    """One layer, the same p everywhere: K-FAC's product is exact, and equals the Hessian of the user's loss itself."""
    model = nn.Linear(3, CLASSES, bias=False).double()
    nn.init.zeros_(model.weight)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, length, 3, generator=generator).double()
    y = torch.randint(CLASSES, (SAMPLES, length), generator=generator)
    if ignored and length > 1:
        y[::2, -1] = IGNORED
    hessian = torch.autograd.functional.hessian(lambda W: loss(x @ W.T, y), model.weight.detach().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an output layer that starts at zero
        ours = factors_of(model, x, y, loss, fisher="exact")
    theirs = hessian.reshape(3 * CLASSES, 3 * CLASSES)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-6  # weights of positions are float32


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("fisher", "theirs"), [("exact", "type-2"), ("empirical", "empirical")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_curvature_of_a_loss_over_positions_is_curvlinops(fisher, theirs, reduction):
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(nn.Linear(FEATURES, CLASSES), Last())
        x, y = batch(5)
        loss_func = nn.CrossEntropyLoss(reduction=reduction)
        other = curvlinops.KFACLinearOperator(
            *(model, loss_func, list(model.parameters()), [(x, y)]),
            **{"fisher_type": theirs, "check_deterministic": False, "separate_weight_and_bias": True},
        )
        other.compute_kronecker_factors()
        (name,) = other._input_covariances
        expected = torch.kron(other._gradient_covariances[name], other._input_covariances[name])
        optimizer = KFAC(model, lr=0.0, class_dim=1, form="matrix", fisher=fisher, trust=None)
        seen = {}
        optimizer.watch(lambda layer, block, factors, rho: seen.update(factors))
        loss_func(model(x), y).backward()
        optimizer.step()
        ours = torch.kron(seen["B"].M[0], seen["A"].M[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(ours, expected, rtol=1e-8, atol=1e-12 * float(expected.abs().max()))


class Last(nn.Module):
    """Classes to dimension 1."""

    def forward(self, x):
        return x.movedim(-1, 1)


# Where nothing may change.


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
@pytest.mark.parametrize("length", [None, 1, 5])
def test_a_mean_over_samples_is_bit_identical(length, fisher, monkeypatch):
    """To steps in which nothing is found, and B is not touched."""
    x, y = batch(length or 1, dtype=torch.float32)
    moved = []
    for finds in (True, False):
        if not finds:
            monkeypatch.setattr("mukron.optim.guards._find_reduction", lambda *arguments: None)
        model = network(torch.float32)
        optimizer = KFAC(
            model, lr=0.01, fisher=fisher, momentum=0.9, class_dim=None if length is None else -1, trust=None
        )
        for _ in range(3):
            optimizer.zero_grad()
            if length is None:
                F.cross_entropy(model(x[:, 0]), y[:, 0]).backward()
            else:
                LOSSES[OVER_SAMPLES](model(x), y).backward()
            optimizer.step()
        assert optimizer.found_reduction == (OVER_SAMPLES if finds and length != 1 else None)
        moved.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *moved))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("loss", [OVER_SAMPLES, OVER_POSITIONS])
def test_micro_batches_are_the_whole_batch(loss, fisher):
    whole, _ = step(8, LOSSES[loss], fisher=fisher)
    model = network()
    optimizer = KFAC(model, lr=1.0, damping=0.1, class_dim=-1, fisher=fisher, trust=None)
    before, (x, y) = copy.deepcopy(model.state_dict()), batch(8)
    for part in range(3):
        rows = slice(2 * part, 2 * part + 2)
        (LOSSES[loss](model(x[rows]), y[rows]) / 3).backward()
    optimizer.step()
    assert optimizer.found_reduction == loss
    assert_close({name: value - before[name] for name, value in model.state_dict().items()}, whole)


def test_weights_of_classes_and_smoothed_targets_shift_it_only_a_little():
    model = network()
    x, y = batch(16)
    for options in ({"label_smoothing": 0.2}, {"weight": torch.tensor([0.3, 1.0, 3.0, 1.0]).double()}):
        optimizer = KFAC(copy.deepcopy(model), class_dim=-1, trust=None)
        f = optimizer.model(x)
        F.cross_entropy(f.flatten(0, 1), y.flatten(), **options).backward()
        optimizer.step()
        assert optimizer.found_reduction == OVER_POSITIONS


@pytest.mark.parametrize("class_dim", [1, -1])
def test_large_outputs_are_weighed_in_parts(class_dim, monkeypatch):
    f = torch.randn(4, 6, 5, dtype=torch.float64)
    e = torch.randn(4, 6, 5, dtype=torch.float64) * 1e-200
    whole = weigh(f, e, class_dim)
    monkeypatch.setattr("mukron.curvature.scale.NUMBERS_AT_ONCE", 13)
    assert torch.allclose(weigh(f, e, class_dim), whole, rtol=1e-12, atol=0)


def test_it_is_saved_with_the_state():
    _, optimizer = step(16, LOSSES[OVER_POSITIONS])
    other = KFAC(network(), class_dim=-1, trust=None)
    other.load_state_dict(optimizer.state_dict())
    assert other.found_reduction == OVER_POSITIONS
    assert copy.deepcopy(optimizer).found_reduction == OVER_POSITIONS


def test_a_batch_that_shows_nothing_is_followed_by_one_that_does():
    model = network()
    optimizer = KFAC(model, lr=0.1, class_dim=-1, trust=None)
    x, y = batch(16)
    for wanted in (torch.full_like(y, IGNORED), y):
        assert optimizer.found_reduction is None
        optimizer.zero_grad()
        (summed(model(x), wanted) / y.numel()).backward()
        optimizer.step()
    assert optimizer.found_reduction == OVER_POSITIONS


# A GradScaler.


@pytest.mark.parametrize(
    ("fisher", "known"),  # the empirical Fisher is told of an unknown one by a warning of its own: test_misuse
    [("exact", False), ("exact", True), ("empirical", True)],
    ids=["exact, unknown", "exact", "empirical"],
)
@pytest.mark.parametrize("clip", [None, 1e-3], ids=["plain", "clipped"])
@pytest.mark.parametrize("loss", [OVER_SAMPLES, OVER_POSITIONS])
def test_a_grad_scaler_is_no_part_of_the_scale(fisher, loss, clip, known):
    """2^10 is also what 16 samples of 64 positions are, so that the scaled mean over positions looks like a sum."""
    model, (x, y) = network(), batch(64, samples=16)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    options = {"grad_scaler": scaler} if known else {}
    optimizer = KFAC(model, lr=1.0, damping=0.1, class_dim=-1, fisher=fisher, **{"trust": None, **options})
    before = copy.deepcopy(model.state_dict())
    scaler.scale(LOSSES[loss](model(x), y)).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        total = nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    expected, _ = step(64, LOSSES[loss], samples=16, fisher=fisher)
    moved = {name: value - before[name] for name, value in model.state_dict().items()}
    if clip is not None:
        moved = {name: move * (total / clip) for name, move in moved.items()}
    if clip is not None and not known:  # clipped and unscaled: it cannot be told, and is taken for a mean over samples
        assert optimizer.found_reduction is None
        return
    assert optimizer.found_reduction == loss
    assert_close(moved, expected, 1e-5)


# What cannot be measured, and what is told.


def messages(loss, length=16, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, optimizer = step(length, loss, steps=2, **options)
    return [str(warning.message) for warning in caught], optimizer


@pytest.mark.parametrize(
    ("said", "loss"), [("sum", OVER_SAMPLES), ("sum", OVER_POSITIONS), ("mean", AS_A_SUM)], ids=str
)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_reduction_that_is_not_the_losss_is_told_once_and_not_used(fisher, said, loss):
    told, optimizer = messages(LOSSES[loss], reduction=said, fisher=fisher)
    assert len(told) == 1
    assert f'reduction="{said}"' in told[0]
    assert loss in told[0]
    assert "Leave reduction= out" in told[0]
    assert optimizer.found_reduction == loss


@pytest.mark.parametrize(
    ("said", "loss"), [("mean", OVER_SAMPLES), ("mean", OVER_POSITIONS), ("sum", AS_A_SUM), (None, AS_A_SUM)], ids=str
)
def test_a_reduction_that_is_the_losss_is_not_told(said, loss):
    assert messages(LOSSES[loss], reduction=said)[0] == []
    assert messages(LOSSES[loss], fisher=Empirical(reduction=said))[0] == []


@pytest.mark.parametrize("factor", [30.0, 1 / 300])
def test_a_factor_that_is_no_reduction_is_told_once(factor):
    told, optimizer = messages(lambda f, y: factor * LOSSES[OVER_SAMPLES](f, y))
    assert len(told) == 1
    assert "Take the factor out of the loss" in told[0]
    assert optimizer.found_reduction == ""
    ours, _ = messages_ignored(lambda f, y: factor * LOSSES[OVER_SAMPLES](f, y))
    plain, _ = step(16, LOSSES[OVER_SAMPLES])
    assert_close({name: move / factor for name, move in ours.items()}, plain)


def messages_ignored(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return step(16, loss)


OTHER_LOSSES = {
    "soft targets": lambda f, y: -(f.log_softmax(-1) / CLASSES).sum(-1).mean(),
    "advantages of both signs": lambda f, y: (
        torch.linspace(-1, 1, y.numel()).double() * F.cross_entropy(f.flatten(0, 1), y.flatten(), reduction="none")
    ).mean(),
}


@pytest.mark.parametrize("loss", OTHER_LOSSES.values(), ids=OTHER_LOSSES)
def test_a_loss_that_is_no_cross_entropy_is_a_mean_over_samples(loss):
    told, optimizer = messages(loss)
    assert told == []
    assert optimizer.found_reduction is None


def test_regression_takes_the_users_word():
    """Half the squared distance: a mean over samples, and a sum that is said to be one, give the same step."""

    def halves(f, y):
        return (f - F.one_hot(y, CLASSES)).square().sum() / 2

    mean, optimizer = step(4, lambda f, y: halves(f, y) / len(y), likelihood="gaussian", fisher="exact")
    assert optimizer.found_reduction is None
    total, _ = step(4, halves, likelihood="gaussian", fisher="exact", reduction="sum")
    assert_close(total, mean)
    total, _ = step(4, halves, likelihood="gaussian", fisher="empirical", reduction="sum")
    mean, _ = step(4, lambda f, y: halves(f, y) / len(y), likelihood="gaussian", fisher="empirical")
    assert_close(total, mean)


def test_an_objective_that_is_maximized_is_not_measured():
    told, optimizer = messages(lambda f, y: -LOSSES[OVER_SAMPLES](f, y), maximize=True)
    assert told == []
    assert optimizer.found_reduction is None


# A batch that does not show it.


def first_batches(loss, shapes, said=None, fisher="exact", fused=False):
    """What is found after each batch, of so many samples and positions; None positions: the output has none."""
    model = network()
    optimizer = KFAC(
        model,
        lr=0.01,
        damping=0.1,
        class_dim=None if shapes[0][1] is None else -1,
        reduction=said,
        fisher=fisher,
        fused=fused,
        trust=None,
    )
    found = []
    for samples, length in shapes:
        x, y = batch(length or 1, samples)
        optimizer.zero_grad()
        f = model(x if length else x[:, 0]).reshape(samples, length or 1, -1)
        loss(f, y).backward()
        optimizer.step()
        found.append(optimizer.found_reduction)
    assert optimizer.skipped == 0
    return found, model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("said", [None, "sum"])
def test_one_sample_does_not_show_a_sum(said, fisher, fused):
    found, _ = first_batches(LOSSES[AS_A_SUM], [(1, None), (1, None), (6, None), (1, None)], said, fisher, fused)
    assert found == [None, None, AS_A_SUM, AS_A_SUM]


def test_one_sample_does_not_show_a_mean():
    assert first_batches(LOSSES[OVER_SAMPLES], [(1, None), (6, None)])[0] == [None, OVER_SAMPLES]
    with pytest.warns(UserWarning, match="derivative of the loss is that of a mean over samples"):
        assert first_batches(LOSSES[OVER_SAMPLES], [(1, None), (2, None)], "sum")[0] == [None, OVER_SAMPLES]


@pytest.mark.parametrize("loss", [OVER_SAMPLES, OVER_POSITIONS])
def test_one_position_does_not_show_a_mean(loss):
    assert first_batches(LOSSES[loss], [(6, 1), (6, 1), (6, 4)])[0] == [None, None, loss]
    assert first_batches(LOSSES[loss], [(1, 1), (6, 1), (6, 4)])[0] == [None, None, loss]


def test_a_batch_of_one_sample_may_show_a_mean_over_positions():
    assert first_batches(LOSSES[OVER_POSITIONS], [(1, 4)])[0] == [OVER_POSITIONS]
    assert first_batches(LOSSES[AS_A_SUM], [(1, 4), (6, 4)])[0] == [None, AS_A_SUM]


def test_a_first_batch_of_one_sample_changes_no_later_step():
    """With what the user says and without it."""
    weights = [first_batches(LOSSES[AS_A_SUM], [(1, None), (6, None), (3, None)], said)[1] for said in (None, "sum")]
    assert_close(weights[0].state_dict(), weights[1].state_dict())
