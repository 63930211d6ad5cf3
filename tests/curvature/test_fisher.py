"""Fisher targets of many networks at once."""

from __future__ import annotations

import pytest
import torch

from mukron.curvature import MonteCarlo, drawn_targets, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_class_is_drawn_as_torch_draws_it(dtype):
    """Classes first or last; one-hot of the class minus its probabilities."""
    f = 3 * torch.randn(40, 10, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    [found] = targets(f, MonteCarlo(), "categorical", 1, torch.Generator().manual_seed(7))
    p = f.softmax(1).movedim(1, -1)
    y = torch.multinomial(p.reshape(-1, 10), 1, generator=torch.Generator().manual_seed(7)).reshape(40, 3)
    expected = torch.nn.functional.one_hot(y, 10) - p
    assert torch.allclose(found, expected.movedim(-1, 1).to(dtype), atol=1e-6)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_network_draws_what_it_would_draw_alone(likelihood, dtype):
    """Step after step, with outputs that are not finite among them."""
    ours, theirs = ([torch.Generator().manual_seed(seed) for seed in (5, 5, 6)] for _ in range(2))
    for step in range(3):
        f = 3 * torch.randn(3, 20, 10, dtype=dtype, generator=torch.Generator().manual_seed(step))
        f[2, 4, 1] = float("nan") if step == 1 else 1.0
        found = drawn_targets(f, likelihood, ours)
        for own, output, generator in zip(found, f, theirs, strict=True):
            [alone] = targets(output, MonteCarlo(), likelihood, -1, generator)
            assert torch.equal(own.nan_to_num(9), alone.nan_to_num(9))
