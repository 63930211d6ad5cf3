"""Readers against bytes and images made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mukron.data import DataError, imagenet, load
from mukron.data.images import parse_cifar, parse_idx

HERE = Path("a-file")


def test_idx():
    header = bytes((0, 0, 8, 3)) + bytes((0, 0, 0, 4)) + bytes((0, 0, 0, 2)) + bytes((0, 0, 0, 3))
    values = parse_idx(header + bytes(range(24)), HERE, 3)
    assert values.dtype == torch.uint8
    assert torch.equal(values, torch.arange(24, dtype=torch.uint8).reshape(4, 2, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x1f\x8b\x08\x00rest of a gzip", "a-file: not an IDX file of bytes in 1 dimensions .begins with 1f8b0800"),
        (bytes((0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 1, 7)), "begins with 00000802"),  # two dimensions
        (bytes((0, 0, 13, 1, 0, 0, 0, 0)), "begins with 00000d01"),  # floats
        (bytes((0, 0, 8, 1, 0, 0)), "not an IDX file"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 3, 7, 7)), "10 bytes, expected 11: cut off"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 3, 7, 7, 7, 7)), "12 bytes, expected 11"),
    ],
)
def test_a_wrong_idx_file_is_named(content, message):
    with pytest.raises(DataError, match=message):
        parse_idx(content, HERE, 1)


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_rows(label_bytes):
    """Red, then green, then blue, each row by row; of two labels the second counts."""
    image = np.random.RandomState(0).randint(256, size=(3, 32, 32)).astype(np.uint8)
    row = bytes([5] * (label_bytes - 1) + [3]) + image.tobytes()
    split = parse_cifar(row * 2, HERE, label_bytes, classes=10)
    assert split.targets.tolist() == [3, 3]
    assert torch.equal(split.inputs[1], torch.from_numpy(image))


def test_a_wrong_cifar_file_is_named():
    with pytest.raises(DataError, match="a-file: 3,072 bytes is no whole number of rows of 3,073 bytes"):
        parse_cifar(bytes(3072), HERE, 1, classes=10)
    with pytest.raises(DataError, match="a-file: 0 bytes"):
        parse_cifar(b"", HERE, 1, classes=10)
    with pytest.raises(DataError, match="label 200, expected 0 to 9"):
        parse_cifar(bytes([200]) + bytes(3072), HERE, 1, classes=10)


def test_digits():
    digits = load("digits")
    assert (len(digits.train), len(digits.test), digits.classes) == (1500, 297, 10)
    assert digits.input_shape == (1, 8, 8)
    assert digits.train.inputs.dtype == torch.uint8
    assert digits.train.inputs.max() == 255  # 16, the brightest
    assert digits.train.inputs.unique().numel() == 17
    assert digits.train.targets.bincount().min() > 130  # shuffled: no digit is left out
    assert digits.train.targets[:8].tolist() == load("digits").train.targets[:8].tolist()
    together = {bytes(image.numpy().tobytes()) for image in (*digits.train.inputs, *digits.test.inputs)}
    assert len(together) == 1797  # no test image is a training image


@pytest.fixture
def folder(tmp_path):
    """Two classes; image n of class c is all of one colour, 100 c + n, but for a stripe at the left edge."""
    for split, count in (("train", 6), ("val", 3)):
        for number, name in enumerate(("n01", "n02")):
            (tmp_path / split / name).mkdir(parents=True)
            for image in range(count):
                pixels = np.full((40, 60, 3), 100 * number + image, np.uint8)
                pixels[:, :5] = 255  # gone once the middle is cut out
                suffix = ("png", "PNG", "png")[image % 3]
                Image.fromarray(pixels).save(tmp_path / split / name / f"{image}.{suffix}")
    (tmp_path / "train/n01/notes.txt").write_text("not an image")
    return tmp_path


def test_a_folder_of_images(folder):
    data = load("imagenet", folder, size=8)
    assert data.train.inputs.shape == (12, 3, 8, 8)
    assert data.test.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.classes == 2
    for image, label in zip(data.train.inputs, data.train.targets, strict=True):
        assert image.unique().numel() == 1
        assert image.max() // 100 == label
    assert data.mean == (0.485, 0.456, 0.406)


def test_a_subset_of_a_folder_decodes_no_other_image(folder):
    some = load("imagenet", folder, size=8, samples=5, test_samples=2, seed=3)
    whole = load("imagenet", folder, size=8).subset(5, 2, seed=3)
    assert torch.equal(some.train.inputs, whole.train.inputs)
    assert torch.equal(some.train.targets, whole.train.targets)
    colours = set(some.train.inputs[:, 0, 0, 0].tolist())
    for path in (folder / "train").rglob("*.[pP][nN][gG]"):
        if np.asarray(Image.open(path))[0, 30, 0] not in colours:
            path.write_bytes(b"damaged")
    again = load("imagenet", folder, size=8, samples=5, test_samples=2, seed=3)
    assert torch.equal(again.train.inputs, some.train.inputs)
    with pytest.raises(DataError, match=r"\.(png|PNG): not an image, or damaged"):
        load("imagenet", folder, size=8)
    with pytest.raises(DataError, match="13 samples was asked for; there are 12"):
        load("imagenet", folder, samples=13)


def test_jpeg_and_grey_images(tmp_path):
    ramp = np.linspace(0, 255, 64 * 64).reshape(64, 64).astype(np.uint8)
    for split in ("train", "val"):
        (tmp_path / "ImageNet" / split / "a").mkdir(parents=True)
        Image.fromarray(ramp).save(tmp_path / "ImageNet" / split / "a" / "grey.JPEG", quality=95)
    image = load("imagenet", tmp_path, size=16).train.inputs[0]
    expected = torch.from_numpy(ramp.reshape(16, 4, 16, 4).mean((1, 3)))
    assert (image.double() - expected).abs().max() < 8
    assert torch.equal(image[0], image[2])


@pytest.fixture
def one_image(tmp_path):
    """A function that reads one image as all of a folder's."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)

    def read(image: Image.Image, **options) -> torch.Tensor:
        for split in ("train", "val"):
            image.save(tmp_path / split / "a" / "one.png", **options)
        return load("imagenet", tmp_path, size=16).train.inputs[0]

    return read


def test_grey_images_of_16_bits(one_image):
    """Pillow would cut all above 255 to white."""
    ramp = np.linspace(0, 65535, 16 * 16).reshape(16, 16)
    image = one_image(Image.fromarray(ramp.astype(np.uint16)))
    assert torch.equal(image, torch.from_numpy(np.rint(ramp.astype(np.uint16) / 257)).byte().expand(3, 16, 16))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.ones((16, 16), np.float32), r"one\.png: its pixels are floats \(mode F\)"),
        (np.full((16, 16), 70_000, np.int32), r"one\.png: its pixels go from 70000 to 70000; 8 or 16 bits are read"),
    ],
)
def test_pixels_that_no_scale_is_known_for_are_refused(one_image, values, message):
    with pytest.raises(DataError, match=message):
        one_image(Image.fromarray(values), format="TIFF")


def test_a_palette_with_transparency(one_image):
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    assert one_image(image, transparency=b"\x80\xff")[:, 0, 0].tolist() == [200, 100, 50]


def test_hidden_files_and_folders_are_skipped(folder):
    expected = load("imagenet", folder, size=8)
    (folder / "train/n01/._0.png").write_bytes(b"not an image")
    (folder / "train/.cache").mkdir()
    (folder / "val/.n03").mkdir()
    found = load("imagenet", folder, size=8)
    assert found.classes == 2
    assert torch.equal(found.train.inputs, expected.train.inputs)


def test_too_many_images_for_the_memory(folder, monkeypatch):
    monkeypatch.setattr(imagenet, "free_memory", lambda: 3000)
    with pytest.raises(DataError, match=r"18 images of 64x64 take 0\.0 GiB.*samples=.*size="):
        load("imagenet", folder)
    assert len(load("imagenet", folder, size=8, samples=8, test_samples=6).train) == 8  # 2,688 bytes


def test_free_memory():
    free = imagenet.free_memory()
    assert free is None or free > 2**20


def test_more_images_than_a_thread_takes_at_once(folder, monkeypatch):
    expected = load("imagenet", folder, size=8)
    monkeypatch.setattr(imagenet, "CHUNK", 5)
    assert torch.equal(load("imagenet", folder, size=8).train.inputs, expected.train.inputs)
    with pytest.raises(DataError, match="size=0: expected the side"):
        load("imagenet", folder, size=0)


def test_folders_that_are_not_by_class(folder, tmp_path):
    (folder / "val/n03").mkdir()
    with pytest.raises(DataError, match=r"val: classes that .*train does not have: n03"):
        load("imagenet", folder)
    (tmp_path / "flat/train").mkdir(parents=True)
    (tmp_path / "flat/val").mkdir()
    with pytest.raises(DataError, match="train: expected a folder for every class"):
        load("imagenet", tmp_path / "flat")
    (tmp_path / "flat/train/n01").mkdir()
    (tmp_path / "flat/val/n01").mkdir()
    with pytest.raises(DataError, match="train: no images"):
        load("imagenet", tmp_path / "flat")
    (tmp_path / "file/val").mkdir(parents=True)
    (tmp_path / "file/train").write_text("")
    with pytest.raises(DataError, match="train: is a file; expected a folder that holds one for every class"):
        load("imagenet", tmp_path / "file")
