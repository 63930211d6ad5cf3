"""Fisher targets of many networks at once."""

from __future__ import annotations

import pytest
import torch

from mukron.curvature import Exact, Fisher, MonteCarlo, RandomSigns, drawn_targets, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_class_is_the_first_of_races_whose_speeds_are_the_probabilities(dtype):
    """Classes first or last; one-hot of the class minus its probabilities."""
    f = 3 * torch.randn(40, 10, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    [found] = targets(f, MonteCarlo(), "categorical", 1, torch.Generator().manual_seed(7))
    p = f.softmax(1).movedim(1, -1)
    u = torch.rand(120, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    y = (-torch.log1p(-u) / p.reshape(-1, 10)).argmin(1).reshape(40, 3)
    expected = torch.nn.functional.one_hot(y, 10) - p
    assert torch.allclose(found, expected.movedim(-1, 1).to(dtype), atol=1e-6)


@pytest.mark.parametrize("fisher", [MonteCarlo(), RandomSigns()], ids=str)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_a_batch_draw_in_turn_what_the_batch_draws(fisher, likelihood, dtype):
    """Parts of any size: torch's own draws come in groups, or begin another stream in each call."""
    f = torch.randn(41, 3, 10, dtype=dtype, generator=torch.Generator().manual_seed(0))
    whole, parts = (torch.Generator().manual_seed(3) for _ in range(2))
    [at_once] = targets(f, fisher, likelihood, -1, whole)
    in_turn = [v for part in f.split([7, 1, 32, 1]) for v in targets(part, fisher, likelihood, -1, parts)]
    assert torch.allclose(torch.cat(in_turn), at_once, atol=1e-6)
    assert torch.equal(whole.get_state(), parts.get_state())


@pytest.mark.parametrize("fisher", [MonteCarlo(), RandomSigns()], ids=str)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_network_draws_what_it_would_draw_alone(fisher, likelihood, dtype):
    """Step after step, with outputs that are not finite among them."""
    ours, theirs = ([torch.Generator().manual_seed(seed) for seed in (5, 5, 6)] for _ in range(2))
    for step in range(3):
        f = 3 * torch.randn(3, 20, 10, dtype=dtype, generator=torch.Generator().manual_seed(step))
        f[2, 4, 1] = float("nan") if step == 1 else 1.0
        found = drawn_targets(f, fisher, likelihood, ours)
        for own, output, generator in zip(found, f, theirs, strict=True):
            [alone] = targets(output, fisher, likelihood, -1, generator)
            assert torch.equal(own.nan_to_num(9), alone.nan_to_num(9))


def second_moment(f, fisher, likelihood="categorical", seed=0):
    """The mean of v v^T over samples and draws, [classes, classes]."""
    vectors = targets(f, fisher, likelihood, 1, torch.Generator().manual_seed(seed))
    return sum(v.mT @ v for v in vectors) / len(f)


def outputs(sureness, samples=64, classes=5):
    """Logits that favour one class each, the more the surer."""
    f = torch.randn(samples, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    f[torch.arange(samples), torch.arange(samples) % classes] += sureness
    return f


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("fisher", [RandomSigns(20_000), MonteCarlo(20_000)], ids=str)
def test_drawn_vectors_have_the_second_moment_of_the_exact_ones(fisher, likelihood):
    f = outputs(2.0, samples=8)
    exact, found = (second_moment(f, kind, likelihood) for kind in (Exact(), fisher))
    assert torch.allclose(found, exact, atol=0.03 * float(exact.diagonal().max()))


def test_signs_know_the_curvature_of_a_sure_model_from_one_draw():
    """Drawn targets are the likely class nearly always: B is nearly zero, or many times too large."""
    f = outputs(8.0)
    exact = float(second_moment(f, Exact()).trace())
    ratios = {
        kind: torch.tensor([float(second_moment(f, kind(), seed=seed).trace()) / exact for seed in range(400)])
        for kind in (RandomSigns, MonteCarlo)
    }
    assert ratios[RandomSigns].std() < 0.2
    assert ratios[MonteCarlo].std() > 1
    assert (ratios[MonteCarlo] < 0.1).double().mean() > 0.5
    for ratio in ratios.values():
        assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / 20


@pytest.mark.parametrize("sureness", [0.0, 1.0, 8.0])
def test_with_two_classes_one_draw_of_signs_is_exact(sureness):
    f = outputs(sureness, classes=2)
    f = f if sureness else torch.zeros_like(f)
    exact = second_moment(f, Exact())
    for seed in range(5):
        assert torch.allclose(second_moment(f, RandomSigns(), seed=seed), exact, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("classes", [3, 5, 10])
def test_signs_of_an_unsure_model_have_the_right_length_too(classes):
    """With equal probabilities |v|^2 is the trace of diag(p) - p p^T in every draw."""
    f = torch.zeros(40, classes, dtype=torch.float64)
    [v] = targets(f, RandomSigns(), "categorical", 1, torch.Generator().manual_seed(0))
    assert torch.allclose(v.square().sum(1), torch.full((40,), 1 - 1 / classes, dtype=torch.float64))
    assert torch.allclose(v.sum(1), torch.zeros(40, dtype=torch.float64), atol=1e-12)


def test_texts_of_what_is_drawn():
    assert Fisher.of("signs:4") == RandomSigns(draws=4)
    assert Fisher.of("mc") == MonteCarlo()
    with pytest.raises(ValueError, match="unknown fisher 'exact:4'; known: 'signs', 'mc', 'exact', 'empirical'"):
        Fisher.of("exact:4")
    with pytest.raises(ValueError, match="draws must be at least 1"):
        Fisher.of("signs:0")
