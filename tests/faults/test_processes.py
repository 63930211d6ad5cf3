"""Faults of whole processes: kills, pauses beyond the lease, clocks that jump, full disks, two commands at once.

After each, the same command goes on, and its numbers are those of a study that nothing happened to.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import soak

import mukron
from mukron.study import StudyRecord
from mukron.train import Run
from mukron.workers.locks import locked

CODE = """
import resource, signal, sys
from pathlib import Path
from mukron.study import Design, TransferStudy
from mukron.train import RunConfig, train

what, folder, epochs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
config = RunConfig(method="sgd", base_width=8, width=8, epochs=epochs, samples=256, batch=32, lr=0.1, loss="mse",
                   data="small_studies:data", test_samples=20)
if sys.argv[4]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
print("begins", flush=True)
try:
    if what == "run":
        train(config, folder, progress=lambda at: print(at.step, flush=True))
    else:
        design = Design(config, widths=(8, 16), lr=(0.1, 0.2), seeds=1, schemes="mup")
        study = TransferStudy(design, folder=folder, one_by_one=True, beat=1, grace=2)
        study.run(2 if what == "two workers" else 1, progress=False)
except ValueError as error:
    sys.exit(str(error))
"""
EPOCHS = 12
KINDS = ("run", "study", "two workers")


def start(what, folder, epochs=EPOCHS, size=None):
    """A process that runs or goes on with a run or study, which may write no file longer than that size."""
    places = [Path(mukron.__file__).parents[1], Path(__file__).parents[1] / "study"]
    path = os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", CODE, what, str(folder), str(epochs), str(size or "")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        start_new_session=True,
    )


def finished(process):
    """What a process said of its errors, once it has ended well."""
    _, said = process.communicate(timeout=soak.PATIENCE)
    if process.returncode:
        raise AssertionError(said)
    return said


def numbers(what, folder):
    """All numbers that do not depend on the time that training took."""
    if what == "run":
        return [{**row, "seconds": 0} for row in Run.load(folder).epochs]
    record = StudyRecord.load(folder / "study.json")
    return sorted((str(result.point), [{**row, "seconds": 0} for row in result.rows]) for result in record.results)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    processes = {what: start(what, folder / what) for what in KINDS[:2]}
    found = {what: (finished(process), numbers(what, folder / what))[1] for what, process in processes.items()}
    return {**found, "two workers": found["study"]}


def tried(use):
    """``soak.outcome`` of what ends its processes whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    try:
        return soak.outcome(lambda: use(processes))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_kills_at_random_moments(truth, tmp_path):
    def kill(seed):
        rng, what, folder = random.Random(seed), KINDS[seed % len(KINDS)], tmp_path / str(seed)

        def use(processes):
            processes.append(start(what, folder))
            assert processes[-1].stdout.readline() == "begins\n"
            time.sleep(rng.uniform(0, 1.5))
            processes[-1].kill()
            processes[-1].wait()
            processes.append(start(what, folder))
            finished(processes[-1])
            return numbers(what, folder) == truth[what]

        return tried(use)

    soak.check("kill -9 at a random moment", soak.number(2, slow=30), kill)


def test_full_disks(truth, tmp_path):
    """Files may not grow beyond a size, which fails as a full disk does."""

    def fill(seed):
        rng, what, folder = random.Random(seed), KINDS[seed % 2], tmp_path / str(seed)

        def use(processes):
            processes.append(start(what, folder, size=rng.choice((1, 500, 3000, 20_000, 60_000, 130_000))))
            _, said = processes[-1].communicate(timeout=soak.PATIENCE)
            if processes[-1].returncode and (len(said.splitlines()) != 1 or str(folder) not in said):
                raise AssertionError(said)
            processes.append(start(what, folder))
            finished(processes[-1])
            return numbers(what, folder) == truth[what]

        return tried(use)

    soak.check("a full disk", soak.number(2, slow=12), fill)


def test_two_questions_at_once_in_one_new_folder(truth, tmp_path):
    def ask(seed):
        folder = tmp_path / str(seed)

        def use(processes):
            processes.append(start("study", folder))
            time.sleep(random.Random(seed).uniform(0, 0.3))
            processes.append(start("study", folder, epochs=EPOCHS + 1))
            said = [process.communicate(timeout=soak.PATIENCE)[1] for process in processes]
            codes = [process.returncode for process in processes]
            if sorted(codes) == [0, 1]:
                refused = codes.index(1)
                if len(said[refused].splitlines()) != 1 or "trains something else" not in said[refused]:
                    raise AssertionError(said[refused])
                return refused == 0 or numbers("study", folder) == truth["study"]
            if any(codes):
                raise AssertionError(said)
            return False

        return tried(use)

    soak.check("two questions at once in a folder", soak.number(1, slow=6), ask)


@pytest.mark.parametrize("fault", ["a pause longer than the lease", "a clock that jumps by two hours"])
def test_a_worker_that_comes_too_late(fault, truth, tmp_path):
    """It drops what it reports too late, says so, and goes on; the study has every point once."""

    def come_late(seed):
        folder = tmp_path / str(seed)

        def use(processes):
            processes.append(start("study", folder))
            assert processes[0].stdout.readline() == "begins\n"
            _until(lambda: _stopped_in_a_trial(processes[0], folder))
            if "pause" in fault:
                time.sleep(3)  # longer than the study's grace
            else:
                with sqlite3.connect(folder / "study.db") as database:
                    database.execute("UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-2 hours')")
            processes.append(start("study", folder))
            finished(processes[1])
            processes[0].send_signal(signal.SIGCONT)
            finished(processes[0])
            return numbers("study", folder) == truth["study"]

        return tried(use)

    soak.check(fault, soak.number(1, slow=3), come_late)


def _stopped_in_a_trial(process, folder):
    """Stop a worker while it trains. One that is stopped with a lock in its hands makes others wait, and say so."""
    if not _running(folder):
        return False
    process.send_signal(signal.SIGSTOP)
    with locked(folder / "study.db.lock", wait=False) as free:
        if free and _running(folder) and _writable(folder):
            return True
    process.send_signal(signal.SIGCONT)
    return False


def _writable(folder):
    database = sqlite3.connect(folder / "study.db", timeout=0)
    try:
        database.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    finally:
        database.close()
    return True


def _running(folder):
    if not (folder / "study.db").exists():
        return False
    with sqlite3.connect(folder / "study.db", timeout=10) as database:
        try:
            return database.execute("SELECT count(*) FROM trials WHERE state = 'RUNNING'").fetchone()[0]
        except sqlite3.OperationalError:  # no tables yet
            return False


def _until(condition):
    end = time.monotonic() + soak.PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
