"""Augmentations: what each may do to an image, and that a seed settles all."""

from __future__ import annotations

import pytest
import torch

from mukron.data import AUGMENTATIONS, DataError, augmentation


def batch(samples: int = 200, size: int = 32, channels: int = 3) -> torch.Tensor:
    """No pixel is black, so what comes from outside shows."""
    return 0.1 + 0.8 * torch.rand(samples, channels, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_seed_settles_all(name, channels):
    x = batch(channels=channels)
    before, given = torch.get_rng_state(), x.clone()
    augment = augmentation([name], seed=2**62 + 5)
    y = augment(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, given)  # the batch itself is left alone
    assert torch.equal(y, augment(x))  # the function has no memory
    assert torch.equal(y, augmentation([name], seed=2**62 + 5)(x))
    assert not torch.equal(y, augmentation([name], seed=1)(x))
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.min() >= 0
    assert y.max() <= 1
    changed = (y != x).flatten(1).any(1).float().mean()
    assert changed > 0.4


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_sample_is_drawn_on_its_own(name):
    same = batch(1).expand(100, -1, -1, -1)
    y = augmentation([name], seed=0)(same)
    expected = {"flip": 2, "crop": 50, "cutout": 80, "autoaugment": 20}[name]
    assert len(torch.unique(y.flatten(1), dim=0)) >= expected


def test_flip_flips_half():
    x = batch(400)
    y = augmentation(["flip"], seed=0)(x)
    flipped = (y == x.flip(-1)).flatten(1).all(1)
    kept = (y == x).flatten(1).all(1)
    assert bool((flipped ^ kept).all())
    assert 160 < flipped.sum() < 240


def test_crop_shifts_by_four_pixels_at_most():
    x = batch(100)
    y = augmentation(["crop"], seed=0)(x)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    shifts = set()
    for before, after in zip(padded, y, strict=True):
        fits = [
            (top, left)
            for top in range(9)
            for left in range(9)
            if torch.equal(before[:, top : top + 32, left : left + 32], after)
        ]
        assert len(fits) == 1
        shifts.update(fits)
    assert {0, 8} <= {top for top, _ in shifts}  # up to both ends, either way
    assert {0, 8} <= {left for _, left in shifts}


@pytest.mark.parametrize("mean", [None, (0.01, 0.02, 0.03)])
def test_cutout_covers_a_square_of_16_at_most(mean):
    x = batch(300)
    y = augmentation(["cutout"], seed=0, mean=mean)(x)
    sizes = []
    for before, after in zip(x, y, strict=True):
        covered = (before != after).any(0)
        rows, columns = covered.any(1).nonzero()[:, 0], covered.any(0).nonzero()[:, 0]
        square = covered[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert bool(square.all())  # a full rectangle
        sizes += [len(rows), len(columns)]
        filled = after[:, covered]
        assert torch.equal(filled, torch.tensor(mean or (0.0, 0.0, 0.0))[:, None].expand_as(filled))
    assert max(sizes) == 16
    assert min(sizes) >= 8  # the middle lies within the image
    assert 0.4 < sizes.count(16) / len(sizes) < 0.7  # 17 of 32 places: 0.53


def test_names_are_done_in_order():
    x = batch(50)
    y = augmentation(["crop", "flip", "autoaugment", "cutout"], seed=0)(x)
    z = augmentation(["cutout", "autoaugment", "flip", "crop"], seed=0)(x)
    assert not torch.equal(y, z)
    assert (y == 0).flatten(1).any(1).all()  # cut out at the end


def test_no_names_no_function():
    assert augmentation([], seed=0) is None


def test_an_unknown_name_is_refused():
    with pytest.raises(DataError, match="unknown augmentation 'mixup'; known: crop, flip, cutout, autoaugment"):
        augmentation(["flip", "mixup"], seed=0)
