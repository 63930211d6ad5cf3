"""Where data sets are looked for, and which layouts are taken as they are."""

from __future__ import annotations

import gzip
import lzma
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mukron.data import DATASETS, DataError, data_folder, load, where, word_pairs


def write(folder: Path, contents: dict[str, bytes], rename=lambda name: name, pack=lambda content: content) -> None:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / rename(name)).write_bytes(pack(content))


def test_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MUKRON_DATA", str(tmp_path / "env"))
    assert data_folder() == tmp_path / "env"
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert data_folder("~/data") == Path.home() / "data"
    (tmp_path / "env").write_text("")
    with pytest.raises(DataError, match=r"MUKRON_DATA: .*env is a file, not a folder"):
        data_folder()
    with pytest.raises(DataError, match=r"--data-dir: .*env is a file, not a folder"):
        data_folder(tmp_path / "env")
    monkeypatch.delenv("MUKRON_DATA")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "mukron"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "mukron"


@pytest.mark.parametrize("inside", ["MNIST/raw", "MNIST", "mnist"])
@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_mnist_in_its_usual_layouts(mnist, server, contents, tmp_path, inside, suffix, pack):
    write(tmp_path / inside, contents["mnist"], lambda name: name + suffix, pack)
    assert len(load("mnist", tmp_path).train) == 4
    assert not server.asked


def test_mnist_by_its_older_names(mnist, contents, tmp_path):
    write(tmp_path / "mnist", contents["mnist"], lambda name: name.replace("-idx", ".idx"))
    assert len(load("mnist", tmp_path, download=False).train) == 4


@pytest.mark.parametrize("straight", ["MNIST", "MNIST/raw"])
def test_a_folder_may_be_the_data_sets_own(mnist, contents, tmp_path, straight):
    write(tmp_path / "MNIST/raw", contents["mnist"])
    assert where("mnist", tmp_path / straight).folder == tmp_path / "MNIST/raw"
    assert len(load("mnist", tmp_path / straight, download=False).train) == 4
    with pytest.raises(DataError, match="fashion-mnist: no train-images"):  # the same names, but not its folder
        load("fashion-mnist", tmp_path / straight, download=False)


def test_mnist_is_not_taken_for_fashion_mnist(mnist, contents, tmp_path):
    write(tmp_path / "FashionMNIST/raw", contents["mnist"])
    with pytest.raises(DataError, match="not the file of fashion-mnist that it should be"):
        load("fashion-mnist", tmp_path, download=False)


def test_cifar_in_its_binary_layout(cifar100, contents, tmp_path):
    write(tmp_path / "cifar-100-binary", contents["cifar100"])
    for folder in (tmp_path, tmp_path / "cifar-100-binary"):
        assert load("cifar100", folder, download=False).test.targets.tolist() == [42]


@pytest.mark.parametrize(("name", "pickled"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_pickled_cifar_is_not_read(name, pickled, tmp_path):
    write(tmp_path / pickled, {"data_batch_1": b"c__builtin__\nexit\n(tR."})
    for folder in (tmp_path, tmp_path / pickled):
        with pytest.raises(DataError, match=rf"{pickled} is there, but it is Python pickle.*mukron data fetch {name}"):
            load(name, folder, download=False)


@pytest.mark.parametrize("inside", ["wikitext-2", "text/wikitext-2"])
def test_wikitext_in_its_usual_layouts(wikitext2, contents, tmp_path, inside):
    write(tmp_path / inside, contents["wikitext2"], lambda name: f"{name.split('.')[1]}.txt.xz", lzma.compress)
    assert load("wikitext2", tmp_path, download=False, min_count=0, window=1).vocabulary == ("a", "b")


def test_a_list_in_a_folder_of_texts(pairs_list, server, tmp_path):
    write(tmp_path / "text", {"wordsim353.tsv": server.files["wordsim353.tsv"]})
    assert len(word_pairs(tmp_path, download=False)) == 2


def test_a_cut_off_file_is_named(mnist, contents, tmp_path):
    write(
        tmp_path / "MNIST/raw",
        contents["mnist"],
        lambda name: f"{name}.gz",
        lambda content: gzip.compress(content)[:-9],
    )
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: cannot be read.*fetch mnist --force"):
        load("mnist", tmp_path, download=False)


def test_a_data_set_of_ones_own(mnist, contents, tmp_path, monkeypatch):
    """The catalogue is a dictionary: a user's files in a known format become a data set by name."""
    files = tuple(replace(file, sha256=None) for file in mnist.files)
    monkeypatch.setitem(DATASETS, "mine", replace(mnist, name="mine", folders=("Mine",), files=files, downloads=()))
    write(tmp_path / "Mine", contents["mnist"])
    assert load("mine", tmp_path).name == "mine"
    cut = tmp_path / "Mine/t10k-images-idx3-ubyte"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte: 27 bytes, expected 28: cut off"):
        load("mine", tmp_path)


def test_wrong_requests():
    with pytest.raises(
        DataError, match=r"unknown data set 'minst' \(did you mean 'mnist'\?\); known: digits, mnist, fashion-mnist"
    ):
        load("minst")
    with pytest.raises(DataError, match="digits takes no option 'window'; its options: none"):
        load("digits", window=3)
    with pytest.raises(DataError, match="imagenet takes no option 'window'; its options: size"):
        load("imagenet", window=3)
    with pytest.raises(DataError, match="wordsim353 is a list to judge word embeddings"):
        load("wordsim353")
    with pytest.raises(DataError, match=r"imagenet: no train, val under .*cannot be downloaded"):
        load("imagenet", "/nowhere")
