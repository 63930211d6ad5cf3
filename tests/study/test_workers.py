"""Studies by several processes: every point once, whoever is killed, stopped or added."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest
from small_studies import LIGHT, lost, times_ended, tiny_study, wanted

from mukron.study import StudyError
from mukron.study.store import ENDED, RUNNING, WORKER_DIED
from mukron.train import train
from mukron.train.records import INTERRUPTED

pytestmark = pytest.mark.slow
SLOW = LIGHT.replace(epochs=40, samples=512)  # long enough to be caught in the middle of
EIGHT = {"lr": (0.01, 0.02), "seeds": 1}
FOUR = {**EIGHT, "schemes": ("mup",)}
TWO = {**FOUR, "lr": (0.01,)}


def until(happens: Callable[[], object], patience: float = 60.0) -> object:
    """What it returns, as soon as that is true."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if found := happens():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def command(folder, workers: int, **options) -> subprocess.Popen:
    """The study in a process of its own, as a command would run it."""
    code = f"""
    import sys
    sys.path[:0] = {sys.path!r}
    from pathlib import Path
    from mukron.train import RunConfig
    from small_studies import tiny_study
    config = RunConfig.from_dict({SLOW.to_dict()!r}, trust=True)
    tiny_study(Path({str(folder)!r}), config, **{options!r}).run({workers})
    """
    with (folder / "said").open("w") as said:
        return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=said)


def running(study):
    return study.design.by_state(study.store.entries())[RUNNING]


def two_running(study):
    found = running(study)
    return found if len(found) == 2 else None


def worker_of(study, entry) -> int:
    return int(study.store.study.trials[entry.number].user_attrs["worker"].rpartition(":")[2])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_workers_train_every_point_once(tmp_path):
    """test_store.py has the race of more processes for points."""
    study = tiny_study(tmp_path, LIGHT)
    seen = []
    record = study.run(workers=2, progress=seen.append)
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    assert not lost(study)
    assert len({worker_of(study, entry) for entry in study.store.entries()}) > 1
    assert (seen[-1].done, seen[-1].total, seen[-1].running) == (24, 24, 0)
    # The same numbers as one process, and as the run by itself, to what another number of threads may change.
    result = record.results[5]
    alone = train(result.point.config(LIGHT)).epochs
    for column in ("train_loss", "test_loss"):
        assert [row[column] for row in result.rows] == pytest.approx([row[column] for row in alone], rel=1e-5)


def test_a_worker_killed_loses_its_trial_alone_and_another_takes_it_up(tmp_path):
    study = tiny_study(tmp_path, SLOW, **TWO)
    foreman = command(tmp_path, workers=2, **TWO)
    victim = until(lambda: running(study))[0]
    os.kill(worker_of(study, victim), signal.SIGKILL)
    assert foreman.wait(120) == 0, (tmp_path / "said").read_text()
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    assert [(entry.number, entry.reason) for entry in lost(study)] == [(victim.number, WORKER_DIED)]


def test_a_machine_that_dies_loses_its_trials_alone_and_another_command_takes_them_up(tmp_path):
    """Foreman and workers are killed at once: nobody is left to say so, but hearts stop."""
    study = tiny_study(tmp_path, SLOW, **FOUR, beat=1, grace=2)
    foreman = command(tmp_path, workers=2, **FOUR, beat=1, grace=2)
    victims = until(lambda: two_running(study))
    pids = [worker_of(study, victim) for victim in victims]
    for pid in (foreman.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    foreman.wait()
    study.run()
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    assert {entry.number for entry in lost(study)} == {victim.number for victim in victims}


def test_ctrl_c_ends_cleanly_and_the_same_command_goes_on(tmp_path):
    study = tiny_study(tmp_path, SLOW, **FOUR)
    foreman = command(tmp_path, workers=2, **FOUR)
    until(lambda: times_ended(study) and running(study))
    foreman.send_signal(signal.SIGINT)
    assert foreman.wait(60) != 0
    assert "KeyboardInterrupt" in (tmp_path / "said").read_text()
    assert not running(study)
    before = {entry.number for entry in study.store.entries() if entry.state == ENDED}
    assert 0 < len(before) < 4
    assert {entry.reason for entry in lost(study)} <= {INTERRUPTED}
    study.run()
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    assert before <= {entry.number for entry in study.store.entries() if entry.state == ENDED}


def test_workers_whose_foreman_is_killed_stop_by_themselves(tmp_path):
    study = tiny_study(tmp_path, SLOW, **EIGHT)
    foreman = command(tmp_path, workers=2, **EIGHT)
    pids = [worker_of(study, entry) for entry in until(lambda: two_running(study))]
    foreman.kill()
    foreman.wait()
    until(lambda: not running(study))
    until(lambda: not any(alive(pid) for pid in pids))
    assert {entry.reason for entry in lost(study)} == {INTERRUPTED}


def test_an_error_of_a_worker_ends_the_study_with_what_it_said(tmp_path, monkeypatch):
    (tmp_path / "wrong_net.py").write_text("def make(width):\n    raise ValueError('no such layer')\n")
    monkeypatch.syspath_prepend(tmp_path)
    study = tiny_study(tmp_path / "study", LIGHT.replace(model="wrong_net:make"))
    with pytest.raises(StudyError, match="no such layer"):
        study.run(workers=2)
    assert not times_ended(study)


def test_what_breaks_in_a_worker_is_shown_whole(tmp_path, monkeypatch):
    (tmp_path / "broken_net.py").write_text("def make(width):\n    raise RuntimeError('layers do not fit')\n")
    monkeypatch.syspath_prepend(tmp_path)
    study = tiny_study(tmp_path / "study", LIGHT.replace(model="broken_net:make"))
    with pytest.raises(RuntimeError, match=r"(?s)a worker of the study broke.*layers do not fit"):
        study.run(workers=2)
    assert len(lost(study)) <= 2


def test_being_told_to_end_is_ctrl_c(tmp_path):
    study = tiny_study(tmp_path, SLOW, **EIGHT)
    foreman = command(tmp_path, workers=1, **EIGHT)
    until(lambda: running(study))
    foreman.terminate()
    assert foreman.wait(60) != 0
    assert not running(study)
    assert {entry.reason for entry in lost(study)} == {INTERRUPTED}


def test_a_network_that_kills_every_worker_is_given_up_and_named(tmp_path, monkeypatch):
    """At width 16 alone: the rest is trained."""
    (tmp_path / "deadly_net.py").write_text(
        "import os\nfrom mukron.models import MLP\n\n\n"
        "class Deadly(MLP):\n"
        "    def forward(self, x):\n"
        "        if self.fc1.out_features == 16:\n            os.kill(os.getpid(), 9)\n"
        "        return super().forward(x)\n\n\n"
        "def make(width):\n"
        "    return Deadly(width, inputs=64)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = LIGHT.replace(model="deadly_net:make")
    study = tiny_study(tmp_path / "study", config, lr=(0.01,), schemes=("mup",), seeds=1)
    with pytest.raises(StudyError, match=r"1 points are missing: .*width=16"):
        study.run(workers=2)
    assert [point.width for point in times_ended(study)] == [8]
    assert len(lost(study)) == 3
