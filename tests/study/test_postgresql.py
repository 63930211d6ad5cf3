"""One study on several machines, by PostgreSQL: a real one, started here on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import optuna
import pytest
from postgresql_server import Server, programs
from small_studies import LIGHT, TINY, lost, times_ended, tiny_study, wanted

from mukron.study import StudyError
from mukron.study.store import RUNNING, WORKER_DIED

pytestmark = pytest.mark.skipif(programs() is None, reason="no PostgreSQL is installed (Debian: postgresql)")
SLOW = LIGHT.replace(epochs=30, samples=256)


@pytest.fixture(scope="module")
def address():
    with Server() as server:
        server.wait()
        yield server.address


def machine(folder, address, name, **options) -> subprocess.Popen:
    """The study's command as another machine would give it: a folder of its own, the same storage."""
    code = f"""
    import sys
    sys.path[:0] = {sys.path!r}
    from pathlib import Path
    from mukron.train import RunConfig
    from small_studies import tiny_study
    config = RunConfig.from_dict({SLOW.to_dict()!r}, trust=True)
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
    options = {"beat": 1, "grace": 2, "seeds": 1}
    study = tiny_study(tmp_path / "here", SLOW, storage=address, name="dying", **options)
    dying = machine(tmp_path / "there", address, "dying", **options)
    end = time.monotonic() + 60
    while not (running := study.design.by_state(study.store.entries())[RUNNING]):
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
    summaries = optuna.get_all_study_summaries(more.store.study._storage)
    assert [summary.n_trials for summary in summaries if summary.study_name == "a"] == [24]


def test_studies_of_one_folder_name_do_not_meet_unless_they_train_the_same(tmp_path, address):
    first = tiny_study(tmp_path / "x" / "tuned", storage=address, seeds=1)
    other = tiny_study(tmp_path / "y" / "tuned", TINY.replace(epochs=3), storage=address, seeds=1)
    same = tiny_study(tmp_path / "z" / "tuned", storage=address, seeds=1)
    first.run()
    assert not other.store.entries()
    assert len(same.store.entries()) == 12


def test_a_server_that_is_away_for_a_while_ends_no_study(tmp_path):
    """It stops between two trials and comes back some seconds later."""
    with Server() as server:
        server.wait()
        study = tiny_study(tmp_path, storage=server.address, seeds=1)
        away = []

        def away_once(now=False):
            if not away and sum(times_ended(study).values()) == 3:
                server.stop()
                away.append(threading.Timer(4, server.start))
                away[0].start()

        study._reporter = lambda workers, progress: away_once
        record = study.run()
        assert away
        assert len(record.results) == 12
        assert times_ended(study) == dict.fromkeys(wanted(study), 1)


def test_a_server_that_stays_away_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("mukron.study.store.RETRY_SECONDS", 0)
    with Server() as server:
        server.wait()
        study = tiny_study(tmp_path, storage=server.address, seeds=1)
        study.run()
        server.stop()
        with pytest.raises(StudyError, match=r"^storage postgresql\+psycopg://mukron@127.0.0.1.*: .*"):
            study.run()
        server.start()
        server.wait()
