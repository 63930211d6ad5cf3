"""One study on several machines, by PostgreSQL: a real one, started here on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import optuna
import pytest
from postgresql_server import programs, server
from small_studies import TINY, lost, times_ended, tiny_study, wanted

from mukron.study import StudyError
from mukron.study.store import RUNNING, WORKER_DIED

pytestmark = pytest.mark.skipif(programs() is None, reason="no PostgreSQL is installed (Debian: postgresql)")
SLOW = TINY.replace(epochs=30, samples=256)


@pytest.fixture(scope="module")
def address():
    with server() as url:
        yield url


def machine(folder, address, name, **options) -> subprocess.Popen:
    """The study's command as another machine would give it: a folder of its own, the same storage."""
    code = f"""
    import sys
    sys.path[:0] = {sys.path!r}
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from mukron.train import RunConfig
    from small_studies import tiny_study
    config = RunConfig.from_dict({SLOW.to_dict()!r})
    tiny_study(Path({str(folder)!r}), config, storage={address!r}, name={name!r}, **{options!r}).run()
    """
    with folder.with_suffix(".said").open("w") as said:
        return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=said)


def test_machines_share_a_study_and_train_every_point_once(tmp_path, address):
    """They begin at once, with nothing there: tables and study are made once too."""
    machines = [machine(tmp_path / str(number), address, "shared") for number in range(3)]
    codes = [each.wait(180) for each in machines]
    assert codes == [0, 0, 0], [said.read_text() for said in tmp_path.glob("*.said")]
    study = tiny_study(tmp_path / "here", SLOW, storage=address, name="shared")
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    assert not lost(study)
    workers = {trial.user_attrs["worker"] for trial in study.store.study.trials}
    assert len(workers) == 3
    records = [(tmp_path / str(number) / "study.json") for number in range(3)]
    assert all(record.exists() for record in records)  # each waited for the others' last points
    assert study.run().made["storage"].startswith("postgresql://mukron@127.0.0.1")


def test_a_machine_that_dies_is_noticed_by_the_others(tmp_path, address):
    rhythm = {"beat": 1, "grace": 2}
    study = tiny_study(tmp_path / "here", SLOW, storage=address, name="dying", **rhythm)
    dying = machine(tmp_path / "there", address, "dying", **rhythm)
    end = time.monotonic() + 60
    while not (running := study.design.standing(study.store.entries())[RUNNING]):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(dying.pid, signal.SIGKILL)
    dying.wait()
    study.run()
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    assert [(entry.point, entry.reason) for entry in lost(study)] == [(running[0].point, WORKER_DIED)]


def test_studies_of_one_database_are_told_apart_and_can_be_extended(tmp_path, address):
    tiny_study(tmp_path / "a", storage=address, name="a", seeds=1).run()
    more = tiny_study(tmp_path / "a", storage=address, name="a", seeds=2)
    more.run()
    assert times_ended(more) == dict.fromkeys(wanted(more), 1)
    with pytest.raises(StudyError, match="study 'a' trains something else"):
        tiny_study(tmp_path / "b", SLOW, storage=address, name="a").run()
    names = {summary.study_name for summary in optuna.get_all_study_summaries(more.store.study._storage)}
    assert "a" in names
