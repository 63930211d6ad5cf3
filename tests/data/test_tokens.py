"""Language data: texts as bytes, arrays of tokens, windows and their targets."""

import gzip
import io

import numpy as np
import pytest
import torch

from mukron.data import DATASETS, DataError, get_source, load, option_names
from mukron.data.tokens import text_dataset
from mukron.train import RunConfig


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
    with pytest.raises(DataError, match=r"short.txt: 5 tokens are too few: the last tenth.*Give at least 650 tokens"):
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
    for length in (0, "abc", 12.5, True):
        with pytest.raises(DataError, match=f"coriolanus: length={length!r}: expected a whole number from 1 on"):
            load("coriolanus", length=length)
    with pytest.raises(DataError, match="vocabulary='x': expected a whole number from 1 on"):
        load(str(tmp_path / "tokens.npy"), vocabulary="x")


def test_the_last_tenth_must_hold_a_window(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x" * 649)
    with pytest.raises(DataError, match="649 tokens are too few"):
        load(str(text))
    text.write_text("x" * 650)
    assert len(load(str(text)).test) == 1


def test_the_name_is_the_one_that_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("to be " * 200)
    (tmp_path / "folder").mkdir()
    for name in ("corpus.txt", "./corpus.txt", "folder/../corpus.txt"):
        assert load(name).name == name


def test_a_text_without_an_ending(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "enwik8").write_text("to be " * 200)
    assert load("enwik8", length=16).input_shape == (16,)
    assert option_names("enwik8") == ["length", "vocabulary"]
    (tmp_path / "texts").mkdir()
    with pytest.raises(DataError, match="texts: is a folder, and no data set has this name; give a text file"):
        load("texts")
    with pytest.raises(DataError, match="texts/nothing: cannot be read: No such file"):
        load("texts/nothing")
    with pytest.raises(DataError, match="unknown data set 'enwik9'; known: digits"):
        load("enwik9")


def test_files_that_are_no_texts_are_refused(tmp_path):
    array, file = np.arange(3000) % 50, io.BytesIO()
    np.save(file, array)
    np.savez(tmp_path / "z.npz", array)
    torch.save(torch.arange(3000), tmp_path / "t.pt")
    (tmp_path / "array.bin").write_bytes(file.getvalue())
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"to be " * 1000))
    for name, kind in (("z.npz", "an archive"), ("t.pt", "an archive"), ("array.bin", "an array of NumPy without")):
        with pytest.raises(DataError, match=f"{name}: is {kind}.*, not a text; unpack it, or save its token numbers"):
            load(str(tmp_path / name))
    with pytest.raises(DataError, match=r"is compressed \(.gz\), not a text"):
        load(str(tmp_path / "text.txt.gz"))


def test_arrays_that_are_no_token_numbers(tmp_path):
    path = tmp_path / "tokens.npy"
    path.touch()
    with pytest.raises(DataError, match=r"expected an array of NumPy, as numpy.save writes it"):
        load(str(path))
    np.save(path, np.array([2**63 + 5] * 3000, dtype=np.uint64))
    with pytest.raises(DataError, match="token number 9223372036854775813 is too large; the largest"):
        load(str(path))
    np.savez(tmp_path / "several.npz", np.arange(9))
    (tmp_path / "several.npz").rename(path)
    with pytest.raises(DataError, match="got several arrays"):
        load(str(path))


def test_another_name_of_a_data_set():
    assert get_source("tinyshakespeare") is DATASETS["shakespeare"]
    assert RunConfig(model="gpt", data="tinyshakespeare") == RunConfig(model="gpt", data="shakespeare")
