"""AutoAugment's operations against Pillow's, which the paper's own code used."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from mukron.data import autoaugment as aa


def photo(size: int = 32) -> np.ndarray:
    """Smooth in the large, rough in the small, with an uneven histogram."""
    random = np.random.RandomState(0)
    y, x = np.mgrid[:size, :size] / size
    channels = [90 + 80 * np.sin(5 * x + k) * np.cos(3 * y) + 20 * random.rand(size, size) for k in range(3)]
    return np.stack(channels, -1).clip(0, 255).astype(np.uint8)


def ours(operation, strength: float) -> np.ndarray:
    x = torch.from_numpy(photo()).permute(2, 0, 1)[None].double() / 255
    y = operation(x, torch.tensor([strength], dtype=torch.float64)[:, None, None, None]).clamp(0, 1)
    return (255 * y[0]).permute(1, 2, 0).numpy()


AFFINE = Image.Transform.AFFINE
SIZE = (32, 32)
COLOUR = {
    "colour": lambda image, s: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
    "posterize": lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "solarize": lambda image, s: ImageOps.solarize(image, 255 * (1 - abs(s))),
    "autocontrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
    "invert": lambda image, s: ImageOps.invert(image),
}
MOVES = {
    "shear_y": lambda image, s: image.transform(SIZE, AFFINE, (1, 0, 0, 0.3 * s, 1, 0)),
    "translate_x": lambda image, s: image.transform(SIZE, AFFINE, (1, 0, int(150 / 331 * 32 * s), 0, 1, 0)),
    "translate_y": lambda image, s: image.transform(SIZE, AFFINE, (1, 0, 0, 0, 1, int(150 / 331 * 32 * s))),
    "rotate": lambda image, s: image.rotate(30 * s),
}


def test_all_operations_are_compared():
    assert set(COLOUR) | set(MOVES) == set(aa.OPERATIONS) == {name for both in aa.POLICY for name, *_ in both}
    assert len(aa.POLICY) == 25


@pytest.mark.parametrize("name", COLOUR)
@pytest.mark.parametrize("strength", [-1.0, -3 / 9, 7 / 9, 1.0])
def test_colours_are_pillows_up_to_its_rounding(name, strength):
    expected = np.asarray(COLOUR[name](Image.fromarray(photo()), strength)).astype(float)
    result = ours(aa.OPERATIONS[name], strength)
    exact = name in ("equalize", "posterize", "invert")
    assert np.abs(result - expected).max() <= (1e-6 if exact else 2)  # Pillow rounds what it blends with, then cuts off
    assert np.abs(result - expected).mean() <= 1


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("strength", [-1.0, -3 / 9, 7 / 9, 1.0])
def test_moves_are_pillows(name, strength):
    expected = np.asarray(MOVES[name](Image.fromarray(photo()), strength)).astype(float)
    same = np.abs(ours(aa.OPERATIONS[name], strength) - expected).max(-1) < 1e-6
    assert same.mean() > 0.99  # a pixel may fall on the border between two


def test_equalize_and_autocontrast_leave_a_flat_channel():
    flat = torch.full((2, 3, 32, 32), 0.4)
    strength = torch.ones(2, 1, 1, 1)
    assert torch.equal(aa.equalize(flat, strength), flat)
    assert torch.equal(aa.autocontrast(flat, strength), flat)


def test_probabilities_and_signs():
    x = 0.02 + 0.96 * torch.rand(4000, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    y = aa.autoaugment(x, torch.Generator().manual_seed(1))
    kept = (x == y).flatten(1).all(1).double().mean()
    # An image stays if neither operation is done; with one channel, colour changes nothing.
    quiet = [math.prod(1 if name == "colour" else 1 - p for name, p, _ in both) for both in aa.POLICY]
    expected = sum(quiet) / 25
    assert kept == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 4000) ** 0.5)
    black = (y[:, 0] == 0).all(-1)  # rows that came from outside, after a move up or down
    up, down = black[:, -8:].all(-1), black[:, :8].all(-1)
    assert (up | down).sum() > 300
    assert 0.4 < up.sum() / (up | down).sum() < 0.6
