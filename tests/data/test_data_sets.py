"""Splits, subsets and what a network is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mukron.data import DataError, Dataset, Split, as_dataset, centred_one_hot, load
from mukron.data.dataset import image_dataset


def images(samples: int = 50, channels: int = 3, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, channels, 5, 4)
    return Split(
        torch.randint(256, shape, dtype=torch.uint8, generator=generator), torch.arange(samples)
    )  # the target tells which sample it is


def test_a_subset_is_drawn_by_its_seed():
    split = images()
    chosen = split.subset(20, seed=1)
    assert len(set(chosen.targets.tolist())) == 20  # without replacement
    assert torch.equal(chosen.inputs, split.inputs[chosen.targets])
    assert torch.equal(chosen.targets, split.subset(20, seed=1).targets)
    assert not torch.equal(chosen.targets, split.subset(20, seed=2).targets)
    assert torch.equal(split.subset(5, seed=1).targets, chosen.targets[:5])  # the smaller lies within the larger
    assert chosen.targets[:4].tolist() == [27, 35, 40, 38]  # and stays the same over versions
    split.subset(20, seed=-1), split.subset(20, seed=2**40)


def test_the_global_random_numbers_are_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    images().subset(20, seed=1)
    load("digits", samples=64, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_too_many_samples_are_refused():
    for samples in (51, 0, -3):
        with pytest.raises(DataError, match=f"a subset of {samples} samples was asked for; there are 50"):
            images().subset(samples, seed=0)


def test_samples_without_targets_are_refused():
    with pytest.raises(DataError, match="3 samples, but 2 targets"):
        Split(torch.zeros(3, 1, 2, 2), torch.zeros(2))


def test_moments_are_those_of_the_whole():
    data = image_dataset("made", images(), images(10, seed=1), classes=50)
    scaled = data.train.inputs.double() / 255
    assert torch.tensor(data.mean) == pytest.approx(scaled.mean((0, 2, 3)))
    assert torch.tensor(data.std) == pytest.approx(scaled.std((0, 2, 3), correction=0))
    some = data.subset(samples=7, seed=0)
    assert (some.mean, some.std) == (data.mean, data.std)
    assert len(some.train) == 7
    assert len(some.test) == 10
    assert len(data.subset(test_samples=4).test) == 4


def test_prepare():
    data = image_dataset("made", images(), images(10), classes=50)
    x = data.prepare(data.train.inputs)
    assert x.dtype == torch.float32
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    exact = data.prepare(data.train.inputs, torch.float64)
    by_hand = (data.train.inputs[3, 1, 2, 0].double() / 255 - data.mean[1]) / data.std[1]
    assert exact[3, 1, 2, 0] == pytest.approx(by_hand.item(), abs=1e-12)


def test_augmentations_come_before_the_normalization():
    data = image_dataset("made", images(), images(10), classes=50)
    seen = []

    def black(x):
        seen.append(x)
        return torch.zeros_like(x)

    x = data.prepare(data.train.inputs[:4], torch.bfloat16, augment=black)
    assert seen[0].dtype == torch.float32  # half precision comes last
    assert seen[0].min() >= 0
    assert seen[0].max() <= 1
    assert x.dtype == torch.bfloat16
    normalized = [-mean / std for mean, std in zip(data.mean, data.std, strict=True)]
    assert x[0, :, 0, 0].float().tolist() == pytest.approx(normalized, rel=0.01)


def test_a_channel_that_never_changes_stays_finite():
    flat = Split(torch.full((4, 1, 2, 2), 7, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    data = image_dataset("flat", flat, flat, classes=1)
    assert data.prepare(flat.inputs).abs().max() < 1e-5


def test_words_pass_through():
    words = Split(torch.tensor([[1, 2], [0, 1]]), torch.tensor([0, 2]))
    data = Dataset("text", words, words, classes=3, vocabulary=("a", "b", "c"))
    assert data.prepare(words.inputs, torch.bfloat16) is words.inputs
    assert data.input_shape == (2,)
    with pytest.raises(DataError, match="text: augmentations are for images"):
        data.prepare(words.inputs, augment=lambda x: x)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32"])
@pytest.mark.parametrize("numpy", [False, True])
def test_class_numbers_of_any_type(dtype, numpy):
    inputs, targets = np.zeros((4, 3), np.float32), np.array([1, 0, 1, 0]).astype(dtype)
    given = (inputs, targets) if numpy else (torch.from_numpy(inputs), torch.from_numpy(targets))
    data = as_dataset("mine", (given, given))
    for split in (data.train, data.test):
        assert split.targets.dtype == torch.int64
        assert split.targets.tolist() == [1, 0, 1, 0]
    assert data.classes == 2


def test_of_one_pair_there_is_nothing_to_test_on():
    data = as_dataset("mine", (torch.zeros(4, 3), torch.arange(4)))
    assert (len(data.train), len(data.test), data.classes) == (4, 0, 4)


def test_arrays_that_torch_alone_would_not_take():
    inputs = np.arange(12.0).reshape(4, 3)[::-1]  # from behind, and not to be written
    inputs.flags.writeable = False
    data = as_dataset("mine", (inputs, np.arange(4)))
    assert data.train.inputs[0].tolist() == [9, 10, 11]


def test_grey_images_get_a_channel():
    grey = np.random.RandomState(0).randint(256, size=(6, 5, 4)).astype(np.uint8)
    data = as_dataset("mine", ((grey, np.arange(6)), (grey[:2], np.arange(2))))
    assert data.input_shape == (1, 5, 4)
    assert data.test.inputs.shape == (2, 1, 5, 4)
    assert data.mean == pytest.approx((grey.mean() / 255,))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (torch.tensor([0, -1]), torch.tensor([0, 1]), "mine: targets are class numbers from 0 on, got -1"),
        (torch.tensor([0, 1]), torch.tensor([0, -2]), "mine: targets are class numbers from 0 on, got -2"),
        (
            torch.zeros(2, 2).long(),
            torch.tensor([0, 1]),
            r"targets of a sample are \[2\] to train on, but \[\] to test",
        ),
        (torch.tensor([0, 1]), torch.tensor([0.0, 1.0]), "to train on are torch.int64, those to test on torch.float32"),
        (torch.tensor([0.0, torch.inf]), torch.tensor([0.0, 1.0]), "mine: targets are not all finite"),
        (torch.tensor([[0, -1]]), torch.tensor([[0, 1]]), "from 0 on, or -100 for positions without a target, got -1"),
        (torch.zeros(0).long(), torch.tensor([0, 1]), "mine: there are no samples to train on"),
    ],
)
def test_targets_that_are_no_class_numbers_are_refused(train, test, message):
    with pytest.raises(DataError, match=message):
        as_dataset("mine", ((torch.zeros(len(train), 3), train), (torch.zeros(len(test), 3), test)))


def test_a_test_split_may_be_empty_but_not_of_another_shape():
    train = (torch.zeros(2, 3), torch.tensor([0, 1]))
    assert len(as_dataset("mine", (train, (torch.zeros(0), torch.zeros(0)))).test) == 0
    with pytest.raises(DataError, match=r"mine: a sample to train on is \[3\], but one to test on is \[4\]"):
        as_dataset("mine", (train, (torch.zeros(2, 4), torch.tensor([0, 1]))))


def test_a_whole_data_set_of_ones_own_is_checked():
    split = Split(torch.zeros(2, 3), torch.tensor([0, 5], dtype=torch.int32))
    data = as_dataset("mine", Dataset("other", split, split, classes=6))
    assert (data.name, data.classes, data.test.targets.dtype) == ("mine", 6, torch.int64)
    with pytest.raises(DataError, match="mine: target 5; those of 5 classes go to 4"):
        as_dataset("mine", Dataset("other", split, split, classes=5))


def test_moving():
    data = image_dataset("made", images(), images(10), classes=50)
    moved = data.to("meta")
    assert moved.train.inputs.device.type == moved.test.targets.device.type == "meta"
    assert moved.mean == data.mean
    assert data.train.inputs.device.type == "cpu"


def test_centred_one_hot():
    targets = centred_one_hot(torch.tensor([2, 0]), 4, torch.float64)
    assert targets.tolist() == [[-0.25, -0.25, 0.75, -0.25], [0.75, -0.25, -0.25, -0.25]]
    assert centred_one_hot(torch.tensor([1]), 3).dtype == torch.float32


def test_loading_a_subset():
    some = load("digits", samples=64, test_samples=32, seed=3)
    whole = load("digits")
    assert torch.equal(some.train.inputs, whole.subset(64, 32, seed=3).train.inputs)
    assert len(some.test) == 32
    assert some.mean == whole.mean
