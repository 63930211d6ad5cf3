"""What torch expects of an optimizer, for every method."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import EMA, FOOF, KFAC, Batch, GaussNewton, Rescaled, Shampoo, Window
from networks import INPUTS, Net

MAKERS = {
    "kfac": lambda model, **options: KFAC(model, **{"trust": None, **{"lr": 0.05, "fisher": "mc", **options}}),
    "kfac, ema": lambda model, **options: KFAC(
        model, **{"trust": None, **{"lr": 0.05, "fisher": "mc", "memory": EMA(0.9), **options}}
    ),
    "kfac, window": lambda model, **options: KFAC(
        model, **{"trust": None, **{"lr": 0.05, "fisher": "mc", "memory": Window(2), **options}}
    ),
    "kfac, rarely": lambda model, **options: KFAC(
        model, **{"trust": None, **{"lr": 0.05, "fisher": "mc", "factor_every": 2, "inverse_every": 4, **options}}
    ),
    "foof": lambda model, **options: FOOF(model, **{"trust": None, **{"lr": 0.05, **options}}),
    "shampoo": lambda model, **options: Shampoo(model, **{"trust": None, **{"lr": 0.05, "damping": 1e-3, **options}}),
    "shampoo, newton": lambda model, **options: Shampoo(
        model, **{"trust": None, **{"lr": 0.05, "damping": 1e-3, "solver": "newton", **options}}
    ),
    "shampoo, tracked": lambda model, **options: Shampoo(
        model, **{"trust": None, **{"lr": 0.05, "damping": 1e-3, "solver": "tracked", **options}}
    ),
    "shampoo, tracked, rarely": lambda model, **options: Shampoo(
        model,
        **{
            "trust": None,
            **{"lr": 0.05, "damping": 1e-3, "solver": "tracked", "factor_every": 2, "inverse_every": 4, **options},
        },
    ),
    "gauss-newton": lambda model, **options: GaussNewton(model, **{"trust": None, **{"lr": 0.05, **options}}),
}
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


@pytest.fixture(params=MAKERS)
def make(request):
    torch.manual_seed(0)
    return MAKERS[request.param]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net(8)


def train(model, optimizer, steps=3, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(model, other):
    return all(map(torch.equal, values(model), values(other)))


def test_it_learns(make, model):
    """The lowest loss of a few steps: what a handful of drawn targets does after that differs from torch to torch."""
    optimizer, losses = make(model, momentum=0.9), []
    for _ in range(12):
        losses.append(float(F.cross_entropy(model(X), Y).detach()))
        train(model, optimizer, steps=1)
    assert min(losses) < 0.9 * losses[0]


def test_it_is_deterministic(make, model):
    other = copy.deepcopy(model)
    train(model, make(model))
    train(other, make(other))
    assert same(model, other)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"fallback": "adamw"}, {"trust": "graft:adam"}])
def test_a_run_continues_bit_for_bit(make, model, options):
    """From a saved state, a copy and a pickle, at any step of the intervals, as the run that was not interrupted.

    The state goes through torch.save and back with weights_only, into a fresh model and optimizer.
    """
    optimizer = make(model, **options)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed = Net(8)
    resumed.load_state_dict(loaded["model"])
    others = [make(resumed, **options)]
    others[0].load_state_dict(loaded["optimizer"])
    if "momentum" in options:
        others += [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    train(model, optimizer)
    for other in others:
        assert other.model is not model
        train(other.model, other)
        assert same(model, other.model)
        assert other.steps == 6


def test_a_copy_of_model_and_optimizer_together(make, model):
    optimizer = make(model)
    other_model, other = copy.deepcopy((model, optimizer))
    train(other_model, other)
    assert other.model is other_model
    assert not same(model, other_model)


def test_a_state_of_another_kind_is_refused(make, model):
    with pytest.raises(ValueError, match="not saved by a mukron optimizer"):
        make(model).load_state_dict(torch.optim.SGD(model.parameters(), 0.1).state_dict())


def test_a_state_of_another_parametrization_is_refused(make):
    def optimizer(base, scheme="mup"):
        model = Net(16)
        return make(model, parametrization=mukron.parametrize(model, mukron.base_shapes(Net, width=base), scheme))

    state = optimizer(8).state_dict()
    optimizer(8).load_state_dict(state)
    with pytest.raises(mukron.ParametrizationError, match="base shape"):
        optimizer(4).load_state_dict(state)
    with pytest.raises(mukron.ParametrizationError, match="scheme"):
        optimizer(8, "ntk").load_state_dict(state)
    with pytest.raises(ValueError, match="the other has none"):
        make(Net(16)).load_state_dict(state)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    ],
)
def test_schedulers(make, model, scheduler):
    optimizer = make(model, momentum=0.9)
    plan = scheduler(optimizer)
    train(model, optimizer, scheduler=plan)
    assert optimizer.param_groups[0]["lr"] == plan.get_last_lr()[0] != 0.05


def test_lr_zero_changes_nothing_and_lr_is_linear(make, model):
    still, slow, fast = model, copy.deepcopy(model), copy.deepcopy(model)
    before = values(still)
    train(still, make(still, lr=0.0), steps=1)
    assert all(map(torch.equal, before, values(still)))
    train(slow, make(slow, lr=0.01), steps=1)
    train(fast, make(fast, lr=torch.tensor(0.02)), steps=1)  # a tensor is a number
    for start, one, two in zip(before, values(slow), values(fast), strict=True):
        assert torch.allclose(two - start, 2 * (one - start), rtol=1e-3, atol=1e-6)


def test_damping_can_be_scheduled(model):
    optimizer = KFAC(model, lr=0.05, damping=Rescaled(2.0), fisher="exact", trust=None)
    assert optimizer.param_groups[0]["damping"] == 2.0
    other = copy.deepcopy(model)
    optimizer.param_groups[0]["damping"] = 0.5
    train(model, optimizer, steps=1)
    train(other, KFAC(other, lr=0.05, damping=0.5, fisher="exact", trust=None), steps=1)
    assert same(model, other)


def test_closures(make, model):
    other = copy.deepcopy(model)
    optimizer = make(model)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert float(loss.detach()) == pytest.approx(float(F.cross_entropy(other(X), Y).detach()))
    train(other, make(other), steps=1)
    assert same(model, other)


def test_add_param_group(make, model):
    whole = copy.deepcopy(model)
    optimizer = make(model, params=[*model.hidden.parameters(), *model.head.parameters()])
    assert set(optimizer.layers) == {"hidden", "head"}
    optimizer.add_param_group({"params": [*model.first.parameters(), *model.norm.parameters()]})
    assert set(optimizer.layers) == {"first", "hidden", "head"}
    train(model, optimizer, steps=1)
    train(whole, make(whole), steps=1)
    assert same(model, whole)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": list(model.first.parameters())})


def test_an_empty_group_and_one_generator_of_parameters(make, model):
    optimizer = make(model, params=model.parameters())
    optimizer.add_param_group({"params": []})
    train(model, optimizer, steps=1)


def test_frozen_parameters_and_parameters_without_gradient(make, model):
    model.first.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, make(model), steps=2)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {"hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight"}


def test_a_layer_that_sits_a_step_out(make):
    class Skips(Net):
        skip = False

        def forward(self, x):
            x = F.relu(self.first(x))
            return self.head(x if self.skip else F.relu(self.norm(self.hidden(x))))

    model = Skips(8)
    optimizer = make(model)
    train(model, optimizer, steps=1)
    model.skip = True
    before = model.hidden.weight.detach().clone()
    train(model, optimizer, steps=1)
    assert torch.equal(model.hidden.weight, before)
    model.skip = False
    train(model, optimizer, steps=4)
    assert not torch.equal(model.hidden.weight, before)


def test_step_before_any_gradient(make, model):
    before = values(model)
    make(model).step()
    assert all(map(torch.equal, before, values(model)))


def test_zero_gradients_give_zero_updates(make, model):
    optimizer = make(model)
    before = values(model)
    (model(X) * 0).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, values(model)))


def test_maximize(make, model):
    other = copy.deepcopy(model)
    before = values(model)
    train(model, make(model), steps=1)
    train(other, make(other, maximize=True), steps=1)
    for start, down, up in zip(before, values(model), values(other), strict=True):
        assert torch.allclose(up - start, start - down, rtol=1e-4, atol=1e-6)


def test_momentum_and_nesterov_by_hand(make, model):
    """Two steps: the second moves by its own direction plus momentum times the first's."""
    plain, heavy, ahead = model, copy.deepcopy(model), copy.deepcopy(model)
    before = values(plain)
    train(plain, make(plain), steps=1)
    first = [new - old for new, old in zip(values(plain), before, strict=True)]
    train(ahead, make(ahead, momentum=0.5, nesterov=True), steps=1)
    for start, move, new in zip(before, first, values(ahead), strict=True):
        assert torch.allclose(new, start + 1.5 * move, rtol=1e-4, atol=1e-6)
    optimizer = make(heavy, momentum=0.5)
    train(heavy, optimizer, steps=1)
    assert all(torch.allclose(a, b) for a, b in zip(values(heavy), values(plain), strict=True))
    middle = values(heavy)
    optimizer.zero_grad()
    (heavy(X) * 0).sum().backward()
    if "memory" not in str(optimizer.options.memory) and isinstance(optimizer.options.memory, Batch):
        optimizer.step()  # a zero gradient: momentum alone
        for start, move, new in zip(middle, first, values(heavy), strict=True):
            assert torch.allclose(new - start, 0.5 * move, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the gradient of layer")  # which this test changes by hand
def test_weight_decay(make, model):
    """Decoupled: every weight shrinks by lr x decay beside its step. Coupled: decay is part of the gradient."""
    plain, decoupled, coupled = model, copy.deepcopy(model), copy.deepcopy(model)
    before = values(plain)
    train(plain, make(plain), steps=1)
    train(decoupled, make(decoupled, weight_decay=0.2), steps=1)
    for start, without, decayed in zip(before, values(plain), values(decoupled), strict=True):
        assert torch.allclose(decayed, without - 0.05 * 0.2 * start, rtol=1e-4, atol=1e-6)
    optimizer = make(coupled, weight_decay=0.2, decoupled=False)
    by_hand = copy.deepcopy(coupled)
    train(coupled, optimizer, steps=1)
    other = make(by_hand)
    F.cross_entropy(by_hand(X), Y).backward()
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter.grad += 0.2 * parameter
    other.step()
    assert all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(values(coupled), values(by_hand), strict=True)
    )


def test_kl_clip(make, model):
    """The step is shortened so that the sum of lr^2 <direction, gradient> is at most the limit, and not otherwise."""
    free, clipped, loose = model, copy.deepcopy(model), copy.deepcopy(model)
    before = values(free)
    train(free, make(free, exclude=("norm",)), steps=1)
    train(loose, make(loose, trust=mukron.KLClip(1e9), fallback="sgd"), steps=1)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(values(free), values(loose), strict=True))
    train(clipped, make(clipped, trust=mukron.KLClip(1e-6), fallback="sgd"), steps=1)
    names = [name for name, _ in model.named_parameters()]
    moves = {
        name: (new - old, old_free - old)
        for name, new, old_free, old in zip(names, values(clipped), values(free), before, strict=True)
    }
    ratios = [float(short.norm() / long.norm()) for name, (short, long) in moves.items() if "norm" not in name]
    assert max(ratios) - min(ratios) < 1e-3
    gradients = {name: parameter.grad for name, parameter in clipped.named_parameters()}
    total = sum(
        0.05 * float((-short * gradients[name]).sum()) / ratios[0] * ratios[0]
        for name, (short, _) in moves.items()
        if "norm" not in name
    )
    assert total * ratios[0] == pytest.approx(1e-6, rel=1e-2)


@pytest.mark.parametrize("graft", ["sgd", "adam"])
def test_grafting(make, model, graft):
    """The direction is the method's own, its length the other's: SGD's |G|, or Adam's, all ones at the first step."""
    free, grafted = model, copy.deepcopy(model)
    before = values(free)
    train(free, make(free), steps=1)
    train(grafted, make(grafted, trust=f"graft:{graft}"), steps=1)
    for (name, parameter), start, own in zip(grafted.named_parameters(), before, values(free), strict=True):
        if "norm" in name:
            continue
        length = parameter.grad.norm() if graft == "sgd" else parameter.grad.sign().norm()
        move = (start - parameter).detach()
        assert float(move.norm()) == pytest.approx(0.05 * float(length), rel=1e-3)
        assert float(F.cosine_similarity(move.flatten(), (start - own).flatten(), dim=0)) > 0.9999


def test_gradient_clipping_scales_the_step(model):
    """torch's own clipping changes the gradient between backward and step; the step follows it."""
    free, clipped = model, copy.deepcopy(model)
    before = values(free)
    train(free, KFAC(free, lr=0.05, fisher="exact", trust=None), steps=1)
    optimizer = KFAC(clipped, lr=0.05, fisher="exact", trust=None)
    F.cross_entropy(clipped(X), Y).backward()
    norm = float(nn.utils.clip_grad_norm_(clipped.parameters(), 0.1))
    optimizer.step()
    for start, one, two in zip(before, values(free), values(clipped), strict=True):
        assert torch.allclose(two - start, (one - start) * 0.1 / norm, rtol=1e-3, atol=1e-7)


def test_a_gradient_that_was_changed_is_the_one_that_counts():
    """A wide layer, where the step is made from signals and inputs: it must see that the gradient is another.

    What was added, a billionth of the gradient, is preconditioned with it. Of signals and inputs it is no part.
    """
    torch.manual_seed(0)
    model = Net(256).double()
    noise, moves = torch.randn(256, 256).double(), []
    for off in (0.0, 1e-9):
        changed = copy.deepcopy(model)
        optimizer = KFAC(changed, lr=1.0, fisher="exact", form="rows", trust=None)
        F.cross_entropy(changed(X.double()), Y).backward()
        noise = noise * changed.hidden.weight.grad.norm() / noise.norm()
        changed.hidden.weight.grad += off * noise
        G = changed.hidden.weight.grad.clone()
        optimizer.step()
        operators = optimizer.state[optimizer.layers["hidden"].anchor]["operators"]["weight"]
        moves.append((model.hidden.weight - changed.hidden.weight).detach())
        assert torch.allclose(moves[-1], preconditioned(operators, G), rtol=1e-8, atol=1e-12)
    expected = preconditioned(operators, 1e-9 * noise)
    assert float((moves[1] - moves[0] - expected).norm()) < 1e-3 * float(expected.norm())


def preconditioned(operators, G):
    return operators["B"].left(operators["A"].right(G[None]))[0]


@pytest.mark.parametrize("name", ["kfac", "kfac, ema", "foof", "shampoo", "gauss-newton"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_accumulation_over_micro_batches_is_the_whole_batch(name, fisher):
    options = {"fisher": fisher} if name.startswith("kfac") else {}
    torch.manual_seed(0)
    whole = Net(8).double()
    parts = copy.deepcopy(whole)
    x = X.double()
    one, two = MAKERS[name](whole, **options), MAKERS[name](parts, **options)
    F.cross_entropy(whole(x), Y).backward()
    one.step()
    for part in range(5):
        rows = slice(2 * part, 2 * part + 2)
        (F.cross_entropy(parts(x[rows]), Y[rows]) / 5).backward()
    two.step()
    for ours, theirs in zip(values(parts), values(whole), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_intervals():
    """Between updates nothing is listened to, and the last inverse is used."""
    model = Net(8)
    optimizer = KFAC(model, lr=0.01, factor_every=2, inverse_every=4, trust=None)
    heard = []
    for _ in range(8):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        heard.append(bool(optimizer.capture.gather()))
        optimizer.step()
    assert heard == [True, False] * 4
    with pytest.raises(ValueError, match="must be a multiple of factor_every"):
        KFAC(model, factor_every=2, inverse_every=3, trust=None)
