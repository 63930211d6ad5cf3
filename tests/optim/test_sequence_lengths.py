"""The best learning rate does not depend on the length T of sequences, whatever the method.

A loss that is averaged over tokens is the same problem whether the network sees [samples, T, features], or every token
as a sample of its own: curvature sums over the same positions, so plain steps are the same. And with independent tokens
a longer sequence is just a larger batch, so steps have the same size at every T.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, FOOF, KFAC, Fixed, GaussNewton, Shampoo, Window
from mukron.curvature import AS_A_SUM, OVER_POSITIONS, OVER_SAMPLES

SAMPLES, FEATURES, WIDTH, CLASSES, IGNORED = 8, 5, 6, 3, -100
LENGTHS = (4, 16, 64)
PLAIN = {"lr": 1.0, "trust": None}


class Net(nn.Module):
    """Two layers over tokens; classes stand last, or second as for images."""

    def __init__(self, classes_second: bool = False) -> None:
        super().__init__()
        self.first, self.head, self.classes_second = (
            nn.Linear(FEATURES, WIDTH),
            nn.Linear(WIDTH, CLASSES),
            classes_second,
        )

    def forward(self, x):
        f = self.head(torch.tanh(self.first(x)))
        return f.movedim(-1, 1) if self.classes_second else f


def kfac(model, flat, **options):
    return KFAC(model, **{**PLAIN, "damping": 0.1, **options}, class_dim=None if flat else -1)


def foof(model, flat, **options):
    return FOOF(model, **{**PLAIN, "damping": 0.1, **options})


def gauss_newton(model, flat, **options):
    return GaussNewton(model, **{**PLAIN, "damping": 0.1, **options})


METHODS = {
    "kfac, mc": lambda model, flat: kfac(model, flat, fisher="mc:8"),
    "kfac, exact": lambda model, flat: kfac(model, flat, fisher="exact"),
    "kfac, empirical": lambda model, flat: kfac(model, flat, fisher="empirical"),
    "kfac, fixed": lambda model, flat: kfac(model, flat, fisher="exact", damping=Fixed(0.1, 0.1)),
    "foof": foof,
    "foof, rows": lambda model, flat: foof(model, flat, form="rows"),
    "foof, matrix": lambda model, flat: foof(model, flat, form="matrix"),
    "foof, fused": lambda model, flat: foof(model, flat, fused=True),
    "foof, fixed": lambda model, flat: foof(model, flat, damping=Fixed(0.1, 0.1)),
    "gauss-newton": gauss_newton,
    "shampoo": lambda model, flat: Shampoo(model, **PLAIN),
}


def network(**options) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def batch(length, seed=1, samples=SAMPLES):
    """Independent tokens, and classes that a linear teacher gives them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, length, FEATURES, generator=generator).double()
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0)).double()
    return x, (x @ teacher).argmax(-1)


def loss_of(model, f, y, **options):
    f = f.movedim(1, -1) if model.classes_second else f
    return F.cross_entropy(f.reshape(-1, CLASSES), y.flatten(), ignore_index=IGNORED, **options)


def change(make, batches, flat=False, model=None, loss=loss_of):
    """The change of every parameter at the last step, from the same weights at each, and the optimizer."""
    model = network() if model is None else model
    optimizer, start = make(model, flat), copy.deepcopy(model.state_dict())
    for x, y in batches:
        model.load_state_dict(start)
        optimizer.zero_grad()
        loss(model, model(x.flatten(0, 1) if flat else x), y).backward()
        optimizer.step()
    assert optimizer.skipped == 0
    return {name: value - start[name] for name, value in model.state_dict().items()}, optimizer


def assert_close(ours, theirs, tolerance=1e-9):
    for name, move in theirs.items():
        assert float((ours[name] - move).norm() / move.norm()) < tolerance, name


def size(moves):
    return float(torch.cat([move.flatten() for move in moves.values()]).norm())


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_a_step_has_the_same_size_at_every_length(make):
    sizes = [size(change(make, [batch(length)])[0]) for length in LENGTHS]
    slope = math.log(sizes[-1] / sizes[0]) / math.log(LENGTHS[-1] / LENGTHS[0])
    assert abs(slope) < 0.2, sizes


@pytest.mark.parametrize("length", [1, *LENGTHS])
@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_a_token_is_a_sample(make, length):
    tokens, _ = change(make, [batch(length)])
    samples, _ = change(make, [batch(length)], flat=True)
    assert_close(tokens, samples)


OVER_LENGTHS = {
    "kfac, exact": lambda model, flat: kfac(model, flat, fisher="exact", memory=EMA(0.7)),
    "kfac, empirical": lambda model, flat: kfac(model, flat, fisher="empirical", memory=EMA(0.7)),
    "kfac, window": lambda model, flat: kfac(model, flat, fisher="empirical", memory=Window(3)),
    "foof": lambda model, flat: foof(model, flat, memory=EMA(0.7)),
    "foof, window": lambda model, flat: foof(model, flat, memory=Window(3)),
}


@pytest.mark.parametrize("make", OVER_LENGTHS.values(), ids=OVER_LENGTHS)
def test_an_average_over_batches_of_several_lengths(make):
    """Each batch is weighted by its own length: the average of T times the average of 1 / T is not 1."""
    batches = [batch(length, seed) for seed, length in enumerate((2, 12, 3, 16))]
    tokens, _ = change(make, batches)
    samples, _ = change(make, batches, flat=True)
    assert_close(tokens, samples)


@pytest.mark.parametrize("make", [foof, gauss_newton], ids=["foof", "gauss-newton"])
class TestWithoutALikelihood:
    """FOOF and Gauss-Newton read from the derivative of the loss what K-FAC does."""

    def test_a_step_does_not_depend_on_the_reduction(self, make):
        x, y = batch(6)
        mean, optimizer = change(make, [(x, y)])
        assert optimizer.found_reduction == OVER_POSITIONS
        total, optimizer = change(make, [(x, y)], loss=lambda model, f, y: loss_of(model, f, y, reduction="sum"))
        assert optimizer.found_reduction == AS_A_SUM
        assert_close(total, mean)
        samples, optimizer = change(
            make, [(x, y)], loss=lambda model, f, y: loss_of(model, f, y, reduction="sum") / len(y)
        )
        assert optimizer.found_reduction == OVER_SAMPLES
        assert_close(samples, mean)

    def test_classes_are_found_where_they_are(self, make):
        last, _ = change(make, [batch(6)])
        second, optimizer = change(make, [batch(6)], model=network(classes_second=True))
        assert optimizer.capture.class_dim == 1
        assert_close(second, last)

    @pytest.mark.parametrize("classes_second", [False, True], ids=["last", "second"])
    def test_ignored_tokens_do_not_count(self, make, classes_second):
        x, y = batch(6)
        y[:, 4:] = IGNORED
        ours, _ = change(make, [(x, y)], model=network(classes_second=classes_second))
        cut, _ = change(make, [(x[:, :4], y[:, :4])])
        assert_close(ours, cut, 1e-6)  # weights of positions are float32

    def test_micro_batches_are_the_whole_batch(self, make):
        whole, _ = change(make, [batch(6)])
        model, (x, y) = network(), batch(6)
        optimizer, start = make(model, flat=False), copy.deepcopy(model.state_dict())
        for part in range(4):
            rows = slice(2 * part, 2 * part + 2)
            (loss_of(model, model(x[rows]), y[rows]) / 4).backward()
        optimizer.step()
        assert_close({name: value - start[name] for name, value in model.state_dict().items()}, whole)

    def test_it_is_saved_with_the_state(self, make):
        _, optimizer = change(make, [batch(6)])
        other = make(network(), flat=False)
        other.load_state_dict(optimizer.state_dict())
        assert other.found_reduction == OVER_POSITIONS

    def test_another_loss_is_a_mean_over_samples_and_nothing_is_told(self, make, recwarn):
        _, optimizer = change(make, [batch(6)], loss=lambda model, f, y: 30 * (f - f.detach() - 1).square().mean())
        assert optimizer.found_reduction is None
        _, optimizer = change(make, [batch(6)], loss=lambda model, f, y: 0.01 * loss_of(model, f, y))
        assert optimizer.found_reduction == ""
        assert not recwarn.list


def test_gauss_newton_takes_the_users_word_for_a_regression():
    def total(model, f, y):
        return (f - F.one_hot(y, CLASSES) - torch.arange(CLASSES)).square().sum() / 2

    mean, optimizer = change(gauss_newton, [batch(3)], loss=lambda *given: total(*given) / SAMPLES)
    assert optimizer.found_reduction is None
    ours, _ = change(lambda *given: gauss_newton(*given, reduction="sum"), [batch(3)], loss=total)
    assert_close(ours, mean)
