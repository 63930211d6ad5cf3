"""What a run leaves in its folder, and what a folder refuses."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
import torch

from mukron.data import load
from mukron.train import Run, RunConfig, RunError, train

DIGITS = load("digits")
CONFIG = RunConfig(width=64, base_width=16, samples=256, test_samples=64, batch=64, epochs=3, lr=0.002)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "deeper" / "run"
    return folder, train(CONFIG.replace(evaluate_every=2, record=["distance"]), folder, dataset=DIGITS)


def test_the_files_say_the_same(finished):
    folder, run = finished
    assert RunConfig.load(folder / "config.json") == run.config
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row.pop("seal") for row in rows]
    assert rows == list(run.epochs)
    with (folder / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 3
    for row, cells in zip(rows, table, strict=True):
        assert {name: float(cell) for name, cell in cells.items() if cell} == row
    assert "test_loss" not in rows[0]
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["reason"], result["final"]) == ("finished", "", rows[-1])
    best = run.best("test_accuracy")
    assert result["best"]["test_accuracy"] == {"epoch": best["epoch"], "value": best["test_accuracy"]}
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["state"]["step"] == 12


def test_a_finished_run_is_read_and_not_run_again(finished):
    folder, run = finished
    again = train(run.config, folder, dataset=DIGITS, progress=lambda at: pytest.fail("it ran"))
    assert again == run == Run.load(folder)
    assert again.stored
    assert not run.stored


def test_a_run_comes_back_from_json(finished):
    _, run = finished
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_best_and_final():
    rows = [{"epoch": 1, "test_loss": 2.0, "test_accuracy": 0.1, "x": 1}, {"epoch": 2, "test_loss": None}]
    rows.append({"epoch": 3, "test_loss": 1.0, "test_accuracy": 0.05, "x": 0})
    run = Run(CONFIG, "finished", rows)
    assert run.final == rows[2]
    assert run.best("test_loss")["epoch"] == 3
    assert run.best("test_accuracy")["epoch"] == 1
    assert run.best("x", lowest=True)["epoch"] == 3
    assert run.best("x", lowest=False)["epoch"] == 1
    with pytest.raises(RunError, match="is low or high best"):
        run.best("x")
    with pytest.raises(RunError, match=r"no epoch of this run has it; they have .*'test_accuracy'"):
        run.best("train_loss")
    assert Run(CONFIG, "diverged").final == {}


def test_numbers_that_are_not_finite_are_none(tmp_path):
    observed = {"mine": float("nan"), "tensor": torch.tensor(0.5), "numpy": np.float32(0.25), "count": 3}
    run = train(CONFIG.replace(epochs=1), tmp_path, dataset=DIGITS, observe=[lambda at: observed])
    assert [run.final[name] for name in observed] == [None, 0.5, 0.25, 3]
    assert Run.load(tmp_path) == run


def test_another_run_is_refused(finished):
    folder, run = finished
    with pytest.raises(RunError, match=r"holds another run: lr 0\.002 there and 0\.5 here, seed 0 there and 1 here\."):
        train(run.config.replace(lr=0.5, seed=1), folder, dataset=DIGITS)


def test_begin_anew(tmp_path):
    first = train(CONFIG.replace(epochs=1), tmp_path, dataset=DIGITS)
    (tmp_path / "tensorboard").mkdir()
    second = train(CONFIG.replace(epochs=1, seed=1), tmp_path, dataset=DIGITS, resume=False)
    assert second.final["train_loss"] != first.final["train_loss"]
    assert Run.load(tmp_path) == second
    assert not (tmp_path / "tensorboard").exists()


def test_a_run_that_could_not_begin_leaves_no_trace(tmp_path, finished):
    folder, run = finished
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for wrong in ({"data": "digitz"}, {"model": "vgg19"}, {"width": 4}, {"method_options": {"exclude": ["x"]}}):
        with pytest.raises(ValueError, match=r"unknown|pools images|shrinks|no layer"):
            train(run.config.replace(**wrong), tmp_path / "new")
        assert not (tmp_path / "new").exists()
        with pytest.raises(ValueError, match=r"unknown|pools images|shrinks|no layer"):
            train(run.config.replace(**wrong), folder, resume=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_users_own_empty_folder_stays(tmp_path):
    with pytest.raises(ValueError, match="unknown data set"):
        train(CONFIG.replace(data="digitz"), tmp_path)
    assert tmp_path.exists()


def test_what_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file/run: Not a directory; free space or choose .*\(--out\)"):
        train(CONFIG, tmp_path / "file" / "run", dataset=DIGITS)
    for name in ("config.json", "metrics.jsonl", "metrics.csv", "result.json", "checkpoint.pt"):
        folder = tmp_path / f"without {name}"
        (folder / name / "in the way").mkdir(parents=True)
        with pytest.raises(RunError, match=rf"cannot write .*{name}: .*; free space or choose another folder"):
            train(CONFIG, folder, dataset=DIGITS, resume=False)
        assert not [path for path in folder.iterdir() if path.name.endswith(".part")]


def test_a_full_disk_is_told(tmp_path):
    """Files may not grow as large as a checkpoint: torch's writer breaks off half-way."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(RunError, match=r"cannot write .*checkpoint\.pt: File too large; free space or choose"):
            train(CONFIG, tmp_path, dataset=DIGITS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "checkpoint.pt").exists()
    assert not list(tmp_path.glob(".*"))
    assert train(CONFIG, tmp_path, dataset=DIGITS).status == "finished"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", "", r"damaged, it ends with epoch 0 and result\.json with 1"),
        ("metrics.jsonl", None, r"damaged, it ends with epoch 0 and result\.json with 1"),
        ("metrics.jsonl", "[]\n", "damaged, line 1: expected values by name, found"),
        ("config.json", "{", "damaged, not a JSON file"),
        ("config.json", '{"lr": -1}', "damaged, lr=-1: expected a number above 0"),
        ("config.json", None, "missing, beside files of a run"),
        ("result.json", "", "damaged, not a JSON file"),
        ("result.json", '{"format": "mukron.run", "version": 1}', "damaged, run: there is no 'status'"),
    ],
)
def test_a_damaged_file_is_told_by_its_name_and_the_way_out(name, content, message, tmp_path):
    config = CONFIG.replace(epochs=1)
    train(config, tmp_path, dataset=DIGITS)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=rf"{re.escape(name)}: {message}.*--restart \(resume=False\)"):
        train(config, tmp_path, dataset=DIGITS)
    assert not train(config, tmp_path, dataset=DIGITS, resume=False).stored


def test_a_damaged_checkpoint_is_told(tmp_path):
    def stop(at):
        if at.step == 6:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(CONFIG, tmp_path, dataset=DIGITS, progress=stop)
    checkpoint = tmp_path / "checkpoint.pt"
    whole = checkpoint.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        checkpoint.write_bytes(damaged)
        with pytest.raises(
            RunError, match=r"checkpoint\.pt: damaged, .*delete checkpoint.pt to train this run from its beginning"
        ):
            train(CONFIG, tmp_path, dataset=DIGITS)
    checkpoint.write_bytes(whole)
    content = torch.load(checkpoint, weights_only=True)
    content["model"]["fc1.weight"] = torch.zeros(3, 3)
    torch.save(content, checkpoint)
    with pytest.raises(
        RunError, match=r"checkpoint does not fit what 'mlp' builds now: .*size mismatch for fc1.weight"
    ):
        train(CONFIG, tmp_path, dataset=DIGITS)
    torch.save({"format": "mukron.checkpoint", "version": 99}, checkpoint)
    with pytest.raises(ValueError, match="format version 99, this mukron reads version 1"):
        train(CONFIG, tmp_path, dataset=DIGITS)
    checkpoint.unlink()
    assert train(CONFIG, tmp_path, dataset=DIGITS).status == "finished"


def test_folders_without_a_run(tmp_path):
    with pytest.raises(RunError, match=r"there is no run \(no config.json\)"):
        Run.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file; a run needs a folder"):
        train(CONFIG, tmp_path / "file", dataset=DIGITS)


def test_a_damaged_record_is_told(tmp_path):
    train(CONFIG.replace(epochs=1), tmp_path, dataset=DIGITS)
    (tmp_path / "metrics.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: damaged, Expecting property name"):
        Run.load(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "seconds": 1.0}\n{"epoch": ')  # killed while it wrote
    assert [row["epoch"] for row in Run.load(tmp_path).epochs] == [1]
