"""Studies that train many points at once: the same results, and nobody's points are lost."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from small_studies import LIGHT, TINY, lost, times_ended, tiny_study, wanted
from test_workers import SLOW, command, running, until, worker_of

import mukron.study.work as work
from mukron.study import Search
from mukron.study.progress import progress_of
from mukron.study.store import ENDED, WORKER_DIED, Entry
from mukron.train import RunError, train_stack
from mukron.train.records import INTERRUPTED

STACKS = {"one_by_one": False}


@pytest.fixture
def stacks(monkeypatch):
    """How many runs each stack had."""
    found = []

    def watched(configs, **options):
        found.append(len(configs))
        return train_stack(configs, **options)

    monkeypatch.setattr(work, "train_stack", watched)
    return found


def test_a_stacked_study_is_the_one_of_single_runs(tmp_path, stacks):
    config = TINY.replace(dtype="float64")
    alone = tiny_study(tmp_path / "alone", config, lr=(0.01, 1e6)).run()
    assert stacks == []
    study = tiny_study(tmp_path / "stacked", config, lr=(0.01, 1e6), **STACKS)
    record = study.run()
    assert stacks == [8, 8]  # both schemes and seeds of a width at once
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    theirs = {result.point: result for result in alone.results}
    for ours in record.results:
        other = theirs[ours.point]
        assert (ours.status, ours.reason) == (other.status, other.reason)
        for row, their_row in zip(ours.rows, other.rows, strict=True):
            assert {**row, "seconds": 0} == pytest.approx({**their_row, "seconds": 0}, rel=1e-9)
    assert [each.verdict for each in record.certificate.judgements] == [
        each.verdict for each in alone.certificate.judgements
    ]


def test_what_cannot_be_stacked_is_trained_one_by_one(tmp_path, stacks):
    options = {"widths": (8,), "seeds": 1, "lr": (0.01, 0.02), **STACKS}
    tiny_study(tmp_path / "kept", keep_runs=True, **options).run()
    tiny_study(tmp_path / "searched", search=Search(3), **options).run()
    tiny_study(tmp_path / "other", TINY.replace(clip_norm=1.0), **options).run()
    assert stacks == []
    study = tiny_study(tmp_path / "mixed", schemes=("mup", "mup/max-eigenvalue", "sp"), **options)
    study.run()
    assert stacks == [4]
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)


def test_workers_share_the_points_of_a_width(tmp_path):
    study = tiny_study(tmp_path, LIGHT, **STACKS)
    study.run(workers=2)
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    assert {entry.together for entry in study.store.entries()} <= {1, 2, 3, 4, 5, 6}


def test_a_stack_that_is_stopped_gives_all_its_points_back(tmp_path, stacks):
    study = tiny_study(tmp_path, TINY.replace(epochs=20), **STACKS)
    ticks = []

    def interrupt(now=False):
        ticks.append(now)
        if len(running(study)) == 12 and len(ticks) > 5:
            signal.raise_signal(signal.SIGINT)

    study._reporter = lambda workers, progress: interrupt
    with pytest.raises(KeyboardInterrupt):
        study.run()
    assert not running(study)
    assert [entry.reason for entry in lost(study)] == [INTERRUPTED] * 12
    again = tiny_study(tmp_path, TINY.replace(epochs=20), **STACKS)
    again.run()
    assert stacks == [12, 12, 12]
    assert times_ended(again) == dict.fromkeys(wanted(again), 1)


def test_an_error_in_a_stack_gives_all_its_points_back(tmp_path, monkeypatch):
    def broken(configs, **options):
        raise RunError("no such data")

    monkeypatch.setattr(work, "train_stack", broken)
    study = tiny_study(tmp_path, **STACKS)
    with pytest.raises(RunError, match="no such data"):
        study.run()
    assert [entry.reason for entry in lost(study)] == ["RunError: no such data"] * 12


def test_points_of_a_worker_that_was_killed_are_taken_up_one_by_one(tmp_path):
    """Any of them may have killed it."""
    options = {"widths": (8,), "schemes": ("mup",), "lr": (0.01, 0.02), **STACKS}
    study = tiny_study(tmp_path, SLOW, **options)
    foreman = command(tmp_path, workers=2, **options)
    victim = until(lambda: running(study))[0]
    victims = [entry for entry in running(study) if worker_of(study, entry) == worker_of(study, victim)]
    os.kill(worker_of(study, victim), signal.SIGKILL)
    assert foreman.wait(120) == 0, (tmp_path / "said").read_text()
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)
    gone = lost(study)
    assert {entry.reason for entry in gone} == {WORKER_DIED}
    assert {entry.point for entry in victims} <= {entry.point for entry in gone}
    again = [entry for entry in study.store.entries() if entry.point == victim.point][-1]
    assert again.together == 1


def test_strange_times_end_no_progress(tmp_path):
    """As of trials over which a clock was set back, or of earlier versions, which kept no times."""
    study = tiny_study(tmp_path, widths=(8, 16), lr=(0.01, 0.02), seeds=1)
    points = list(study.design.points([]))
    for times in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0)):
        entries = [Entry(n, point, ENDED, seconds=times[point.width == 16]) for n, point in enumerate(points)]
        assert progress_of(study.design, entries[:-1], 1).seconds_left is not None


def test_time_left_counts_a_stack_as_one(tmp_path):
    study = tiny_study(tmp_path, **STACKS)
    first = study.store.claim_many(study.design.stack)
    assert len(first) == 12
    for claim in first:
        study.store.end(claim, "finished", [{"epoch": 1, "train_loss": 1.0}], "", 0.0)
    entries = study.store.entries()
    assert {entry.together for entry in entries} == {12}
    alike = [replace(entry, seconds=5.0) for entry in entries]
    assert progress_of(study.design, alike, 1).seconds_left == pytest.approx(12 * 2 * 5)  # a width twice the last
    study.store.claim_many(study.design.stack)
    both = [*alike, *study.store.entries()[12:]]
    at = progress_of(study.design, both, 1)
    assert at.running == 12
    assert at.seconds_left == pytest.approx(6 * 2 * 5)  # half done, and one stack is one that works
