"""A damaged checkpoint is found by its checksums, and the one before it serves."""

from __future__ import annotations

import errno
import json
import random
import shutil
import warnings
import zipfile

import pytest
import torch

from mukron.data import load
from mukron.train import Run, RunConfig, RunError, train
from mukron.train.records import RunFolder

DIGITS = load("digits")
CONFIG = RunConfig(width=32, base_width=16, samples=64, test_samples=16, batch=32, epochs=4, lr=0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in one go, and a copy of its folder that was stopped in its last epoch."""
    whole, stopped = (tmp_path_factory.mktemp(name) for name in ("whole", "stopped"))
    train(CONFIG, whole, dataset=DIGITS)

    def stop(at):
        if at.step == 7:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(CONFIG, stopped, dataset=DIGITS, progress=stop)
    return whole, stopped


@pytest.fixture
def stopped(whole, tmp_path):
    return shutil.copytree(whole[1], tmp_path / "run")


def flip(path, seed):
    content, rng = bytearray(path.read_bytes()), random.Random(seed)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def flat(value):
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return [(name, flat(item)) for name, item in value.items()]
    return [flat(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)


def test_no_flipped_bit_is_read_as_other_numbers(stopped):
    files = RunFolder(stopped)
    files.checkpoints.before.unlink()
    content, truth = files.checkpoints.last.read_bytes(), flat(files.saved())
    refused = 0
    for seed in range(150):
        files.checkpoints.last.write_bytes(content)
        flip(files.checkpoints.last, seed)
        try:
            read = files.saved()
        except RunError:
            refused += 1
        else:
            assert flat(read) == truth, seed  # a bit that means nothing
    assert refused > 130


def test_the_checkpoint_before_a_damaged_one_goes_on_to_the_same_weights(whole, stopped):
    last = stopped / "checkpoint.pt"
    content = last.read_bytes()
    start = content.index(b"PK", len(content) // 2) - 64  # the end of some tensor
    last.write_bytes(content[:start] + bytes(32) + content[start + 32 :])
    with pytest.warns(UserWarning, match=r"checkpoint\.pt: damaged, .*goes on from .*checkpoint\.before\.pt \(step 4"):
        assert RunFolder(stopped).saved() is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run = train(CONFIG, stopped, dataset=DIGITS)
    truth = Run.load(whole[0])
    assert [{**row, "seconds": 0} for row in run.epochs] == [{**row, "seconds": 0} for row in truth.epochs]
    weights = [torch.load(folder / "checkpoint.pt", weights_only=True)["model"] for folder in (whole[0], stopped)]
    assert flat(weights[0]) == flat(weights[1])


def test_a_damaged_checkpoint_never_takes_the_place_of_the_one_before(stopped):
    files = RunFolder(stopped)
    files.checkpoints.last.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="damaged"):
        checkpoint = files.saved()
    files.save(checkpoint, [])
    files.checkpoints.last.unlink()
    assert flat(files.saved()) == flat(checkpoint)


def test_both_are_damaged(stopped):
    for path in RunFolder(stopped).checkpoints.files:
        path.write_bytes(path.read_bytes()[:1000])
    said = r"checkpoint\.pt: damaged.*checkpoint\.before\.pt: damaged.*delete checkpoint\.pt and checkpoint\.before\.pt"
    with pytest.raises(RunError, match=said):
        train(CONFIG, stopped, dataset=DIGITS)


def test_a_process_killed_between_the_two_names_loses_nothing_else(whole, stopped):
    (stopped / "checkpoint.pt").unlink()  # it had become the one before, and the next had no name yet
    run = train(CONFIG, stopped, dataset=DIGITS)
    assert [row["train_loss"] for row in run.epochs] == [row["train_loss"] for row in Run.load(whole[0]).epochs]


@pytest.mark.parametrize("name", ["config.json", "result.json", "metrics.jsonl"])
def test_no_changed_number_of_a_record_is_read(name, whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    lines, truth = (folder / name).read_text().splitlines(), Run.load(folder)
    changed = 0
    for number, line in enumerate(lines):
        for place, character in enumerate(line):
            if character not in "1234567":
                continue
            other = line[:place] + chr(ord(character) + 1) + line[place + 1 :]
            (folder / name).write_text("\n".join([*lines[:number], other, *lines[number + 1 :], ""]))
            try:
                assert Run.load(folder) == truth  # the last digits of a number may mean nothing
            except ValueError:
                changed += 1
    assert changed > 20


def test_records_without_seals_are_read(whole, tmp_path):
    """Those of earlier versions, and those that were changed on purpose."""
    folder = shutil.copytree(whole[0], tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"epoch": row["epoch"], "seconds": 1}) + "\n" for row in rows)
    )
    config = json.loads((folder / "config.json").read_text())
    del config["seal"]
    (folder / "config.json").write_text(json.dumps({**config, "lr": 0.5}))
    run = Run.load(folder)
    assert run.config.lr == 0.5
    assert run.epochs[0] == {"epoch": 1, "seconds": 1}


@pytest.mark.parametrize(
    ("module", "reads", "error", "said"),
    [
        (zipfile, "ZipFile", PermissionError(errno.EACCES, "Permission denied"), "cannot be read: Permission denied"),
        (torch, "load", MemoryError(), "there is no memory to read it"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_damaged(
    module, reads, error, said, stopped, monkeypatch
):
    def refused(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(module, reads, refused)
        with pytest.raises(RunError, match=rf"checkpoint\.pt: {said}; nothing was changed"):
            train(CONFIG, stopped, dataset=DIGITS)
    assert RunFolder(stopped).saved()["state"]["step"] == 6


def test_the_checkpoint_brings_back_damaged_metrics(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    before = [dict(row) for row in Run.load(folder).epochs]
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 4', '"step": 5'))
    with pytest.raises(RunError, match=r"delete metrics\.jsonl and result\.json to go on from the checkpoint"):
        train(CONFIG, folder, dataset=DIGITS)
    metrics.unlink()
    (folder / "result.json").unlink()
    assert [dict(row) for row in train(CONFIG, folder, dataset=DIGITS).epochs] == before
