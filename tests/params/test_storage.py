"""Files that mukron writes are whole, last, and say when they were changed."""

from __future__ import annotations

import json
import os
import random

import pytest

import mukron
from mukron.models import MLP
from mukron.params import ParametrizationError
from mukron.params.storage import read_json, sealed, unsealed, write_json, write_text, write_whole


def test_a_changed_file_is_refused_and_the_way_out_is_named(tmp_path):
    path = tmp_path / "shapes.json"
    mukron.base_shapes(MLP, width=8).save(path)
    text = path.read_text()
    path.write_text(text.replace("784", "785", 1))
    with pytest.raises(ParametrizationError, match=r'shapes\.json: damaged, or edited.*take out "seal" if you'):
        mukron.BaseShapes.load(path)


@pytest.mark.parametrize("seed", range(40))
def test_data_comes_back_or_is_refused(seed, tmp_path):
    rng = random.Random(seed)
    data = {"a": [1, 2.5, -0.0, 1e-300, None, True], "b": {"ö": "\ud800 \x00", "1": {"x": []}}, "c": float("inf")}
    write_json(tmp_path / "data.json", data)
    assert read_json(tmp_path / "data.json") == data
    text = bytearray((tmp_path / "data.json").read_bytes())
    text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
    (tmp_path / "data.json").write_bytes(text)
    try:
        read = read_json(tmp_path / "data.json")
    except ValueError:
        return
    assert {name: value for name, value in read.items() if name in data} == data


def test_what_python_makes_of_data_does_not_matter():
    """Tuples become lists, and keys become texts."""
    data = {"a": (1, 2), "b": {1: "x", 2.5: "y"}}
    assert unsealed(json.loads(json.dumps(sealed(data))), "here") == json.loads(json.dumps(data))


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(new), replace(old, new)))
    write_whole(tmp_path / "file", lambda file: file.write(b"content"), sole=True)
    assert done == [str(tmp_path / ".file.part"), tmp_path / "file", str(tmp_path)]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("before")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device.*/file"):
        write_whole(tmp_path / "file", fail)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


def test_a_stream_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 100) == b"text"
    assert pipe.is_fifo()
    os.close(reader)
