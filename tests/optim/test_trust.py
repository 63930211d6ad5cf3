"""Bounds on how far a layer moves in a step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, RMS, GaussNewton, GradientMomentum, Graft, KLClip, Shampoo, Spectral
from mukron.linalg import LowRank
from mukron.optim import Trust
from mukron.optim.direction import spectral_norm

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}
ESTIMATE = 1.25  # the estimate of a norm may be that much too small


def mlp(width=24, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3), nn.Flatten(), nn.Linear(24, 4))


def batch(model, n=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (n, 2, 6, 6) if isinstance(model[0], nn.Conv2d) else (n, 6)
    return torch.randn(shape, generator=generator), torch.randint(4, (n,), generator=generator)


def train(model, optimizer, steps=1, n=16):
    for step in range(steps):
        x, y = batch(model, n, seed=step + 1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def sizes(before, model):
    """By parameter, the size of what it moved by: its largest singular value over (d_out / d_in)^1/2."""
    result = {}
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        moved = (parameter.detach() - old).double()
        module = model[int(name.split(".")[0])]
        groups = getattr(module, "groups", 1)
        if parameter.ndim == 1:
            result[name] = float(moved.norm()) / len(moved) ** 0.5
        else:
            matrices = moved.reshape(groups, len(moved) // groups, -1)
            d_out, d_in = matrices.shape[1:]
            result[name] = float(torch.linalg.matrix_norm(matrices, 2).amax()) / (d_out / d_in) ** 0.5
    return result


@pytest.mark.parametrize("make", [mlp, conv])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"momentum": GradientMomentum(0.9)}], ids=str)
def test_no_layer_moves_by_more_than_the_spectral_bound(name, make, options):
    if name == "gauss-newton" and "fused" in options:
        pytest.skip("Gauss-Newton has no fused form")
    model, limit = make(), 0.01
    optimizer = METHODS[name](model, lr=0.5, trust=Spectral(limit), damping=1e-2, **options)
    for step in range(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x, y = batch(model, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        found = sizes(before, model)
        assert max(found.values()) < ESTIMATE * 0.5 * limit, found
    assert optimizer.skipped == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_move_within_the_bound_is_left_alone(name):
    plain, wide = mlp(), mlp()
    train(plain, METHODS[name](plain, lr=0.01, trust=KLClip(1e9)), steps=3)
    train(wide, METHODS[name](wide, lr=0.01, trust=Spectral(1e9)), steps=3)
    for a, b in zip(plain.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_a_bounded_move_keeps_its_direction():
    plain, bounded = mlp(), mlp()
    start = [parameter.detach().clone() for parameter in plain.parameters()]
    train(plain, KFAC(plain, lr=0.01))
    train(bounded, KFAC(bounded, lr=0.01, trust=Spectral(1e-3)))
    for old, a, b in zip(start, plain.parameters(), bounded.parameters(), strict=True):
        assert F.cosine_similarity((a - old).flatten(), (b - old).flatten(), dim=0) > 0.9999


def test_the_bound_of_an_embedding_is_token_by_token():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Flatten(), nn.Linear(24, 4))
    before = model[0].weight.detach().clone()
    optimizer = KFAC(model, lr=1.0, trust=Spectral(0.01), damping=0.1, exclude=())
    F.cross_entropy(model(torch.randint(6, (16, 3))), torch.randint(4, (16,))).backward()
    optimizer.step()
    rows = (model[0].weight.detach() - before).norm(dim=1) / 8**0.5
    assert (rows[:6] > 0).all()
    torch.testing.assert_close(rows[rows > 0], torch.full_like(rows[rows > 0], 0.01))
    assert (rows[6:] == 0).all()


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("spectrum", ["flat", "decaying", "one large"])
def test_the_estimate_of_the_largest_singular_value(spectrum, low_rank):
    """Never too large; within 20% at the first look and within 40% of a large direction that has just appeared."""
    generator = torch.Generator().manual_seed(0)
    D, H = torch.randn(2, 300, 200, generator=generator), torch.randn(2, 300, 100, generator=generator)
    if spectrum == "decaying":
        H = H / torch.arange(1, 101)
    elif spectrum == "one large":
        D[:, 0], H[:, 0] = 8 * D[:, 0], 8 * H[:, 0]
    U = D.mT @ H
    truth = torch.linalg.matrix_norm(U.double(), 2)
    unrelated = torch.randn(2, 100, generator=generator)
    for start, least in ((None, 0.8), (unrelated, 0.6)):
        size, vector = spectral_norm(LowRank(D, H) if low_rank else U, start)
        assert (size.flatten() <= truth * 1.0001).all()
        assert (size.flatten() >= least * truth).all()
    for _ in range(10):
        size, vector = spectral_norm(U, vector)
    assert (size.flatten() >= 0.97 * truth).all()


def test_huge_moves_are_bounded_and_moves_of_zero_stay():
    huge, _ = spectral_norm(torch.full((1, 30, 20), 1e30), None)
    assert float(huge) == pytest.approx(1e30 * 600**0.5, rel=1e-3)
    nothing, _ = spectral_norm(torch.zeros(1, 30, 20), None)
    assert float(nothing) < 1e-20
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    before = copy.deepcopy(model.state_dict())
    optimizer = Shampoo(model, lr=0.1, trust="spectral")
    (0 * F.cross_entropy(model(torch.randn(5, 6)), torch.randint(4, (5,)))).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_rms():
    model = mlp()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, KFAC(model, lr=0.5, trust=RMS(0.2)))
    for parameter, old in zip(model.parameters(), before, strict=True):
        moved = parameter.detach() - old
        assert float(moved.square().mean().sqrt()) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("trust", "rates"), [(None, "kfac"), ("spectral", "kfac"), ("kl", "kfac"), ("graft:sgd", "sgd"), ("rms", "adamw")]
)
def test_whose_learning_rates_apply(trust, rates):
    def factory(width):
        return nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 4))

    model = factory(64)
    plan = mukron.parametrize(model, mukron.base_shapes(factory, 16))
    optimizer = KFAC(model, plan, lr=0.1, trust=trust)
    for name in ("0.weight", "1.weight", "2.weight"):
        assert optimizer.rate(name) == pytest.approx(0.1 * plan.scales(rates)[name].lr)


@pytest.mark.parametrize(
    "text", ["spectral:0.5", "spectral:1:3", "spectral:1:inf", "kl:0.01", "graft:adam", "graft:sgd", "rms:0.1"]
)
def test_texts_go_there_and_back(text):
    assert Trust.of(text).text == text
    assert Trust.of(Trust.of(text)) == Trust.of(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sp",
        "spectral:",
        "spectral:-1",
        "spectral:nan",
        "spectral:1:2:3",
        "spectral:1:0",
        "kl:1:2",
        "kl:0",
        "graft:lion",
        "none:1",
    ],
)
def test_texts_that_are_refused(text):
    with pytest.raises(ValueError, match=r"trust|graft"):
        Trust.of(text)


@pytest.mark.parametrize("trust", ["spectral:0.05", "rms:0.1", "graft:adam"])
def test_the_state_goes_on_bit_for_bit(trust):
    whole, parts = mlp(), mlp()
    train(whole, KFAC(whole, lr=0.1, trust=trust, inverse_every=3, memory="ema:0.9"), steps=7)
    first = KFAC(parts, lr=0.1, trust=trust, inverse_every=3, memory="ema:0.9")
    train(parts, first, steps=4)
    second = KFAC(parts, lr=0.1, trust=trust, inverse_every=3, memory="ema:0.9")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    first.close()
    for step in range(4, 7):
        x, y = batch(parts, seed=step + 1)
        second.zero_grad()
        F.cross_entropy(parts(x), y).backward()
        second.step()
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", [KFAC, Shampoo])
def test_the_first_steps_refresh_every_time(method):
    """Up to the end of the warm-up a step is that of an optimizer that always refreshes; after it, no longer."""
    always, warmed = mlp(), mlp()
    first = method(always, lr=0.01)
    second = method(warmed, lr=0.01, factor_every=2, inverse_every=4, refresh_warmup=5)
    made = []
    second.watch(lambda layer, *_: made.append((second.steps, layer)))
    for step in range(9):
        for model, optimizer in ((always, first), (warmed, second)):
            x, y = batch(model, seed=step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if step < 5:
            for a, b in zip(always.parameters(), warmed.parameters(), strict=True):
                assert torch.equal(a, b)
    assert not torch.equal(always[0].weight, warmed[0].weight)
    assert sorted({step for step, _ in made}) == [1, 2, 3, 4, 5, 9]  # counted after the step


def surprised(make, method, scales, **options):
    """Train in float64 with gradients that are multiplied by these factors; returns the sizes of moves by step."""
    model = make().double()
    optimizer = method(model, lr=0.01, **options)
    found = []
    for step, scale in enumerate(scales):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x, y = batch(model, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        torch._foreach_mul_([parameter.grad for parameter in model.parameters()], scale)
        optimizer.step()
        found.append(sizes(before, model))
    return found


@pytest.mark.parametrize("factor_every", [1, 4])
@pytest.mark.parametrize("make", [mlp, conv])
@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo])
def test_a_stale_inverse_makes_no_longer_moves_than_twice_its_first(method, make, factor_every):
    """A gradient that grows a thousandfold meets an inverse that has not seen it; a new inverse is free again."""
    options = {"factor_every": factor_every, "inverse_every": 4, "refresh_warmup": 0, "momentum": 0.0}
    options |= {"memory": "ema:0.95", "damping": 1.0}
    scales = [1e-4, 1e-4, 1e-1, 1e-1, 1e-1]
    found = {growth: surprised(make, method, scales, trust=Spectral(99.0, growth), **options) for growth in (2.0, 5.0)}
    free = surprised(make, method, scales, trust=Spectral(99.0, math.inf), **options)
    for name, first in free[0].items():
        assert free[2][name] > 10 * first
        for growth, moves in found.items():
            assert moves[0][name] == first
            assert growth / ESTIMATE < moves[2][name] / first < growth * ESTIMATE
            if method is not Shampoo:  # whose new roots divide the gradient by its own size
                assert moves[4][name] > growth * ESTIMATE * first


def test_a_method_without_inverses_has_no_stale_ones():
    """Gauss-Newton makes its own at every step, whatever its gradients do."""
    held, free = (surprised(mlp, GaussNewton, [1e-4, 1e-1], trust=Spectral(1.0, growth)) for growth in (1.0, math.inf))
    assert held == free


def test_before_the_start_no_inverse_is_in_use():
    """A gradient that grows is then bounded by its size alone."""
    options = {"momentum": 0.0, "refresh_warmup": 1, "start": 9}
    held, free = (
        surprised(mlp, FOOF, [1e-4, 1e-4, 1e-1], trust=Spectral(1.0, growth), **options) for growth in (2.0, math.inf)
    )
    assert held == free


def test_a_refresh_that_failed_leaves_an_inverse_stale(monkeypatch):
    """It keeps the last inverse, which has not seen the gradient that grew."""
    from mukron.linalg import FactorizationError
    from mukron.optim import transaction

    prepare, fails = transaction.prepare, []

    def failing(blocks, powers, solver, rescue=True):
        made, numbers = prepare(blocks, powers, solver, rescue)
        return ([FactorizationError("made to fail") for _ in made] if fails else made), numbers

    monkeypatch.setattr(transaction, "prepare", failing)
    model = mlp().double()
    optimizer = Shampoo(
        model, lr=0.01, trust=Spectral(99.0), momentum=0.0, refresh_warmup=0, inverse_every=1, damping=1.0
    )
    moves = []
    for step, scale in enumerate([1e-4, 1e-4, 1.0]):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x, y = batch(model, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        torch._foreach_mul_([parameter.grad for parameter in model.parameters()], scale)
        if step == 2:
            fails.append(True)
            with pytest.warns(RuntimeWarning, match="kept the last inverse"):
                optimizer.step()
        else:
            optimizer.step()
        moves.append(sizes(before, model))
    for name, last in moves[1].items():
        assert moves[2][name] < 2 * ESTIMATE * last


def test_a_gradient_of_zero_at_a_refresh_does_not_hold_a_layer():
    moves = surprised(mlp, KFAC, [0.0, 1.0], momentum=0.0, refresh_warmup=0, inverse_every=5, memory="ema:0.9")
    assert all(size == 0 for size in moves[0].values())
    assert all(size > 0 for size in moves[1].values())


@pytest.mark.parametrize("growth", [0.5, float("nan"), "2"])
def test_growth_is_at_least_one(growth):
    with pytest.raises((ValueError, TypeError), match="growth"):
        Spectral(1.0, growth)


def test_intervals_are_counted_from_the_start():
    """So that the first step that is preconditioned has fresh inverses; the first of all makes some in any case."""
    model, made = mlp(), []
    optimizer = KFAC(model, lr=0.01, factor_every=2, inverse_every=4, refresh_warmup=0, start=5)
    optimizer.watch(lambda layer, *_: made.append(optimizer.steps - 1))  # counted after the step
    train(model, optimizer, steps=14)
    assert sorted(set(made)) == [0, 1, 5, 9, 13]


@pytest.mark.parametrize(("graft", "rule"), [("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)])
def test_before_the_start_steps_are_those_of_the_graft(graft, rule):
    ours, others = mlp(), mlp()
    optimizer = Shampoo(ours, lr=0.01, trust=Graft(graft), start=3, momentum=0.0)
    other = rule(others.parameters(), lr=0.01)
    for step in range(5):
        for model, stepper in ((ours, optimizer), (others, other)):
            x, y = batch(model, seed=step)
            stepper.zero_grad()
            F.cross_entropy(model(x), y).backward()
            stepper.step()
        same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours.parameters(), others.parameters(), strict=True))
        assert same == (step < 3)


def test_before_the_start_the_gradient_is_within_its_trust():
    plain, model = mlp(), mlp()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    train(model, KFAC(model, lr=0.01, start=1, trust=Spectral(1e9)))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_kl_clip_is_a_value():
    assert KFAC(mlp(), trust=KLClip(1e-4)).options.trust == Trust.of("kl:1e-4")


# Stacks of small moves, as on a GPU.


@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo, mukron.SOAP])
def test_moves_that_are_bounded_as_a_stack_are_those_bounded_one_by_one(method, monkeypatch):
    def weights(devices):
        monkeypatch.setattr("mukron.optim.direction.STACKS_ON", devices)
        torch.manual_seed(0)
        layers = [nn.Linear(6, 8), nn.Tanh(), *(part for _ in range(3) for part in (nn.Linear(8, 8), nn.Tanh()))]
        model = nn.Sequential(*layers, nn.Linear(8, 3)).double()
        optimizer = method(model, lr=0.3, inverse_every=3, refresh_warmup=1)
        for k in range(8):
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            if k == 4:  # a state that was kept continues
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(state)
        return [*model.parameters()]

    assert calls(monkeypatch, lambda: weights(("cpu",))) < calls(monkeypatch, lambda: weights(()))
    for stacked, alone in zip(weights(("cpu",)), weights(()), strict=True):
        torch.testing.assert_close(stacked, alone, rtol=1e-9, atol=1e-12)


def calls(monkeypatch, work):
    """How many spectral norms a piece of work computes."""
    count = []
    with monkeypatch.context() as patched:
        patched.setattr("mukron.optim.direction.spectral_norm", lambda *args: count.append(1) or spectral_norm(*args))
        work()
    return len(count)
