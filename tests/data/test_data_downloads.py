"""Downloads: what comes whole is kept, all else leaves nothing behind and says what to do."""

from __future__ import annotations

import gzip
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mukron.data import DATASETS, DataError, fetch, load, word_pairs


def everything(folder: Path) -> set[str]:
    """All files, and hidden leftovers."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_download_is_put_where_torchvision_looks(mnist, server, tmp_path):
    dataset = load("mnist", tmp_path)
    assert everything(tmp_path) == {f"MNIST/raw/{download.name}" for download in mnist.downloads}
    assert dataset.train.inputs.shape == (4, 1, 2, 3)
    assert dataset.train.targets.tolist() == [1, 0, 2, 1]
    load("mnist", tmp_path)
    assert len(server.asked) == 4  # the second time nothing is downloaded


def test_only_the_missing_file_is_downloaded(mnist, server, tmp_path):
    load("mnist", tmp_path)
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    server.asked.clear()
    load("mnist", tmp_path)
    assert server.asked == ["t10k-labels-idx1-ubyte.gz"]


@pytest.mark.parametrize("name", ["cifar100", "wikitext2"])
def test_of_an_archive_only_what_is_needed_is_unpacked(name, request, tmp_path):
    source = request.getfixturevalue(name)
    folder = tmp_path / "data"
    fetch(name, folder)
    home = source.folders[0]
    assert everything(folder) == {f"{home}/{file.name}" for file in source.files}
    assert everything(tmp_path) == {f"data/{path}" for path in everything(folder)}  # nothing climbed out
    assert not Path("/tmp/mukron-outside.txt").exists()


def test_others_may_read_what_was_downloaded(pairs_list, tmp_path):
    old = os.umask(0o022)
    try:
        fetch("wordsim353", tmp_path / "new")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new/wordsim353.tsv").stat().st_mode) == 0o644


def test_a_wrong_checksum_leaves_nothing_and_says_what_to_do(mnist, server, tmp_path):
    server.files["train-images-idx3-ubyte.gz"] = b"something else"
    with pytest.raises(DataError, match="another sha256") as caught:
        load("mnist", tmp_path)
    said = str(caught.value)
    assert f"{server.address}/train-images-idx3-ubyte.gz" in said
    assert f"put the file into {tmp_path / 'MNIST/raw'}" in said
    assert "try again" in said
    assert "MUKRON_DATA" in said
    assert everything(tmp_path) == set()


def test_an_endless_download_is_broken_off(mnist, server, tmp_path):
    name = mnist.downloads[0].name
    server.endless.add(name)
    with pytest.raises(
        DataError, match=rf"could not download {name} .*more than its {mnist.downloads[0].size:,} bytes"
    ):
        load("mnist", tmp_path)
    assert server.sent < 50_000_000
    assert not any(name in path or ".fetch" in path for path in everything(tmp_path))


def test_what_decompresses_without_end_is_not_read(mnist, tmp_path):
    load("mnist", tmp_path)
    path = tmp_path / "MNIST/raw" / mnist.downloads[0].name
    path.write_bytes(gzip.compress(bytes(20_000_000)))
    with pytest.raises(DataError, match=rf"{path}: cannot be read \(more than [\d,]+ bytes, which no file of this"):
        load("mnist", tmp_path)


def test_https_comes_first():
    for source in DATASETS.values():
        for download in source.downloads:
            assert list(download.urls) == sorted(download.urls, key=lambda url: url.startswith("http:"))


@pytest.mark.parametrize("name", ["mnist", "cifar100"])
def test_a_connection_that_breaks_off_leaves_nothing(name, request, server, tmp_path):
    source = request.getfixturevalue(name)
    last = source.downloads[-1].name
    server.cut.add(last)
    with pytest.raises(DataError, match=f"could not download {last} .*(broke off|another sha256)"):
        load(name, tmp_path)
    assert not any(last.removesuffix(".gz") in path or ".fetch" in path for path in everything(tmp_path))
    server.cut.clear()
    load(name, tmp_path)  # and trying again works


def test_offline_without_a_copy(mnist, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
    downloads = tuple(replace(each, urls=(f"{closed}/{each.name}",)) for each in mnist.downloads)
    monkeypatch.setitem(DATASETS, "mnist", replace(mnist, downloads=downloads))
    with pytest.raises(DataError, match="no connection") as caught:
        load("mnist", tmp_path / "data")
    assert "train-images-idx3-ubyte.gz" in str(caught.value)
    assert str(tmp_path / "data" / "MNIST" / "raw") in str(caught.value)
    assert everything(tmp_path) == set()


def test_offline_with_a_copy(mnist, server, tmp_path):
    fetch("mnist", tmp_path)
    server.files.clear()
    assert len(load("mnist", tmp_path).train) == 4


def test_without_download_nothing_is_asked_or_written(mnist, server, tmp_path):
    with pytest.raises(DataError, match="mukron data fetch mnist") as caught:
        load("mnist", tmp_path / "data", download=False)
    assert "train-images-idx3-ubyte" in str(caught.value)
    assert str(tmp_path / "data") in str(caught.value)
    assert not server.asked
    assert not (tmp_path / "data").exists()


def test_the_next_address_is_tried(pairs_list, server, tmp_path, monkeypatch):
    (download,) = pairs_list.downloads
    urls = (f"{server.address}/gone.tsv", *download.urls)
    monkeypatch.setitem(DATASETS, "wordsim353", replace(pairs_list, downloads=(replace(download, urls=urls),)))
    assert word_pairs(tmp_path) == [("Tiger", "cat", 7.35), ("tiger", "tiger", 10.0)]
    assert server.asked == ["gone.tsv", "wordsim353.tsv"]
    server.files.clear()
    with pytest.raises(DataError, match=r"gone\.tsv: 404 .*; .*wordsim353\.tsv: 404"):
        word_pairs(tmp_path / "other")


def test_an_archive_that_the_user_put_there_is_used(cifar100, server, tmp_path):
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(server.files["cifar-100-binary.tar.gz"])
    assert load("cifar100", tmp_path, download=False).train.targets.tolist() == [7, 99]
    assert not server.asked


def test_a_damaged_archive_that_the_user_put_there_is_named(cifar100, server, tmp_path):
    given = tmp_path / "cifar-100-binary.tar.gz"
    given.write_bytes(server.files["cifar-100-binary.tar.gz"][:-20])
    with pytest.raises(DataError, match=r"binary\.tar\.gz: damaged.*fetch cifar100 --force"):
        load("cifar100", tmp_path)
    assert not server.asked
    fetch("cifar100", tmp_path, force=True)
    assert len(load("cifar100", tmp_path, download=False).train) == 2


def test_a_damaged_file_is_named_and_replaced_on_request_alone(mnist, server, tmp_path):
    fetch("mnist", tmp_path)
    labels = tmp_path / "MNIST/raw/train-labels-idx1-ubyte"
    labels.write_bytes(b"damaged")  # plain, so it comes before the whole .gz beside it
    server.asked.clear()
    for attempt in (load, fetch):
        with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: not the file.*delete it.*fetch mnist --force"):
            attempt("mnist", tmp_path)
    assert labels.read_bytes() == b"damaged"
    assert not server.asked
    fetch("mnist", tmp_path, force=True)
    assert not labels.exists()
    assert len(load("mnist", tmp_path, download=False).train) == 4


def test_who_reads_the_old_file_is_not_disturbed(pairs_list, tmp_path):
    """A new file takes the old one's place; it is not written over it."""
    (tmp_path / "wordsim353.tsv").write_text("the old file")
    with open(tmp_path / "wordsim353.tsv") as reading:
        fetch("wordsim353", tmp_path, force=True)
        assert reading.read() == "the old file"
    assert len(word_pairs(tmp_path, download=False)) == 2


def test_a_forced_download_that_fails_keeps_the_old_files(mnist, server, tmp_path):
    fetch("mnist", tmp_path)
    server.cut.update(server.files)
    with pytest.raises(DataError):
        fetch("mnist", tmp_path, force=True)
    assert len(load("mnist", tmp_path, download=False).train) == 4


def test_unpacking_that_stops_half_way_leaves_nothing(cifar100, tmp_path, monkeypatch):
    def half(stream, out, length):
        out.write(stream.read(100))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", half)
        with pytest.raises(KeyboardInterrupt):
            fetch("cifar100", tmp_path)
    assert everything(tmp_path) == set()


def test_a_folder_that_cannot_be_written_is_named(mnist, tmp_path):
    (tmp_path / "MNIST").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write to the data folder .*MUKRON_DATA"):
        fetch("mnist", tmp_path)


def test_a_stage_that_vanishes_meanwhile_is_another_downloads(pairs_list, tmp_path, monkeypatch):
    (tmp_path / ".fetch-other").mkdir()
    glob = Path.glob

    def just_before_it_ends(path, pattern):
        for found in list(glob(path, pattern)):
            found.rmdir()
            yield found

    monkeypatch.setattr(Path, "glob", just_before_it_ends)
    assert len(word_pairs(tmp_path)) == 2


def test_a_killed_download_leaves_nothing_that_could_be_taken_for_data(pairs_list, server, tmp_path):
    """kill -9 while half of the file has come; what is left under way goes once it is a day old."""
    server.stuck.add("wordsim353.tsv")
    code = f"""
        from dataclasses import replace
        from mukron.data import DATASETS, Download, word_pairs
        source = DATASETS["wordsim353"]
        DATASETS["wordsim353"] = replace(source, downloads=({pairs_list.downloads[0]!r},))
        word_pairs({str(tmp_path)!r})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not server.asked or not everything(tmp_path):
        assert process.poll() is None, "the download ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(path.startswith(".fetch-") for path in everything(tmp_path))
    with pytest.raises(DataError, match="no wordsim353"):
        word_pairs(tmp_path, download=False)
    server.stuck.clear()
    assert len(word_pairs(tmp_path)) == 2
    (left,) = tmp_path.glob(".fetch-*")
    os.utime(left, (0, 0))
    fetch("wordsim353", tmp_path, force=True)
    assert everything(tmp_path) == {"wordsim353.tsv"}


def test_a_missing_package_is_named(pairs_list, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match=r"needs pooch.*pip install 'mukron\[studies\]'"):
        word_pairs(tmp_path)
