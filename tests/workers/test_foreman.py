"""Worker processes: replaced when they are killed, dismissed when one fails or the work is stopped."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time

import pytest
import torch

from mukron.workers.exits import BROKEN, DONE, STOPPED, WRONG_REQUEST
from mukron.workers.foreman import Foreman
from mukron.workers.worker import serve

# A worker takes the first file of its folder that nobody has taken, and does what it says.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path

order = json.load(sys.stdin)
assert order["foreman"] == os.getppid() and order["threads"] >= 1
for file in sorted(Path(order["task"]["folder"]).glob("*.todo")):
    try:
        mine = file.rename(file.with_suffix(".taken"))
    except FileNotFoundError:
        continue
    code = mine.read_text()
    if code == "sleep":
        Path(order["task"]["folder"], "asleep").touch()
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            sys.exit(130)
    print("before", "on", os.environ.get("CUDA_VISIBLE_DEVICES"))
    print(f"error: it says {code}, error: and more", file=sys.stderr)
    if code == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(code))
"""


class Recorded(Foreman):
    """Replaces a few, and notes what it hears."""

    patience = 20.0

    def __init__(self, folder, workers=1, replacements=9):
        super().__init__("tiny_worker", {"folder": str(folder)}, workers, folder / "log")
        self.replacements, self.killed, self.gone = replacements, [], []

    def replaces(self, process_id, code):
        self.killed.append(code)
        return len(self.killed) <= self.replacements

    def dismissed(self, process_id):
        self.gone.append(process_id)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def ask(folder, *codes):
    for number, code in enumerate(codes):
        (folder / f"{number}.todo").write_text(str(code))


def never() -> bool:
    return False


def nothing() -> None:
    pass


def test_a_worker_that_is_killed_is_replaced(folder):
    ask(folder, "kill", 130, 0)
    foreman = Recorded(folder)
    assert foreman.run(never, nothing)
    assert foreman.killed == [-signal.SIGKILL, STOPPED]
    assert not list(folder.glob("*.todo"))
    assert foreman.gone == []


class Placed(Recorded):
    """Gives each place a GPU."""

    def environment(self, place):
        return {"CUDA_VISIBLE_DEVICES": f"gpu{place}"}


def test_who_replaces_a_worker_takes_its_place(folder):
    ask(folder, "kill", "kill", 0)
    assert Placed(folder).run(never, nothing)
    said = (folder / "log").read_text()
    assert "on gpu0" in said
    assert "on gpu1" not in said


def test_each_worker_has_a_place_of_its_own(folder):
    ask(folder, 0, 0)
    assert Placed(folder, workers=2).run(never, nothing)
    said = (folder / "log").read_text()
    assert "before on gpu0" in said
    assert "before on gpu1" in said


def test_it_ends_when_no_worker_is_left(folder):
    ask(folder, "kill", "kill", 0)
    foreman = Recorded(folder, replacements=1)
    assert foreman.run(never, nothing)
    assert len(list(folder.glob("*.todo"))) == 1


def test_a_wrong_request_is_raised_with_its_message_alone(folder):
    (folder / "log").write_text("error: of an earlier command\n")
    ask(folder, WRONG_REQUEST, 0)
    with pytest.raises(ValueError, match=r"^it says 2, error: and more$"):
        Recorded(folder).run(never, nothing)
    assert (folder / "log").read_text().startswith("error: of an earlier command\n")


def test_what_breaks_is_raised_with_the_log_of_this_command(folder):
    (folder / "log").write_text("of an earlier command\n")
    ask(folder, BROKEN)
    with pytest.raises(RuntimeError, match=r"(?s)^a worker broke; .*log has all it said:\n.*it says 3") as raised:
        Recorded(folder).run(never, nothing)
    assert "earlier" not in str(raised.value)


def test_a_failure_dismisses_the_others(folder):
    ask(folder, "sleep", BROKEN)
    foreman = Recorded(folder, workers=2)
    with pytest.raises(RuntimeError, match="broke"):
        foreman.run(never, nothing)
    assert len(foreman.gone) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(foreman.gone[0], 0)


def test_a_module_of_the_current_folder_does_not_stand_in_for_pythons(folder, monkeypatch):
    ask(folder, 0)
    (folder / "here").mkdir()
    for name in ("statistics", "json", "runpy"):
        (folder / "here" / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(folder / "here")
    assert Recorded(folder).run(never, nothing)
    assert "before on" in (folder / "log").read_text()


def test_no_file_holds_the_task(folder):
    """It may hold a password, and who is killed cannot remove a file."""
    ask(folder, "sleep")
    secret = folder / "postgresql"  # a part of the task that can be looked for
    foreman = Recorded(folder)
    foreman.task = {**foreman.task, "url": str(secret)}
    temporary = folder / "tmp"
    temporary.mkdir()

    def holding() -> bool:
        return any(str(secret) in file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())

    seen = []
    foreman.run((folder / "asleep").exists, lambda: seen.append(holding()))
    assert seen
    assert not any(seen)


def test_the_work_can_be_stopped(folder):
    ask(folder, "sleep")
    foreman, looks = Recorded(folder), []
    assert not foreman.run((folder / "asleep").exists, lambda: looks.append(time.monotonic()))
    assert looks
    assert len(foreman.gone) == 1
    assert foreman.killed == []


# The other end.


@pytest.fixture
def order(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    content = {"task": {"answer": 42}, "path": ["/of/the/foreman"], "foreman": os.getppid(), "threads": 1}
    yield io.StringIO(json.dumps(content))
    torch.set_num_threads(threads)


def test_a_worker_is_given_its_task_threads_and_modules(order):
    seen = {}

    def work(task, stopped, tick):
        tick()
        seen.update(task, threads=torch.get_num_threads(), first=sys.path[0], stopped=stopped())
        return True

    assert serve(order, work) == DONE
    assert seen == {"answer": 42, "threads": 1, "first": "/of/the/foreman", "stopped": False}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("no such layer"), WRONG_REQUEST, "error: no such layer\n"),
        (RuntimeError("layers do not fit"), BROKEN, "RuntimeError: layers do not fit\n"),
        (KeyboardInterrupt(), STOPPED, ""),
    ],
)
def test_a_worker_says_how_it_ended_by_its_exit_code(order, capsys, error, code, message):
    def work(task, stopped, tick):
        raise error

    assert serve(order, work) == code
    assert capsys.readouterr().err.endswith(message)


def test_a_worker_that_was_stopped_says_so(order):
    def work(task, stopped, tick):
        signal.raise_signal(signal.SIGTERM)
        return not stopped()

    assert serve(order, work) == STOPPED


def test_a_worker_whose_foreman_is_gone_stops(order, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert serve(order, lambda task, stopped, tick: tick()) == STOPPED
