"""Runs that are killed or interrupted go on bit for bit: weights, optimizer and every recorded number."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import mukron
from mukron.data import load
from mukron.optim.saving import opened
from mukron.train import Run, RunConfig, RunError, build, train

DIGITS = load("digits")
NET = """
from torch import nn

def make(width):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10)
    )
"""
KFAC = RunConfig(
    width=64,
    base_width=16,
    samples=512,
    test_samples=100,
    batch=100,
    epochs=5,
    lr=0.002,
    augment=["crop"],
    schedule="cosine",
    warmup=1,
    weight_decay=1e-3,
    method_options={"memory": "ema:0.95", "factor_every": 2, "inverse_every": 2},
    record=["features", "distance", "spectra"],
)
DROPOUT = KFAC.replace(model="dropout_net:make", method="sgd", method_options={}, lr=0.1, record=[])
MIXED = DROPOUT.replace(method="shampoo", method_options={"fallback": "adamw", "fallback_lr": 1e-3}, lr=0.02)
CASES = {"kfac": KFAC, "dropout": DROPOUT, "mixed": MIXED}


@pytest.fixture(autouse=True)
def _dropout_net(tmp_path, monkeypatch):
    (tmp_path / "dropout_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """From a case to the folder in which its run was trained in one go; each is trained once."""
    folders: dict[str, Path] = {}

    def train_once(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp(case)
            train(CASES[case], folders[case], dataset=DIGITS)
        return folders[case]

    return train_once


def kill_in(folder: Path, config: RunConfig, where: str) -> None:
    """A process of its own trains in that folder until it stands at a given place; there it is killed."""
    config.save(folder.parent / "killed.json")
    code = f"""
    import os, time
    from mukron.train import RunConfig, train

    def stand():
        print("here", flush=True)
        time.sleep(600)

    def at_a_step(at):
        if at.step == 13:  # five steps an epoch: in the third
            stand()

    replace = os.replace

    def at_the_third_checkpoint(part, path):
        at_the_third_checkpoint.times += str(path).endswith("checkpoint.pt")
        if at_the_third_checkpoint.times == 3:
            stand()
        replace(part, path)

    at_the_third_checkpoint.times = 0
    place = {where!r}
    if place == "checkpoint":
        os.replace = at_the_third_checkpoint
    config = RunConfig.load({str(folder.parent / "killed.json")!r}).trusted()
    train(config, {str(folder)!r}, progress=at_a_step if place == "step" else None)
    """
    path = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout.readline() == "here\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL


def lines(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in ("seconds", "seal")} for row in rows]


def saved(folder: Path) -> dict:
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    checkpoint["state"].pop("seconds")
    for row in checkpoint["state"]["rows"]:
        row.pop("seconds")
    for values in checkpoint["optimizer"]["state"].values():
        values |= {name: opened(values[name]) for name in ("kept", "mukron") if name in values}
    return checkpoint


def differences(one, other, path="") -> list[str]:
    """Where two nested states differ in so much as a bit."""
    if isinstance(one, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, dict):
        if set(one) != set(other):
            return [f"{path}: {set(one) ^ set(other)}"]
        return [each for name in one for each in differences(one[name], other[name], f"{path}/{name}")]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        return [
            each for n, (a, b) in enumerate(zip(one, other, strict=True)) for each in differences(a, b, f"{path}/{n}")
        ]
    return [] if one == other else [f"{path}: {one} and {other}"]


def assert_same(folder: Path, uninterrupted: Path) -> None:
    assert lines(folder) == lines(uninterrupted)
    assert differences(saved(folder), saved(uninterrupted)) == []  # weights, momentum, factors, random streams
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + len(lines(folder))


@pytest.mark.parametrize(
    ("case", "where"), [("kfac", "step"), ("kfac", "checkpoint"), ("dropout", "step"), ("mixed", "step")]
)
def test_a_killed_run_goes_on_bit_for_bit(case, where, tmp_path, uninterrupted):
    config, folder = CASES[case], tmp_path / "killed"
    kill_in(folder, config, where)
    rows = lines(folder)
    assert len(rows) == (
        2 if where == "step" else 3
    )  # in the third epoch, or after it, before its checkpoint was there
    assert Run.load(folder).status == "interrupted"
    assert saved(folder)["state"]["epoch"] == 2
    run = train(config, folder, dataset=DIGITS)
    assert run.status == "finished"
    assert_same(folder, uninterrupted(case))
    names = {"config.json", "metrics.jsonl", "metrics.csv", "result.json", "checkpoint.pt", "checkpoint.before.pt"}
    assert {path.name for path in folder.iterdir()} == names  # nothing half written is left


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", [1, 13, 15])
def test_an_interrupted_run_goes_on_bit_for_bit(case, step, tmp_path, uninterrupted):
    """At the start, in the midst of an epoch, and at its last step."""
    config, folder = CASES[case], tmp_path / "interrupted"

    def press(at):
        if at.step == step and at.row is None:
            signal.raise_signal(signal.SIGINT)

    stopped = train(config, folder, dataset=DIGITS, progress=press)
    assert stopped.status == "interrupted"
    assert saved(folder)["state"]["step"] == step
    assert Run.load(folder) == stopped
    assert (folder / "result.json").exists()
    going_on = []
    run = train(config, folder, dataset=DIGITS, progress=lambda at: going_on.append((folder / "result.json").exists()))
    assert run.status == "finished"
    assert not any(going_on)  # a run that goes on has no result
    assert_same(folder, uninterrupted(case))


def test_interrupted_at_the_last_step_a_run_is_finished(tmp_path):
    def press(at):
        if at.step == 25 and at.row is None:
            signal.raise_signal(signal.SIGINT)

    assert train(KFAC, tmp_path, dataset=DIGITS, progress=press).status == "finished"


def test_checkpoints_may_be_rare(tmp_path, uninterrupted):
    """Killed in the fourth epoch, it goes on from the second's checkpoint; rows that came after are written again."""

    def kill(at):
        if at.step == 18:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(KFAC, tmp_path / "rare", dataset=DIGITS, progress=kill, checkpoint_every=2)
    assert len(lines(tmp_path / "rare")) == 3
    assert saved(tmp_path / "rare")["state"]["epoch"] == 2
    train(KFAC, tmp_path / "rare", dataset=DIGITS, checkpoint_every=2)
    assert_same(tmp_path / "rare", uninterrupted("kfac"))


def test_spectra_older_than_the_checkpoint_are_remembered(tmp_path):
    """One step an epoch, one inverse in ten: what is recorded in the epochs between is that of the last inverse."""
    config = KFAC.replace(batch=None, epochs=6, record=["spectra"], method_options={"inverse_every": 10}, lr=1e-4)

    def kill(at):
        if at.step == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(config, tmp_path / "killed", dataset=DIGITS, progress=kill)
    train(config, tmp_path / "killed", dataset=DIGITS)
    train(config, tmp_path / "whole", dataset=DIGITS)
    assert lines(tmp_path / "killed")[-1]["largest/fc1.A"] > 0
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_another_version_is_said_and_goes_on(tmp_path):
    config = KFAC.replace(epochs=2, schedule="constant")
    train(config, tmp_path, dataset=DIGITS)
    versions = {"mukron": mukron.__version__, "torch": torch.__version__}
    assert json.loads((tmp_path / "result.json").read_text())["versions"] == versions
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["versions"] == versions
    checkpoint["versions"]["torch"] = "1.0"
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    with pytest.warns(
        UserWarning, match=rf"written by torch 1\.0, here is {re.escape(torch.__version__)}\. The run goes"
    ):
        assert train(config.replace(epochs=3), tmp_path, dataset=DIGITS).status == "finished"


@pytest.mark.parametrize("schedule", ["constant", "step:1,4"])
def test_more_epochs_continue_a_finished_run(schedule, tmp_path):
    config = KFAC.replace(schedule=schedule, epochs=3)
    train(config, tmp_path / "longer", dataset=DIGITS)
    assert train(config.replace(epochs=5), tmp_path / "longer", dataset=DIGITS).final["epoch"] == 5
    train(config.replace(epochs=5), tmp_path / "whole", dataset=DIGITS)
    assert_same(tmp_path / "longer", tmp_path / "whole")
    assert RunConfig.load(tmp_path / "longer" / "config.json").epochs == 5
    with pytest.raises(RunError, match="holds another run: epochs 5 there and 4 here"):
        train(config.replace(epochs=4), tmp_path / "longer", dataset=DIGITS)


def test_a_schedule_that_knows_its_end_is_not_extended(tmp_path):
    train(KFAC.replace(epochs=2), tmp_path, dataset=DIGITS)
    with pytest.raises(
        RunError, match="holds a run of 2 epochs; a cosine schedule that ends after 3 has other learning"
    ):
        train(KFAC.replace(epochs=3), tmp_path, dataset=DIGITS)


def test_one_process_at_a_time(tmp_path):
    def intrude(at):
        if at.step == 1:
            with pytest.raises(RunError, match="another process is training there"):
                train(KFAC, tmp_path, dataset=DIGITS)

    assert train(KFAC.replace(epochs=1), tmp_path, dataset=DIGITS, progress=intrude).status == "finished"


def test_the_last_checkpoint_is_what_was_evaluated(tmp_path):
    """In evaluation mode: dropout is off, and batch norm uses its averages."""
    final = train(DROPOUT, tmp_path / "run", dataset=DIGITS).final
    data = DIGITS.subset(DROPOUT.samples, DROPOUT.test_samples)
    model = build(DROPOUT, data).model
    model.load_state_dict(saved(tmp_path / "run")["model"])
    with torch.no_grad():
        output = model.eval()(data.prepare(data.test.inputs))
    assert final["test_loss"] == pytest.approx(torch.nn.functional.cross_entropy(output, data.test.targets).item())
