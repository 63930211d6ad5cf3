"""Runs in several processes of torchrun: the numbers of one process, one record, and nobody waits for who has left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mukron.cli import app
from mukron.data import load
from mukron.train import Run, RunConfig, RunError, train
from mukron.train.divergence import failed_factorization
from mukron.train.processes import ONE_PROCESS, Processes, check_batch, check_same_run, joined_processes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DIGITS = load("digits")
NET = """
from torch import nn

class Net(nn.Module):
    '''Batch norm sees the whole batch; of what is returned, one thing is trained.'''

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.other = nn.Linear(64, 1)

    def forward(self, x):
        return {"logits": self.body(x), "other": self.other(x.flatten(1))}
"""
WORKER = """
import json, os, sys
from pathlib import Path

import torch
from mukron.train import RunConfig, train
from mukron.train.processes import leave_processes

torch.set_num_threads(1)
folder = Path(sys.argv[1])
for file in sorted(folder.glob("*.json")):
    run = train(RunConfig.load(file).trusted(), folder / file.stem)
    (folder / f"{file.stem}.rank{os.environ['RANK']}").write_text(json.dumps(run.to_dict()))
leave_processes(0)
"""
BASE = RunConfig(width=32, base_width=16, dtype="float64", samples=205, test_samples=101, batch=51, epochs=2)
CASES = {  # 51 samples do not split evenly
    "adamw": BASE.replace(method="adamw", lr=0.003, clip_norm=0.5),
    "batch_norm": BASE.replace(model="norm_net:Net", output="logits", method="kfac"),
    "diverging": BASE.replace(method="sgd", lr=1e6),
    "fsdp": BASE.replace(method="adamw", lr=0.003, sharding="fsdp", clip_norm=0.5),
    "fsdp_kfac": BASE.replace(method="kfac", lr=0.1, sharding="fsdp"),
    "kfac": BASE.replace(method="kfac", lr=0.1, record=["features", "spectra", "rates"]),
    "sgd": BASE.replace(method="sgd", lr=0.1, schedule="linear"),
    "shampoo": BASE.replace(method="shampoo", lr=0.05, augment=["crop"]),
}
LONG = BASE.replace(method="kfac", lr=0.02, epochs=40)  # to be killed in
CONTINUED = BASE.replace(method="kfac", lr=0.05)  # one epoch in one process, one in two


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of all cases, each trained by two processes."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "worker.py").write_text(WORKER)
    (folder / "norm_net.py").write_text(NET)
    for name, config in {**CASES, "long": LONG, "continued": CONTINUED}.items():
        config.save(folder / f"{name}.json")
    train(CONTINUED.replace(epochs=1), folder / "continued", dataset=DIGITS)
    start = [*TORCHRUN, "worker.py", "."]
    done = subprocess.run(start, cwd=folder, env=environment(folder), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder


def environment(*folders: Path) -> dict[str, str]:
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def worst_difference(ours, theirs) -> float:
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    rows = zip(ours, theirs, strict=True)
    return max(abs(a[name] - b[name]) for a, b in rows for name in a if name != "seconds" and a[name] is not None)


def without_seconds(rows) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_the_numbers_of_one(two, name, monkeypatch):
    monkeypatch.syspath_prepend(two)
    one, joint = train(CASES[name], dataset=DIGITS), Run.load(two / name)
    assert (joint.status, joint.reason) == (one.status, one.reason)
    assert joint.status == ("diverged" if name == "diverging" else "finished")
    if name != "diverging":
        assert worst_difference(one.epochs, joint.epochs) < 1e-8
    ranks = [json.loads((two / f"{name}.rank{rank}").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1] == json.loads(json.dumps(joint.to_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kfac", "fsdp", "fsdp_kfac"])
def test_one_process_continues_what_two_have_begun(two, name, tmp_path):
    config = CASES[name].replace(epochs=3, sharding="ddp")
    shutil.copytree(two / name, tmp_path / name)
    continued, one = train(config, tmp_path / name, dataset=DIGITS), train(config, dataset=DIGITS)
    assert worst_difference(one.epochs, continued.epochs) < 1e-8


@pytest.mark.slow
def test_two_processes_continue_what_one_has_begun(two):
    continued, one = Run.load(two / "continued"), train(CONTINUED, dataset=DIGITS)
    assert continued.status == "finished"
    assert worst_difference(one.epochs, continued.epochs) < 1e-8


@pytest.mark.slow
def test_files_do_not_show_the_sharding(two):
    ddp, fsdp = (torch.load(two / name / "checkpoint.pt", weights_only=True) for name in ("adamw", "fsdp"))
    assert ddp["model"].keys() == fsdp["model"].keys()
    for name, weight in ddp["model"].items():
        torch.testing.assert_close(fsdp["model"][name], weight)
    assert ddp["optimizer"]["state"].keys() == fsdp["optimizer"]["state"].keys()
    for number, state in ddp["optimizer"]["state"].items():
        torch.testing.assert_close(fsdp["optimizer"]["state"][number], state)
    assert ddp["optimizer"]["param_groups"] == fsdp["optimizer"]["param_groups"]


def workers_of(process: subprocess.Popen) -> dict[int, int]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        try:
            text = Path(f"/proc/{child}/environ").read_text()
            variables = dict(entry.split("=", 1) for entry in text.split("\0")[:-1])
        except (OSError, ValueError):  # it has just ended
            continue
        if "RANK" in variables:
            found[int(variables["RANK"])] = int(child)
    return found


def wait_for_epoch(folder: Path, epoch: int, process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) >= epoch:
            return
        time.sleep(0.01)
    raise AssertionError(f"epoch {epoch} was not reached")


def command(folder: Path, *options: str) -> list[str]:
    return [*TORCHRUN, *options, "-m", "mukron", "train", "--config", str(folder / "long.json"), "--out"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("sharding", ["ddp", pytest.param("fsdp", marks=pytest.mark.matrix)])
def test_a_killed_rank_costs_nothing_and_a_stopped_run_goes_on(two, sharding, tmp_path):
    folder = tmp_path / "killed"
    LONG.replace(sharding=sharding).save(tmp_path / "long.json")
    start = [*command(tmp_path, "--max-restarts", "2"), str(folder)]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(start, stdout=said, stderr=said, env=environment())
        try:
            wait_for_epoch(folder, 10, process)
            os.kill(workers_of(process)[0], signal.SIGKILL)  # it holds the lock and writes the files
            wait_for_epoch(folder, 20, process)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
        finally:
            if process.poll() is None:
                for worker in workers_of(process).values():
                    os.kill(worker, signal.SIGKILL)
            process.kill()
            process.wait()
    text = (tmp_path / "said").read_text()
    assert "lost the others" in text
    stopped = Run.load(folder)
    assert stopped.status == "interrupted", text
    assert "interrupted at step" in stopped.reason
    again = [*command(tmp_path), str(folder)]
    done = subprocess.run(again, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after 40 of 40 epochs") == 1  # one rank prints
    assert done.stderr.count("epoch 40/40") == 1

    if sharding == "ddp":  # as the run that nobody has killed
        assert without_seconds(Run.load(folder).epochs) == without_seconds(Run.load(two / "long").epochs)
    assert worst_difference(Run.load(folder).epochs, Run.load(two / "long").epochs) < 1e-8
    ours, theirs = (torch.load(path / "checkpoint.pt", weights_only=True) for path in (folder, two / "long"))
    assert ours["model"].keys() == theirs["model"].keys()
    off = 0 if sharding == "ddp" else 1e-8
    for name, weight in ours["model"].items():
        torch.testing.assert_close(weight, theirs["model"][name], rtol=off, atol=off)


@pytest.fixture
def launched(monkeypatch):
    """As torchrun tells the first of three processes."""
    told = {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda:0"}, r"not in 3 processes: device='cuda:0': say 'cuda'"),
        ({"device": "mps"}, r"not in 3 processes: device='mps'"),
        ({"method_options": {"fused": True}}, r"method_options: fused=True"),
        ({"sharding": "fsdp", "record": ["distance"]}, r'record: probes read whole weights, and sharding="fsdp"'),
        ({"sharding": "fsdp", "compile": True}, r'compile=True beside sharding="fsdp"'),
    ],
)
def test_what_several_processes_cannot_do_is_refused_by_name(launched, changes, words):
    with pytest.raises(RunError, match=words), joined_processes(BASE.replace(**changes)):
        pass


def test_a_rank_without_samples_is_refused():
    with pytest.raises(RunError, match="batch=2: 3 processes share a batch"):
        check_batch(2, Processes(rank=0, size=3))
    check_batch(3, Processes(rank=0, size=3))


def test_a_process_takes_the_gpu_of_its_number_and_nccl(launched, monkeypatch):
    class StopHereError(Exception):
        pass

    def begin(backend, **options):
        raise StopHereError(backend, options["device_id"], options["timeout"] <= timedelta(minutes=30))

    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", begin)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(StopHereError) as raised, joined_processes(BASE.replace(device="cuda")):
        pass
    assert raised.value.args == ("nccl", torch.device("cuda", 2), True)
    assert taken == [torch.device("cuda", 2)]


class TwoProcesses(Processes):
    """Of which the other one says something."""

    def __init__(self, said: str) -> None:
        super().__init__(rank=0, size=2)
        object.__setattr__(self, "said", said)

    def of_all(self, own):
        return [own, self.said]


def test_a_factorization_that_fails_elsewhere_is_a_divergence_here_too():
    elsewhere = RuntimeError("rank 1 could not take this step, so none does: RuntimeError: too small")
    assert failed_factorization(elsewhere, TwoProcesses("too small")) == "too small"
    assert failed_factorization(elsewhere, TwoProcesses("")) == ""  # it failed for another reason
    assert failed_factorization(RuntimeError("out of memory"), TwoProcesses("too small")) == ""


def test_processes_with_different_runs_are_refused():
    check_same_run(BASE, TwoProcesses(BASE.key()))
    with pytest.raises(RunError, match="2 processes train one run together, but they were given 2 different ones"):
        check_same_run(BASE, TwoProcesses(BASE.replace(seed=1).key()))


def test_too_few_gpus_are_named(launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RunError, match="process 3 of this machine has no GPU, torch finds 2"):
        train(BASE.replace(device="cuda"))


def test_sharding_is_a_field_that_leaves_old_keys_alone():
    assert "sharding" not in BASE.to_dict()
    assert BASE.replace(sharding="fsdp").key() != BASE.key() == RunConfig.from_dict(BASE.to_dict()).key()


def test_parts_of_a_batch_are_as_even_as_possible():
    parts = [Processes(rank, 3).part(11) for rank in range(3)]
    assert [list(range(11))[part] for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert ONE_PROCESS.part(11) == slice(0, 11)


def test_other_commands_refuse_torchrun(launched):
    result = CliRunner().invoke(app, ["transfer", "--widths", "8:16"])
    assert result.exit_code == 2
    assert "mukron transfer was started by torchrun in 3 processes" in result.output
