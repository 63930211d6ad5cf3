"""What went wrong once: each case was found by someone who tried to break the optimizers."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, Batch, GaussNewton, Shampoo, Window
from mukron.linalg import Operator
from networks import INPUTS, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


def step(model, optimizer, x=X, y=Y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"lr": 0.03, "momentum": 0.9}])
def test_kfac_stays_put_when_the_data_are_fitted(options):
    """A confident model's own draws make B fall faster than the gradient: the damping must not follow it to zero."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = x[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = KFAC(model, **options)
    for _ in range(400):
        step(model, optimizer, x, y)
    assert optimizer.skipped == 0
    assert float(F.cross_entropy(model(x), y).detach()) < 0.02


def test_a_diverged_run_is_told():
    model = Net(8)
    optimizer = KFAC(model)
    for _ in range(9):
        step(model, optimizer, X * float("nan"))
    with pytest.warns(RuntimeWarning, match="10 steps in a row were skipped.*lower the learning rate"):
        step(model, optimizer, X * float("nan"))
    assert optimizer.skipped == 10


@pytest.mark.parametrize("first", ["empirical", "gauss-newton"])
def test_two_optimizers_do_not_hear_each_others_passes(first):
    torch.manual_seed(0)
    alone, both = Net(8), Net(8)
    both.load_state_dict(alone.state_dict())

    def make(model):
        mine = list(model.first.parameters())
        if first == "empirical":
            return KFAC(model, lr=0.1, fisher="empirical", params=mine)
        return GaussNewton(model, lr=0.1, params=mine)

    single, one = make(alone), make(both)
    other = KFAC(both, lr=0.1, fisher="exact", params=[*both.hidden.parameters(), *both.head.parameters()])
    for model in (alone, both):
        F.cross_entropy(model(X), Y).backward()
    assert one.capture.samples == single.capture.samples == 10
    single.step()
    one.step()
    assert torch.equal(alone.first.weight, both.first.weight)
    other.step()


def test_nothing_of_a_pass_outlives_its_step():
    """Without waiting for Python's garbage collector: on a GPU nothing would call it in time."""
    model = Net(64)
    optimizer = KFAC(model)
    outputs = []
    model.hidden.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
    gc.collect()
    gc.disable()
    try:
        step(model, optimizer)
        model(X)  # never differentiated
        assert [output() for output in outputs] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("sizes", [(200, 10), (10, 200)])
def test_a_window_of_unequal_batches(sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 5))
    optimizer = FOOF(model, lr=0.0, memory=Window(2), damping=mukron.Constant(0.1))
    batches = [torch.randn(size, 64) for size in sizes]
    for x in batches:
        step(model, optimizer, x, torch.randint(5, (len(x),)))
    state = optimizer.state[model[0].weight]["operators"]["weight"]["A"]
    P = Operator.from_state(state).right(torch.eye(64)[None])[0]
    A = sum(x.T @ x / len(x) for x in batches) / 2
    assert torch.allclose(P, torch.linalg.inv(A + 0.1 * torch.eye(64)), rtol=1e-3, atol=1e-4)


def test_an_input_that_is_changed_after_use_is_refused():
    class Changes(Net):
        def forward(self, x):
            h = F.relu(self.first(x))
            u = self.hidden(h)
            h += 5
            return self.head(F.relu(self.norm(u)) + h)

    model = Changes(8)
    optimizer = KFAC(model)
    with pytest.raises(RuntimeError, match='input of layer "hidden" was changed in place'):
        model(X)
    optimizer.close()


@pytest.mark.parametrize("method", [lambda m: KFAC(m, lr=0.1, fisher="empirical"), lambda m: GaussNewton(m, lr=0.1)])
def test_two_backward_passes_through_one_forward_pass_are_one(method):
    """Two terms of a loss, differentiated one after the other, make the step of their sum."""
    torch.manual_seed(0)
    whole = Net(8).double()
    terms = copy.deepcopy(whole)
    x, weight = X.double(), torch.rand(10, generator=DATA).double()
    for model, separate in ((whole, False), (terms, True)):
        optimizer = method(model)
        losses = F.cross_entropy(model(x), Y, reduction="none")
        if separate:
            (losses * weight).mean().backward(retain_graph=True)
            (losses * (1 - weight)).mean().backward()
        else:
            losses.mean().backward()
        assert optimizer.capture.samples == 10
        optimizer.step()
    for ours, theirs in zip(values(terms), values(whole), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_statistics_of_one_pass_are_not_changed_by_another():
    model = Net(8)
    optimizer = FOOF(model, form="matrix")
    first = F.cross_entropy(model(X), Y)
    second = F.cross_entropy(model(2 * X), Y)
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    assert optimizer.capture.samples == 20
    expected = (X.square().sum() + (2 * X).square().sum()) / 20
    assert float(optimizer.capture.gather()["first"].A.factor().trace()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("lengths", [(2, 20), (20, 2)])
def test_positions_are_averaged_over_micro_batches(lengths):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(1, 2), nn.AdaptiveAvgPool1d(5))
    optimizer = FOOF(model, lr=1.0)
    for length in lengths:
        F.cross_entropy(model(torch.randn(6, length, 4)), Y[:6]).backward()
    gradient = model[0].bias.grad.clone()
    before = model[0].bias.detach().clone()
    optimizer.step()
    assert torch.allclose(before - model[0].bias, gradient / 11, rtol=1e-5)  # (2 + 20) / 2 positions a sample


class Folded(nn.Module):
    """The same layer over positions, folded into the samples, or put first, or left in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.head, self.how = nn.Linear(4, 6), nn.Linear(6, 5), how

    def forward(self, x):
        samples, length, _ = x.shape
        if self.how == "folded":
            h = self.inner(x.reshape(samples * length, 4)).reshape(samples, length, 6)
        elif self.how == "first":
            h = self.inner(x.transpose(0, 1)).transpose(0, 1)
        else:
            h = self.inner(x)
        return self.head(torch.tanh(h).mean(1))


@pytest.mark.parametrize("how", ["folded", "first"])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(
    "method",
    [
        lambda m: KFAC(m, lr=0.1, fisher="exact"),
        lambda m: KFAC(m, lr=0.1, fisher="exact", sharing="reduce"),
        lambda m: GaussNewton(m, lr=0.1),
    ],
)
def test_positions_wherever_the_model_puts_them(how, samples, method):
    torch.manual_seed(0)
    plain, other = Folded("plain").double(), Folded(how).double()
    other.load_state_dict(plain.state_dict())
    x, y = torch.randn(samples, 7, 4).double(), Y[:samples]
    for model in (plain, other):
        optimizer = method(model)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for ours, theirs in zip(values(other), values(plain), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_an_auxiliary_head():
    class Two(Net):
        def __init__(self, width):
            super().__init__(width)
            self.auxiliary = nn.Linear(width, 2)

        def forward(self, x):
            return super().forward(x), self.auxiliary(F.relu(self.first(x.detach() + 0.0)).detach())

    class Shared(Two):
        def forward(self, x):
            h = F.relu(self.first(x))
            return self.head(F.relu(self.norm(self.hidden(h)))), self.auxiliary(h)

    model = Shared(8)
    optimizer = KFAC(model, output=lambda returned: returned[0])
    F.cross_entropy(model(X)[0], Y).backward()  # its loss ignores the head
    optimizer.step()
    main, auxiliary = model(X)
    optimizer.zero_grad()
    (F.cross_entropy(main, Y) + auxiliary.square().mean()).backward()
    with pytest.raises(RuntimeError, match=r'layer "auxiliary".*does not depend on it.*exclude=\("auxiliary",\)'):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:layer .* factorized with")  # the ladder may have to help
@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo, GaussNewton])
def test_no_damping_gives_no_nan(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 5))  # most tokens do not occur
    optimizer = method(model, lr=1e-6, damping=0.0)
    step(model, optimizer, torch.randint(10, (10, 3)))
    assert all(value.isfinite().all() for value in values(model))


@pytest.mark.parametrize("scale", [1e-19, 1e-21])
@pytest.mark.parametrize("solver", ["eigh", "newton", "tracked"])
def test_tiny_gradients_never_become_nan(scale, solver):
    model = Net(8)
    optimizer = Shampoo(model, lr=0.1, solver=solver)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            (F.cross_entropy(model(X), Y) * scale).backward()
            optimizer.step()
        except RuntimeError as error:
            assert "raise the damping" in str(error)  # noqa: PT017
    assert all(value.isfinite().all() for value in values(model))


def test_a_failed_eigendecomposition_keeps_the_last_inverse(monkeypatch):
    model = Net(8)
    optimizer = Shampoo(model, lr=0.01)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state[model.hidden.weight]["operators"])

    def fails(*arguments):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.warns(RuntimeWarning, match="kept the last inverse"):
        step(model, optimizer)
    after = optimizer.state[model.hidden.weight]["operators"]
    assert torch.equal(before["weight"]["L"]["P"], after["weight"]["L"]["P"])


@pytest.mark.parametrize("fallback", ["sgd", "adamw"])
def test_half_precision_resumes_bit_for_bit(fallback):
    torch.manual_seed(0)
    model = Net(8).bfloat16()
    optimizer = KFAC(model, lr=0.05, momentum=0.9, fallback=fallback)
    x = X.bfloat16()
    step(model, optimizer, x)
    resumed = Net(8).bfloat16()
    resumed.load_state_dict(model.state_dict())
    again = KFAC(resumed, lr=0.05, momentum=0.9, fallback=fallback)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(model, optimizer, x)
        step(resumed, again, x)
    assert all(map(torch.equal, values(model), values(resumed)))


def test_a_layer_that_is_unfrozen_between_refreshes():
    model = Net(8)
    model.hidden.requires_grad_(False)
    optimizer = KFAC(model, lr=0.05, factor_every=5, inverse_every=5)
    for _ in range(2):
        step(model, optimizer)
    model.hidden.requires_grad_(True)
    before = model.hidden.weight.detach().clone()
    step(model, optimizer)
    assert torch.equal(model.hidden.weight, before)  # its curvature was not seen: it waits
    step(model, optimizer)
    assert not torch.equal(model.hidden.weight, before)


def test_gradients_of_zeros_for_a_layer_that_did_not_run():
    class Skips(Net):
        skip = False

        def forward(self, x):
            h = F.relu(self.first(x))
            return self.head(h if self.skip else F.relu(self.norm(self.hidden(h))))

    model = Skips(8)
    optimizer = KFAC(model, lr=0.05)
    step(model, optimizer)
    model.skip = True
    before = model.hidden.weight.detach().clone()
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert torch.equal(model.hidden.weight, before)


def test_gauss_newton_of_an_embedding_is_that_of_a_linear_layer():
    torch.manual_seed(0)
    tokens = torch.randint(7, (10, 3))
    embedding = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 5)).double()
    linear = nn.Sequential(nn.Linear(7, 4, bias=False), nn.Flatten(), nn.Linear(12, 5)).double()
    with torch.no_grad():
        linear[0].weight.copy_(embedding[0].weight.T)
        linear[2].load_state_dict(embedding[2].state_dict())
    step(embedding, GaussNewton(embedding, lr=0.1), tokens)
    step(linear, GaussNewton(linear, lr=0.1), F.one_hot(tokens, 7).double())
    assert torch.allclose(embedding[0].weight, linear[0].weight.T, rtol=1e-9)


def test_exact_fisher_of_one_number_a_sample():
    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(INPUTS, 1)

        def forward(self, x):
            return self.fc(x).squeeze(1)

    model = Score()
    optimizer = KFAC(model, likelihood="gaussian", fisher="exact", form="matrix")
    model(X).square().mean().backward()
    assert float(optimizer.capture.gather()["fc"].B.factor().M) == pytest.approx(1.0)
    optimizer.step()


def test_a_forward_pass_that_fails_leaves_nothing_behind():
    model = Net(8)
    optimizer = KFAC(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(10, INPUTS + 1))

    class Fails(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("of the user's own")

    failing = Fails(8)
    other = KFAC(failing)
    with pytest.raises(KeyError, match="of the user's own"):
        failing(X)
    failing.first(X)  # not "ran twice"
    step(model, optimizer)
    other.close()


def test_large_half_precision_gradients_are_finite():
    model = nn.Sequential(nn.Linear(512, 512)).half()
    optimizer = Shampoo(model, lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 200.0)
    optimizer.step()
    assert optimizer.skipped == 0


def test_states_of_another_method_are_refused():
    model = Net(8)
    shampoo = Shampoo(model)
    step(model, shampoo)
    with pytest.raises(ValueError, match="saved by Shampoo, not by KFAC"):
        KFAC(Net(8)).load_state_dict(shampoo.state_dict())


def test_decay_of_the_fallback_goes_with_its_own_learning_rate():
    model = Net(8)
    optimizer = KFAC(model, lr=0.1, fallback_lr=1e-4, weight_decay=0.1)
    optimizer.zero_grad()
    (model(X) * 0).sum().backward()
    optimizer.step()
    assert torch.allclose(model.norm.weight, torch.full((8,), 1 - 1e-5))


@pytest.mark.parametrize("method", [KFAC, FOOF, GaussNewton])
def test_a_weight_that_is_used_behind_its_layers_back_is_told(method):
    """Tied in the forward pass alone, where no module shows it."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)

        def forward(self, tokens):
            return F.linear(torch.tanh(self.mix(self.embedding(tokens).mean(1))), self.embedding.weight)

    torch.manual_seed(0)
    model = Tied()
    optimizer = method(model, lr=0.01)
    F.cross_entropy(model(torch.randint(7, (10, 3))), Y).backward()
    with pytest.warns(UserWarning, match=r'layer "embedding" is not that of its own forward pass.*exclude='):
        optimizer.step()


def test_ordinary_gradients_are_not_suspected():
    """Clipped, accumulated, unscaled, reduced, under autocast: still the layer's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"sharing": "reduce"}, {"fisher": "empirical"}):
            torch.manual_seed(0)
            model = nn.Sequential(
                *(nn.Conv1d(1, 4, 3, groups=1), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3, groups=2)),
                *(nn.Flatten(), nn.Linear(32, 5)),
            )
            optimizer = KFAC(model, lr=0.01, **options)
            for rows in (slice(0, 3), slice(3, 10)):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(X[rows, None]), Y[rows])
                (loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()


@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo, GaussNewton])
def test_an_empty_batch_moves_nothing(method):
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = method(model)
    before = values(model)
    F.cross_entropy(model(torch.randn(0, 4)), torch.empty(0, dtype=torch.long), reduction="sum").backward()
    optimizer.step()
    assert all(map(torch.equal, before, values(model)))


def test_clear_errors():
    class Keyword(Net):
        def forward(self, x):
            return self.head(F.relu(self.first(input=x)))

    model = Keyword(8)
    optimizer = KFAC(model)
    with pytest.raises(RuntimeError, match='layer "first" was called with keywords alone'):
        model(X)
    optimizer.close()

    class Loss(Net):
        def forward(self, x):
            return F.cross_entropy(super().forward(x), Y)

    model = Loss(8)
    optimizer = KFAC(model)
    with pytest.raises(ValueError, match="returned a single number"):
        model(X)
    optimizer.close()
    with pytest.raises(ValueError, match="Shampoo's factors are matrices"):
        Shampoo(Net(8), memory=Window(2))
    model = Net(8)
    optimizer = KFAC(model, memory=Batch())
    optimizer.param_groups[0]["damping"] = mukron.Fixed(a=1.0, b=1.0)  # a rule, where a number is usual
    step(model, optimizer)


@pytest.mark.parametrize("method", [KFAC, Shampoo, GaussNewton])
def test_groups_that_grow_with_the_width_are_refused(method):
    """A depthwise convolution's factors are of one channel each: the law of whole layers does not hold for them."""

    def make(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, width, 3), nn.Conv2d(width, width, 3, groups=width), nn.Flatten(), nn.LazyLinear(3)
        )

    def depthwise(width: int) -> nn.Module:
        model = make(width)
        model(torch.zeros(1, 1, 5, 5))
        return model

    model = depthwise(32)
    plan = mukron.parametrize(model, mukron.base_shapes(depthwise, width=8))
    with pytest.raises(ValueError, match=r'layer "1" has 32 groups, and their number grows.*exclude=\("1",\)'):
        method(model, plan)
    method(model, plan, exclude=("1",))
    FOOF(model, plan)
    method(model)  # without a plan nothing is scaled


def test_a_skipped_step_leaves_no_operators_behind():
    """Those that it tried are a second set of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = KFAC(model, lr=0.1)
    for scale in (1.0, float("nan")):
        optimizer.zero_grad()
        (F.cross_entropy(model(torch.randn(5, 4)), torch.randint(3, (5,))) * scale).backward()
        optimizer.step()
        assert bool(optimizer._operators) == (optimizer.skipped == 0)
    assert optimizer.skipped == 1


def test_a_state_of_another_format_is_refused():
    model = nn.Sequential(nn.Linear(4, 3))
    state = KFAC(model).state_dict()
    KFAC(model).load_state_dict(state)
    del state["mukron"]["format"]
    with pytest.raises(ValueError, match="this state has format 1"):
        KFAC(model).load_state_dict(state)
