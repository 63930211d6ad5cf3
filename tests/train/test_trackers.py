"""Trackers get the numbers of the record, once each; what they do wrong never reaches the run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch

from mukron.data import load
from mukron.train import RunConfig, RunError, train
from mukron.train import tracking as tracking_module

DIGITS = load("digits")
CONFIG = RunConfig(width=64, base_width=16, samples=256, test_samples=64, batch=64, epochs=3, lr=0.002)
DROPPED = CONFIG.replace(model="drop_net:make", data="digits", method="sgd")
DROP_NET = """
from torch import nn

def make(width):
    layers = nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10)
    return nn.Sequential(nn.Flatten(), *layers)
"""
ENTRY_POINTS = ("made", "start", "log", "finish")


class Notebook:
    """A tracker that keeps what it is told."""

    kept: list[Notebook]

    def __init__(self, run):
        self.run, self.rows, self.threads = run, {}, {threading.get_ident()}
        self.kept.append(self)

    def start(self, config):
        self.config = config
        self.threads.add(threading.get_ident())
        return self.run.id or f"number {len(self.kept)}"

    def log(self, step, metrics):
        assert step not in self.rows
        self.rows[step] = dict(metrics)
        self.threads.add(threading.get_ident())

    def finish(self, summary):
        self.summary = dict(summary)
        self.threads.add(threading.get_ident())


@pytest.fixture
def notebook():
    return type("Ours", (Notebook,), {"kept": []})


def rows_of(run):
    """What a tracker should have been told of a run."""
    return {
        row["step"]: {name: value for name, value in row.items() if name != "step" and value is not None}
        for row in run.epochs
    }


def without_seconds(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def stop_at(step):
    def stop(at):
        if at.step == step and at.row is None:
            raise InterruptedError("stopped by the test")

    return stop


def test_it_is_told_the_config_the_rows_and_the_end(notebook, tmp_path):
    config = CONFIG.replace(record=["distance"], evaluate_every=2)
    run = train(config, tmp_path / "mine", dataset=DIGITS, tracker=notebook)
    (kept,) = notebook.kept
    assert (kept.run.name, kept.run.folder, kept.run.id) == ("mine", tmp_path / "mine", None)
    assert RunConfig(**kept.config) == config
    assert kept.rows == rows_of(run)
    assert kept.summary["status"] == "finished"
    assert kept.summary["best"]["test_loss"]["value"] == run.best("test_loss")["test_loss"]
    assert len(kept.threads) == 1  # what it opens may belong to a thread, as SQLite's connections do
    assert kept.threads != {threading.get_ident()}
    train(config, tmp_path / "mine", dataset=DIGITS, tracker=notebook)
    assert len(notebook.kept) == 1  # the run had ended


def test_it_is_not_part_of_the_run(notebook, tmp_path):
    plain = train(CONFIG, tmp_path / "plain", dataset=DIGITS)
    watched = train(CONFIG, tmp_path / "watched", dataset=DIGITS, tracker=notebook)
    assert (tmp_path / "plain/config.json").read_text() == (tmp_path / "watched/config.json").read_text()
    assert without_seconds(plain.epochs) == without_seconds(watched.epochs)


@pytest.mark.parametrize("checkpoint_every", [1, 3])  # 3: killed without a checkpoint
def test_a_run_goes_on_where_it_was_and_tells_nothing_twice(notebook, tmp_path, checkpoint_every):
    options = {"dataset": DIGITS, "tracker": notebook, "checkpoint_every": checkpoint_every}
    with pytest.raises(InterruptedError):
        train(CONFIG, tmp_path, progress=stop_at(10), **options)
    first = notebook.kept[0]
    assert list(first.rows) == [4, 8]
    assert first.summary == {"status": "failed", "reason": "InterruptedError: stopped by the test"}
    run = train(CONFIG, tmp_path, **options)
    second = notebook.kept[1]
    assert (second.run.id, list(second.rows)) == ("number 1", [12])
    assert without_seconds({**first.rows, **second.rows}.values()) == without_seconds(rows_of(run).values())
    longer = train(CONFIG.replace(epochs=4), tmp_path, **options)
    third = notebook.kept[2]
    assert (third.run.id, list(third.rows), third.config["epochs"]) == ("number 1", [16], 4)
    assert third.rows[16] == rows_of(longer)[16]
    train(CONFIG, tmp_path, resume=False, **options)
    assert (notebook.kept[3].run.id, list(notebook.kept[3].rows)) == (None, [4, 8, 12])


def test_one_that_joins_later_gets_what_was_before(notebook, tmp_path):
    with pytest.raises(InterruptedError):
        train(CONFIG, tmp_path, dataset=DIGITS, progress=stop_at(10))
    run = train(CONFIG, tmp_path, dataset=DIGITS, tracker=notebook)
    assert notebook.kept[0].rows == rows_of(run)


def test_notes_that_are_damaged_begin_a_new_run(notebook, tmp_path):
    with pytest.raises(InterruptedError):
        train(CONFIG, tmp_path, dataset=DIGITS, progress=stop_at(10), tracker=notebook)
    for text in ("", "[]", "3", '{"a": 1}'):
        (tmp_path / "trackers.json").write_text(text)
        with pytest.raises(InterruptedError):
            train(CONFIG, tmp_path, dataset=DIGITS, progress=stop_at(9), tracker=notebook)
        assert (notebook.kept[-1].run.id, list(notebook.kept[-1].rows)) == (None, [4, 8])


def test_ctrl_c_is_said(notebook, tmp_path):
    def press(at):
        if at.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, tmp_path, dataset=DIGITS, tracker=notebook, progress=press)
    assert notebook.kept[0].summary["status"] == "interrupted"


def test_a_diverged_run_is_told(notebook):
    run = train(CONFIG.replace(method="sgd", lr=1e6), dataset=DIGITS, tracker=notebook)
    assert run.status == "diverged"
    assert (notebook.kept[0].summary["status"], notebook.kept[0].summary["reason"]) == ("diverged", run.reason)


@pytest.mark.parametrize("place", ENTRY_POINTS)
@pytest.mark.parametrize("error", [ConnectionError, SystemExit, "hangs"])
def test_one_that_fails_is_dropped_with_one_warning(notebook, place, error, tmp_path, monkeypatch):
    """In any of its methods, by an error, by leaving or by not answering; another tracker beside it goes on."""
    limit = f"{place.replace('made', 'start').upper()}_LIMIT"
    monkeypatch.setattr(tracking_module, limit, 2.0 if error == "hangs" else 60.0)
    released, calls = threading.Event(), []

    class Broken:
        def __init__(self, run):
            self.act("made")

        def start(self, config):
            self.act("start")

        def log(self, step, metrics):
            self.act("log")

        def finish(self, summary):
            self.act("finish")

        def act(self, now):
            calls.append(now)
            if now != place:
                return
            if error == "hangs":
                released.wait(30)
            else:
                raise error("no route to host\n(twice)")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = train(CONFIG, tmp_path, dataset=DIGITS, tracker=[Broken, notebook])
    released.set()
    (text,) = [str(warning.message) for warning in told if "tracker" in str(warning.message)]
    assert "Broken' failed and is not used any more: " in text
    assert ("no answer in 2 seconds" if error == "hangs" else "no route to host (twice). The run goes on") in text
    assert calls.count(place) == 1
    assert run.status == "finished"
    assert without_seconds(run.epochs) == without_seconds(train(CONFIG, dataset=DIGITS).epochs)
    assert notebook.kept[0].rows == rows_of(run)


def test_after_a_failure_the_next_sitting_sends_what_is_missing(notebook, tmp_path):
    class Flaky(notebook):
        def log(self, step, metrics):
            if step == 8 and len(self.kept) == 1:
                raise ConnectionError("gone")
            super().log(step, metrics)

    with pytest.warns(UserWarning, match="gone"), pytest.raises(InterruptedError):
        train(CONFIG, tmp_path, dataset=DIGITS, tracker=Flaky, progress=stop_at(10))
    run = train(CONFIG, tmp_path, dataset=DIGITS, tracker=Flaky)
    first, second = notebook.kept
    assert second.run.id == "number 1"
    assert {**first.rows, **second.rows} == rows_of(run)


def test_its_random_numbers_are_its_own(tmp_path, monkeypatch):
    (tmp_path / "drop_net.py").write_text(DROP_NET)
    monkeypatch.syspath_prepend(tmp_path)

    class Gambler:
        def __init__(self, run):
            self.draw()

        def draw(self, *_):
            torch.manual_seed(torch.randint(100, ()).item())
            np.random.seed(np.random.randint(100))
            random.seed(random.random())

        start = log = finish = draw

    plain, watched = train(DROPPED), train(DROPPED, tracker=Gambler)
    assert without_seconds(plain.epochs) == without_seconds(watched.epochs)


def test_names_are_read(tmp_path, monkeypatch):
    with pytest.raises(RunError, match=r"tracker='wandv': unknown; known: wandb, mlflow, tensorboard, or MODULE:CLASS"):
        train(CONFIG, tracker="wandv")
    with pytest.raises(RunError, match=r"tracker 'nowhere:T': No module named 'nowhere'"):
        train(CONFIG, tracker="nowhere:T")
    with pytest.raises(RunError, match=r"the class has no start, log, finish; a tracker has start, log, finish"):
        train(CONFIG, tracker=["collections:OrderedDict"])
    with pytest.raises(RunError, match="tracker=3: expected a name"):
        train(CONFIG, tracker=[3])
    with pytest.raises(RunError, match="tracker='tensorboard' needs a folder"):
        train(CONFIG, dataset=DIGITS, tracker="tensorboard")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "module", "install"),
    [
        ("wandb", "wandb", "pip install 'wandb>=0.19.11' brings it"),
        ("mlflow", "mlflow", "pip install 'mlflow>=2.10' brings it"),
        ("tensorboard", "torch.utils.tensorboard", "pip install tensorboard brings it"),
    ],
)
def test_a_missing_package_is_told_before_anything_is_trained(name, module, install, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunError) as caught:
        train(CONFIG, tmp_path, dataset=DIGITS, tracker=name, progress=lambda at: pytest.fail("it trained"))
    assert f"tracker={name!r}: " in str(caught.value)
    assert str(caught.value).endswith(install)


OWN = """
import json, os
from pathlib import Path

class Lines:
    def __init__(self, run):
        self.file = Path(os.environ["LINES"])
    def write(self, *said):
        with self.file.open("a") as file:
            file.write(json.dumps([os.environ.get("RANK"), *said]) + "\\n")
    def start(self, config):
        self.write("start", config["width"])
    def log(self, step, metrics):
        self.write("log", step)
    def finish(self, summary):
        self.write("finish", summary["status"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_process_alone_tracks(processes, tmp_path):
    """On the command line, by MODULE:CLASS."""
    (tmp_path / "own.py").write_text(OWN)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] if processes == 2 else []
    command = [sys.executable, "-m", *torchrun, "mukron", "train", "--width", "64", "--samples", "64", "--batch", "32"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [*command, "--epochs", "2", "--tracker", "own:Lines", "--tracker", "tensorboard", "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, "LINES": str(tmp_path / "lines"), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rank = "0" if processes == 2 else None
    told = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert told == [[rank, "start", 64.0], [rank, "log", 2], [rank, "log", 4], [rank, "finish", "finished"]]
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 1


# The packages themselves, without a network.


def test_tensorboard_reads_it(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pytest.raises(InterruptedError):
        train(CONFIG, tmp_path, dataset=DIGITS, progress=stop_at(10), tracker="tensorboard")
    run = train(CONFIG, tmp_path, dataset=DIGITS, tracker="tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(rows_of(run)[12])
    read = [(event.step, event.value) for event in events.Scalars("test_loss")]
    assert [step for step, _ in read] == [4, 8, 12]
    assert [value for _, value in read] == pytest.approx([row["test_loss"] for row in run.epochs])
    assert events.Tags()["tensors"] == ["config/text_summary"]
    train(CONFIG, tmp_path, dataset=DIGITS, resume=False)
    assert not (tmp_path / "tensorboard").exists()


def records_in(content):
    """The records of a file of W&B: seven bytes, then blocks of 32 KiB of pieces with a checksum, a length, a kind."""
    place, block, data = 7, 2**15, b""
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield data
            data = b""


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_wandb_keeps_it_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    with pytest.raises(InterruptedError):
        train(CONFIG, tmp_path, dataset=DIGITS, progress=stop_at(10), tracker="wandb")
    run = train(CONFIG, tmp_path, dataset=DIGITS, tracker="wandb")
    assert wandb.run is None
    deadline = time.monotonic() + 30
    ids, projects, history = set(), set(), {}
    while len(history) < 3 and time.monotonic() < deadline:  # the service of wandb may still be writing
        for file in sorted(
            (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime
        ):
            for data in records_in(file.read_bytes()):
                record = messages.Record()
                record.ParseFromString(data)
                if record.WhichOneof("record_type") == "run":
                    ids.add(record.run.run_id)
                    projects.add(record.run.project)
                if record.WhichOneof("record_type") == "history":
                    row = {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in record.history.item
                    }
                    history[record.history.step.num or row["_step"]] = row
        time.sleep(0.1)
    assert (len(ids), projects) == (1, {"ours"})
    assert sorted(history) == [4, 8, 12]
    for step, row in rows_of(run).items():
        assert {**history[step], "seconds": 0} == {**history[step], **row, "seconds": 0}
        assert set(row) <= set(history[step])


@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_mlflow_keeps_it_in_a_file(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    try:
        with pytest.raises(InterruptedError):
            train(CONFIG, tmp_path / "run", dataset=DIGITS, progress=stop_at(10), tracker="mlflow")
        client = mlflow.MlflowClient()
        (experiment,) = [found for found in client.search_experiments() if found.name == "mukron"]
        (kept,) = client.search_runs(experiment.experiment_id)
        assert kept.info.status == "FAILED"
        run = train(CONFIG, tmp_path / "run", dataset=DIGITS, tracker="mlflow")
        (kept,) = client.search_runs(experiment.experiment_id)
        assert (kept.info.status, kept.info.run_name) == ("FINISHED", "run")
        assert kept.data.params["width"] == "64"
        assert kept.data.tags["mukron.status"] == "finished"
        for name in ("train_loss", "test_loss", "epoch"):
            history = [(metric.step, metric.value) for metric in client.get_metric_history(kept.info.run_id, name)]
            assert sorted(history) == [(row["step"], row[name]) for row in run.epochs]
        assert mlflow.active_run() is None
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "12345")  # there is none
        with pytest.warns(UserWarning, match="tracker 'mlflow' failed and is not used any more"):
            again = train(CONFIG, dataset=DIGITS, tracker="mlflow")
        assert again.status == "finished"
    finally:
        mlflow.set_tracking_uri(before)
