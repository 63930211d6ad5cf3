"""``mukron data`` as a user runs it."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from mukron.cli.data import data_app
from mukron.data import DATASETS

app = typer.Typer()
app.add_typer(data_app, name="data")


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout, " ".join(result.stderr.split())


def row(output: str, name: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.startswith(f"{name} "))
    return re.split(r"  +", line.strip())


def test_list(mnist, tmp_path):
    listed, _ = run("list", "--data-dir", tmp_path)
    assert all(row(listed, name) for name in DATASETS)
    assert row(listed, "digits") == ["digits", "images 8x8", "1,500", "297", "10", "-", "built in"]
    assert row(listed, "cifar10")[2:] == ["50,000", "10,000", "10", "170.1 MB", "no"]
    assert row(listed, "mnist")[-1] == "no"
    run("fetch", "mnist", "--data-dir", tmp_path)
    assert row(run("list", "--data-dir", tmp_path)[0], "mnist")[-1] == str(tmp_path / "MNIST/raw")


def test_the_folder_from_the_environment(pairs_list, tmp_path, monkeypatch):
    monkeypatch.setenv("MUKRON_DATA", str(tmp_path))
    assert run("fetch", "wordsim353", "digits")[0] == f"wordsim353: {tmp_path}\ndigits: built in\n"
    assert (tmp_path / "wordsim353.tsv").exists()
    assert row(run("list")[0], "wordsim353")[-1] == str(tmp_path)


@pytest.mark.parametrize("command", [("list",), ("verify",), ("fetch", "mnist")])
def test_a_file_in_place_of_the_folder(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MUKRON_DATA", str(tmp_path / "file"))
    said, told = run(*command, code=2)
    assert said == ""
    assert "is a file, not a folder" in told


def test_fetch_twice_and_by_force(mnist, server, tmp_path):
    run("fetch", "mnist", "--data-dir", tmp_path)
    run("fetch", "mnist", "--data-dir", tmp_path)
    assert len(server.asked) == 4
    run("fetch", "mnist", "--data-dir", tmp_path, "--force")
    assert len(server.asked) == 8


def test_a_bar_in_a_terminal(mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich takes any stream for a terminal then
    _, shown = run("fetch", "mnist", "--data-dir", tmp_path)
    assert "train-images-idx3-ubyte.gz" in shown
    assert "100%" in shown or re.search(r"(\d+)/\1 bytes", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown))


def test_fetch_refuses_in_one_line(mnist, server, tmp_path):
    _, said = run("fetch", "digits", "nist", "--data-dir", tmp_path, code=2)
    assert "unknown data set 'nist' (did you mean 'mnist'?); known: digits, mnist" in said
    _, said = run("fetch", "imagenet", "--data-dir", tmp_path, code=2)
    assert "It cannot be downloaded" in said
    server.cut.update(server.files)
    _, said = run("fetch", "mnist", "--data-dir", tmp_path, code=2)
    assert "could not download train-images-idx3-ubyte.gz" in said


def test_verify(mnist, cifar100, tmp_path):
    _, said = run("verify", "--data-dir", tmp_path, code=2)
    assert f"no data sets in {tmp_path}; get one with 'mukron data fetch NAME'" in said
    run("fetch", "mnist", "cifar100", "--data-dir", tmp_path)
    said, _ = run("verify", "--data-dir", tmp_path)
    assert said == f"mnist: right, {tmp_path / 'MNIST/raw'}\ncifar100: right, {tmp_path / 'cifar-100-binary'}\n"
    images = tmp_path / "cifar-100-binary/test.bin"
    images.write_bytes(images.read_bytes()[:-1] + b"x")  # the right size, one byte wrong
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    said, _ = run("verify", "--data-dir", tmp_path, code=1)
    assert f"cifar100: {images}: not the file of cifar100" in said
    assert "mukron data fetch cifar100 --force" in said
    assert f"mnist: {tmp_path / 'MNIST/raw/t10k-labels-idx1-ubyte'}: missing" in said
    assert "mnist: right" not in said
    run("verify", "digits", "--data-dir", tmp_path)
    said, _ = run("verify", "cifar10", "--data-dir", tmp_path, code=1)
    assert said == "cifar10: not here; get it with 'mukron data fetch cifar10'\n"
    _, said = run("verify", "nist", code=2)
    assert "unknown data set" in said


@pytest.mark.parametrize("command", ["list", "fetch", "verify"])
def test_help(command):
    assert "--data-dir" in run(command, "--help")[0]
