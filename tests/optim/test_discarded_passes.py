"""Statistics of a pass whose gradients were discarded, or that was never differentiated, do not reach a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import EMA, FOOF, KFAC, GaussNewton, Shampoo, Window

DATA = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(8, 12, generator=DATA), torch.randint(5, (8,), generator=DATA)) for _ in range(3)]
DISCARDED, GOOD, LATER = BATCHES

METHODS = {
    "kfac, mc": lambda model: KFAC(model, lr=0.1, fisher="mc", trust=None),
    "kfac, empirical": lambda model: KFAC(model, lr=0.1, fisher="empirical", trust=None),
    "kfac, exact": lambda model: KFAC(model, lr=0.1, fisher="exact", trust=None),
    "kfac, matrix": lambda model: KFAC(model, lr=0.1, form="matrix", trust=None),
    "kfac, ema": lambda model: KFAC(model, lr=0.1, memory=EMA(0.9), trust=None),
    "kfac, window": lambda model: KFAC(model, lr=0.1, memory=Window(2), trust=None),
    "kfac, fused": lambda model: KFAC(model, lr=0.1, fused=True, trust=None),
    "kfac, fused, empirical": lambda model: KFAC(model, lr=0.1, fisher="empirical", fused=True, trust=None),
    "foof": lambda model: FOOF(model, lr=0.1, trust=None),
    "foof, fused": lambda model: FOOF(model, lr=0.1, fused=True, trust=None),
    "shampoo": lambda model: Shampoo(model, lr=0.1, trust=None),
    "shampoo, fused": lambda model: Shampoo(model, lr=0.1, fused=True, trust=None),
    "gauss-newton": lambda model: GaussNewton(model, lr=0.1, trust=None),
}


def mlp() -> nn.Sequential:
    """Wide beside the batch, so that fused steps form no gradient; with biases, whose gradients tell of a reset."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5))


def by_none(model):
    for parameter in model.parameters():
        parameter.grad = None


RESETS = {
    "model.zero_grad()": lambda model: model.zero_grad(),
    "grad = None": by_none,
    "zeros": lambda model: model.zero_grad(set_to_none=False),
}


def passes(model, batch):
    x, y = batch
    F.cross_entropy(model(x), y).backward()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(model, other):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_discarded_gradients_take_their_statistics_with_them(make, reset):
    """At the first step and at a later one, after one discarded pass and after two."""
    clean, other = mlp(), mlp()
    reference, optimizer = make(clean), make(other)
    for good, discarded in ((GOOD, 1), (LATER, 2)):
        clean.zero_grad() if reset is by_none else reset(clean)
        passes(clean, good)
        reference.step()
        for _ in range(discarded):
            reset(other)
            passes(other, DISCARDED)
        reset(other)
        passes(other, good)
        optimizer.step()
        assert_same(other, clean)


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_micro_batches_are_not_taken_for_discarded_passes(make):
    """Two passes without a reset between them are the batch of both."""
    parts = mlp()
    start = copy.deepcopy(parts)
    optimizer = make(parts)
    passes(parts, DISCARDED)
    passes(parts, GOOD)
    optimizer.step()
    alone = mlp()
    optimizer = make(alone)
    passes(alone, GOOD)
    optimizer.step()
    moved = [(p - q).norm() for p, q in zip(values(parts), values(start), strict=True)]
    between = [(p - q).norm() for p, q in zip(values(parts), values(alone), strict=True)]
    assert all(difference > 1e-2 * change for difference, change in zip(between, moved, strict=True))


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_a_forward_pass_that_is_never_differentiated_leaves_no_trace(make):
    """Not on the drawn targets either."""
    clean, other = mlp(), mlp()
    reference, optimizer = make(clean), make(other)
    for good in (GOOD, LATER):
        reference.zero_grad()
        passes(clean, good)
        reference.step()
        output = other(DISCARDED[0])
        optimizer.zero_grad()
        passes(other, good)
        optimizer.step()
        assert_same(other, clean)
        del output


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_its_own_zero_grad_discards_draws_too(make):
    clean, other = mlp(), mlp()
    reference, optimizer = make(clean), make(other)
    passes(clean, GOOD)
    reference.step()
    passes(other, DISCARDED)
    optimizer.zero_grad()
    passes(other, GOOD)
    optimizer.step()
    assert_same(other, clean)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SCALED = {
    "kfac, mc": lambda model, scaler: KFAC(model, lr=0.1, trust=None),
    "kfac, empirical": lambda model, scaler: KFAC(model, lr=0.1, fisher="empirical", grad_scaler=scaler, trust=None),
    "kfac, exact": lambda model, scaler: KFAC(model, lr=0.1, fisher="exact", trust=None),
    "foof": lambda model, scaler: FOOF(model, lr=0.1, trust=None),
    "shampoo": lambda model, scaler: Shampoo(model, lr=0.1, trust=None),
    "gauss-newton": lambda model, scaler: GaussNewton(model, lr=0.1, grad_scaler=scaler, trust=None),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("through", ["model", "optimizer"])
@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
def test_the_step_after_an_overflow_is_made(make, through, device):
    """GradScaler leaves out the step of an overflow: what that pass measured is not finite, and discarded with it."""

    def step(model, optimizer, scaler, batch, factor=1.0):
        (model if through == "model" else optimizer).zero_grad()
        x, y = (part.to(device) for part in batch)
        scaler.scale(factor * F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    clean, other = mlp().to(device), mlp().to(device)
    scalers = [torch.amp.GradScaler(device, init_scale=1024.0) for _ in range(2)]
    reference, optimizer = make(clean, scalers[0]), make(other, scalers[1])
    step(clean, reference, scalers[0], GOOD)
    before = values(other)
    step(other, optimizer, scalers[1], DISCARDED, factor=float("inf"))
    assert scalers[1].get_scale() == 512.0
    assert all(map(torch.equal, values(other), before))
    step(other, optimizer, scalers[1], GOOD)
    assert optimizer.skipped == 0
    assert optimizer.steps == reference.steps == 1
    for ours, theirs, start in zip(values(other), values(clean), before, strict=True):
        torch.testing.assert_close(ours - start, theirs - start, rtol=1e-4, atol=1e-6)


INPUTS = 12


def wide(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 64, bias=bias), nn.Tanh(), nn.Linear(64, 5, bias=bias))


def few(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, INPUTS, generator=generator), torch.randint(5, (4,), generator=generator)


def begun(method, **options):
    model = wide()
    optimizer = method(model, lr=0.1, **{"trust": None, **options})
    x, y = few(1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("method", [mukron.KFAC, mukron.Shampoo])
def test_a_step_after_gradients_were_thrown_away_moves_nothing(method):
    """Fused weights have no gradient that could show it: the biases' do."""
    model, optimizer = begun(method, fused=True)
    x, y = few(2)
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (mukron.KFAC, {"fused": True}),
        (mukron.KFAC, {"fisher": "empirical"}),
        (mukron.KFAC, {}),
        (mukron.FOOF, {"fused": True}),
        (mukron.GaussNewton, {}),
    ],
)
def test_a_graph_that_is_differentiated_again_after_its_gradients_were_thrown_away(method, options):
    weights = []
    for twice in (False, True):
        model, optimizer = begun(method, **options)
        x, y = few(2)
        loss = F.cross_entropy(model(x), y)
        if twice:
            loss.backward(retain_graph=True)
            model.zero_grad()
        loss.backward()
        optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    for once, again in zip(*weights, strict=True):
        torch.testing.assert_close(again, once, rtol=1e-5, atol=1e-7)


def test_a_penalty_that_is_differentiated_first_is_no_sign_of_the_old_gradients():
    weights = []
    for discards in (False, True):
        model = wide()
        optimizer = mukron.KFAC(model, lr=0.1, exclude=("2",), memory="ema:0.9", trust=None)
        for seed in (1, 2, 3):
            x, y = few(seed)
            if seed == 2 and not discards:
                continue
            if seed == 3:
                (0.01 * model[2].weight.square().sum()).backward()
            F.cross_entropy(model(x), y).backward()
            if seed == 2:
                model.zero_grad()
            else:
                optimizer.step()
                optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    for without, with_ in zip(*weights, strict=True):
        assert torch.equal(without, with_)


def test_a_new_gradient_at_the_address_of_an_old_one_is_no_sign_of_it():
    """The address of a tensor that is gone is soon another tensor's: what is known of the old one is not its own."""
    model = wide()
    optimizer = mukron.KFAC(model, lr=0.1, exclude=("2",), trust=None)
    for seed in range(100):
        x, y = few(seed)
        if seed:
            (0.01 * model[2].weight.square().sum()).backward()
        F.cross_entropy(model(x), y).backward()
        assert len(optimizer.capture.passes) == 1
        model.zero_grad()


def test_an_interrupted_forward_pass_leaves_no_weight_frozen():
    class Interrupted(nn.Linear):
        interrupts = False

        def forward(self, x):
            if self.interrupts:
                raise KeyboardInterrupt
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 64), Interrupted(64, 64), nn.Linear(64, 5))
    optimizer = mukron.KFAC(model, lr=0.1, fused=True, trust=None)
    for seed in range(4):
        model[1].interrupts = seed == 2
        x, y = few(seed)
        optimizer.zero_grad()
        before = model[1].weight.detach().clone()
        try:
            F.cross_entropy(model(x), y).backward()
        except KeyboardInterrupt:
            continue
        optimizer.step()
        assert not torch.equal(model[1].weight, before)
    assert all(p.requires_grad for p in model.parameters())
