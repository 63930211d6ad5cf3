"""Language data: texts as bytes, arrays of tokens, windows and their targets."""

import numpy as np
import pytest
import torch

from mukron.data import DATASETS, DataError, load
from mukron.data.tokens import text_dataset


def test_the_text_that_comes_with_the_package():
    dataset = load("coriolanus")
    source = DATASETS["coriolanus"]
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (source.train, source.test, 256)
    start = bytes(dataset.train.inputs[0].tolist()).decode()
    assert start.startswith("First Citizen:")
    assert torch.equal(dataset.train.inputs[0, 1:], dataset.train.targets[0, :-1])
    assert dataset.train.targets[0, -1] == dataset.train.inputs[1, 0]
    assert load("coriolanus", length=32).input_shape == (32,)


def test_train_and_test_do_not_overlap():
    text = bytes(range(200)) * 5
    dataset = text_dataset("numbers", text, length=10)
    joined = [*dataset.train.inputs.flatten().tolist(), *dataset.test.inputs.flatten().tolist()]
    assert len(dataset.train) == 89  # 900 bytes, the last of which is a target alone
    assert len(dataset.test) == 9
    assert joined[:890] == list(text[:890])
    assert joined[890:] == list(text[900:990])


def test_a_file_of_ones_own(tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_bytes("Größe, ".encode() * 200)
    dataset = load(str(text), length=16, samples=20)
    assert (len(dataset.train), dataset.classes, dataset.tokens) == (20, 256, "bytes")
    np.save(tmp_path / "tokens.npy", np.arange(2000, dtype=np.uint16) % 500)
    tokens = load(str(tmp_path / "tokens.npy"), length=16)
    assert (tokens.classes, tokens.tokens, tokens.input_shape) == (500, "numbers", (16,))
    assert load(str(tmp_path / "tokens.npy"), vocabulary=512).classes == 512


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.txt: cannot be read: No such file or directory"):
        load(str(tmp_path / "nowhere.txt"))
    (tmp_path / "short.txt").write_text("to be")
    with pytest.raises(DataError, match="5 tokens, too few for a window of length=64"):
        load(str(tmp_path / "short.txt"))
    with pytest.raises(DataError, match="takes no option 'size'; its options: length, vocabulary"):
        load(str(tmp_path / "short.txt"), size=3)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(DataError, match="expected an array of NumPy"):
        load(str(tmp_path / "text.npy"))
    for name, array, message in (
        ("matrix", np.zeros((2, 3), dtype=int), r"expected token numbers \[tokens\], got \[2, 3\] int64"),
        ("floats", np.zeros(300), r"expected token numbers \[tokens\], got \[300\] float64"),
        ("negative", np.full(300, -1), "token numbers begin at 0, got -1"),
    ):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(DataError, match=message):
            load(str(tmp_path / f"{name}.npy"))
    np.save(tmp_path / "tokens.npy", np.arange(2000) % 500)
    with pytest.raises(DataError, match="vocabulary=100, but there are 500 tokens"):
        load(str(tmp_path / "tokens.npy"), vocabulary=100)
    with pytest.raises(DataError, match="length=0: expected at least 1 token"):
        load("coriolanus", length=0)
