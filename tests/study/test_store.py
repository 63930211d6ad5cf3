"""A study's storage: claims are exclusive, hearts that stop are noticed, another study is refused."""

from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
import sys
import textwrap
import time
import warnings
from collections import Counter
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from small_studies import TINY, lost, times_ended, tiny_study, wanted

from mukron.study import Point, StudyError
from mukron.study.search import pruner
from mukron.study.store import ENDED, LOST, RUNNING, WORKER_DIED, Store
from mukron.train.records import INTERRUPTED

ROWS = [{"epoch": 1, "step": 2, "train_loss": 0.5}]
POINTS = [Point("mup", 8, 0.01, None, seed) for seed in range(5)]


def url_of(folder):
    return f"sqlite:///{folder / 'study.db'}"


@pytest.fixture
def store(tmp_path):
    return Store(url_of(tmp_path), "study", TINY, "train_loss", beat=1, grace=2)


@pytest.fixture
def optuna_storage(store, tmp_path):
    """The store's database, opened by Optuna itself."""
    storage = optuna.storages.RDBStorage(url_of(tmp_path))
    yield storage
    storage.engine.dispose()  # Optuna does not close its connections


def first_free(entries):
    taken = {entry.point for entry in entries if entry.state != LOST}
    return next((point for point in POINTS if point not in taken), None)


def test_a_point_is_claimed_once_and_ends_with_its_numbers(store):
    claims = [store.claim(first_free) for _ in range(5)]
    assert [claim.point for claim in claims] == POINTS
    assert store.claim(first_free) is None
    assert {entry.state for entry in store.entries()} == {RUNNING}
    store.end(claims[0], "finished", ROWS, "", 1.5)
    store.end(claims[1], "diverged", [], "step 1: too large", 0.5)
    store.give_up(claims[2], INTERRUPTED)
    first, second, third, *_ = store.entries()
    assert (first.state, first.result.status, [*first.result.rows], first.result.seconds) == (
        ENDED,
        "finished",
        ROWS,
        1.5,
    )
    assert (second.state, second.result.status, second.result.reason) == (ENDED, "diverged", "step 1: too large")
    assert (third.state, third.reason) == (LOST, INTERRUPTED)
    assert store.claim(first_free).point == POINTS[2]  # free again, and the only one


def test_it_is_a_study_of_optunas_as_it_is(store, optuna_storage):
    store.end(store.claim(first_free), "finished", ROWS, "", 1.5)
    store.end(store.claim(first_free), "diverged", [], "", 1.5)
    study = optuna.load_study(study_name="study", storage=optuna_storage)
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert study.best_value == 0.5
    assert study.best_params == {"width": 8.0, "lr": 0.01, "seed": 0}
    assert study.trials[0].user_attrs["scheme"] == "mup"


def test_the_dashboard_opens_it(store, optuna_storage):
    import json
    from wsgiref.util import setup_testing_defaults

    from optuna_dashboard import wsgi

    store.end(store.claim(first_free), "finished", ROWS, "", 1.5)
    app, answers = wsgi(optuna_storage), []
    for path in ("/api/studies", "/api/studies/1"):
        environ = {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
        setup_testing_defaults(environ)
        answers.append(json.loads(b"".join(app(environ, lambda status, *rest: None))))
    assert answers[0]["study_summaries"][0]["study_name"] == "study"
    assert {param["name"] for param in answers[1]["trials"][0]["params"]} == {"width", "lr", "seed"}


@pytest.mark.slow
def test_many_processes_at_once_take_every_point_once(tmp_path):
    """No training: nothing but the race for points."""
    code = f"""
    import sys
    sys.path[:0] = {sys.path!r}
    from mukron.study import Point
    from mukron.study.store import Store, LOST
    from small_studies import TINY
    store = Store({url_of(tmp_path)!r}, "study", TINY, "train_loss")
    points = [Point("mup", 8, 0.01, None, seed) for seed in range(40)]
    def choose(entries):
        taken = {{entry.point for entry in entries if entry.state != LOST}}
        return next((point for point in points if point not in taken), None)
    while (claim := store.claim(choose)) is not None:
        store.end(claim, "finished", [{{"epoch": 1, "train_loss": 1.0}}], "", 0.0)
    """
    workers = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) for _ in range(4)]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    entries = Store(url_of(tmp_path), "study", TINY, "train_loss").entries()
    assert Counter(entry.point.seed for entry in entries) == dict.fromkeys(range(40), 1)
    assert {entry.state for entry in entries} == {ENDED}


def test_a_trial_whose_heart_stops_is_free_for_others(store):
    claim = store.claim(first_free)  # whose worker dies now: nobody beats for it
    with store.alive(store.claim(first_free)):  # a second one that lives on
        assert store.claim(first_free).point == POINTS[2]
        time.sleep(3.5)
        again = store.claim(first_free)
    assert again.point == claim.point
    gone = [entry for entry in store.entries() if entry.state == LOST]
    assert POINTS[1] not in {entry.point for entry in gone}
    assert {entry.reason for entry in gone} == {WORKER_DIED}
    for report in (  # it was not dead after all, but it is too late
        lambda: store.report(claim, 0.5, 1),
        lambda: store.end(claim, "finished", ROWS, "", 1.0),
        lambda: store.give_up(claim, INTERRUPTED),
    ):
        with pytest.warns(RuntimeWarning, match=r"mup.*no sign of life for more than 2 s.* is dropped"):
            report()
    assert claim.point not in {entry.point for entry in store.entries() if entry.state == ENDED}


def test_a_worker_killed_between_two_writes_leaves_nothing_that_blocks(store, monkeypatch):
    def killed(trial_id):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store._rdb, "record_heartbeat", killed)
        with pytest.raises(KeyboardInterrupt):
            store.claim(first_free)
    assert store.claim(first_free).point == POINTS[0]
    assert [entry.state for entry in store.entries()] == [LOST, RUNNING]


def test_trials_of_others_in_the_same_study_are_left_alone(store):
    store.study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING))
    store.claim(first_free)
    assert [entry.point for entry in store.entries()] == POINTS[:1]
    assert store.study.trials[0].state.name == "WAITING"


def test_a_wrong_request_that_trained_nothing_claims_no_folder(store, tmp_path):
    store.give_up(store.claim(first_free), "no such data")
    store.presence.leave()
    again = Store(url_of(tmp_path), "study", TINY.replace(epochs=3), "test_accuracy")
    assert again.metric == "test_accuracy"
    assert again.study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert again.entries() == []


def test_another_study_is_refused_but_another_device_joins(store, tmp_path):
    store.claim(first_free)
    Store(url_of(tmp_path), "study", TINY.replace(device="cuda", lr=0.5, seed=7, scheme="sp"), "train_loss")
    with pytest.raises(StudyError, match=r"epochs 2 there and 3 here.*--out"):
        Store(url_of(tmp_path), "study", TINY.replace(epochs=3), "train_loss")


def test_a_second_question_is_refused_while_the_first_has_trained_nothing_yet(tmp_path):
    """Two commands that begin at once: a study without trials belongs to who has it open, and to nobody once gone."""
    first = Store(url_of(tmp_path), "study", TINY, "train_loss")
    also = Store(url_of(tmp_path), "study", TINY, "train_loss")  # the same question
    for _ in range(2):
        with pytest.raises(StudyError, match=r"epochs 2 there and 3 here.*--out"):
            Store(url_of(tmp_path), "study", TINY.replace(epochs=3), "train_loss")
        first.presence.leave()
    also.presence.leave()
    other = Store(url_of(tmp_path), "study", TINY.replace(epochs=3), "train_loss")
    with pytest.raises(StudyError, match=r"replaced by another command.*--out"):
        first.claim(first_free)  # it came back, after another question took its place
    assert other.claim(first_free).point == POINTS[0]


def test_a_process_that_dies_has_no_study_open(tmp_path):
    code = f"""
        import os, time
        from small_studies import TINY
        from mukron.study.store import Store
        store = Store({url_of(tmp_path)!r}, "study", TINY, "train_loss")
        print("open", flush=True)
        time.sleep(60)
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        with pytest.raises(StudyError, match="trains something else"):
            Store(url_of(tmp_path), "study", TINY.replace(epochs=3), "train_loss")
        process.kill()
    Store(url_of(tmp_path), "study", TINY.replace(epochs=3), "train_loss")


def test_a_trial_over_which_the_clock_was_set_back_has_taken_its_time(store, monkeypatch):
    claim = store.claim(first_free)
    began = claim.began
    now = datetime.now() - timedelta(hours=1)

    class Earlier(datetime):
        @classmethod
        def now(cls, tz=None):
            return now

    monkeypatch.setattr("optuna.storages._rdb.storage.datetime", Earlier)
    monkeypatch.setattr("mukron.study.store.time.monotonic", lambda: began + 5.0)
    store.end(claim, "finished", ROWS, "", 1.0)
    trial = store.study.get_trials(deepcopy=False)[0]
    assert trial.duration.total_seconds() < -3000
    assert [entry.seconds for entry in store.entries()] == [5.0]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://localhost/x", "expected sqlite:///FILE or postgresql://"),
        ("nonsense", "expected sqlite:///FILE"),
        ("sqlite:////no/such/folder/study.db", "No such file or directory"),
        ("postgresql://me:secret@127.0.0.1:1/none", r"psycopg://me:[*]+@127.0.0.1:1/none: .*connection"),
    ],
)
def test_a_storage_that_cannot_be_used_is_told_so_without_its_password(url, said):
    with pytest.raises(StudyError, match=said) as raised:
        Store(url, "study", TINY, "train_loss")
    assert "secret" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")  # which Optuna leaves where it cannot start
def test_a_database_of_something_else_is_told_so(tmp_path):
    (tmp_path / "study.db").write_text("These are not the tables you are looking for. " * 20)
    with pytest.raises(StudyError, match="not a database"):
        Store(url_of(tmp_path), "study", TINY, "train_loss")
    gc.collect()  # the warning comes here, not in another test


def test_a_metric_that_runs_do_not_have_is_told(tmp_path):
    study = tiny_study(tmp_path, metric="test_bleu")
    with pytest.raises(StudyError, match=r"'test_bleu'.*they have lr, train_loss, train_accuracy"):
        study.run()
    assert not times_ended(study)
    assert len(lost(study)) == 1
    assert len(wanted(study)) == 24


@pytest.mark.parametrize("name", ["median", "halving"])
def test_no_pruner_ends_the_study_over_a_trial_that_others_gave_up(name, store):
    store.study.pruner = pruner(name, 8)
    claim = store.claim(first_free)
    store.report(claim, 1.0, 1)
    store._storage.set_trial_state_values(claim.trial_id, optuna.trial.TrialState.FAIL)
    with pytest.warns(RuntimeWarning, match="what it reports of the trial is dropped"):
        store.report(claim, 1.0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert not store.fell_behind(claim)


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_the_tables_of_another_optuna_are_not_taken_for_damaged(tmp_path):
    Store(url_of(tmp_path), "study", TINY, "train_loss")
    gc.collect()
    with closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'v3.0.0.a'")
    with pytest.raises(StudyError, match="optuna storage upgrade") as raised:
        Store(url_of(tmp_path), "study", TINY, "train_loss")
    assert "damaged, or edited" not in str(raised.value)
    gc.collect()
