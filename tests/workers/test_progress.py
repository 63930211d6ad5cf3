"""Reports come when they are due, and locks are held by one at a time."""

from __future__ import annotations

import pytest

from mukron.workers import progress
from mukron.workers.locks import locked
from mukron.workers.progress import Reporter, Throttle


@pytest.fixture
def clock(monkeypatch):
    """A time that passes when it is told to."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_report_is_due_after_a_while_or_at_once_where_asked_for(clock):
    throttle = Throttle(10.0)
    assert [throttle.due(), throttle.due()] == [True, False]
    clock[0] += 9
    assert [throttle.due(), throttle.due(now=True)] == [False, True]
    clock[0] += 9
    assert not throttle.due()
    clock[0] += 1
    assert throttle.due()
    assert not Throttle(10.0, at_once=False).due()


def test_a_reporter_asks_where_the_work_stands_for_due_reports_alone(clock):
    asked, seen = [], []

    def standing():
        asked.append(clock[0])
        clock[0] += 3  # it takes a while
        return len(asked)

    report = Reporter(seen.append, standing, 10.0)
    report()
    report()
    clock[0] += 9
    report()  # ten seconds count from the end of a report
    assert seen == [1]
    clock[0] += 1
    report()
    report(now=True)
    assert seen == [1, 2, 3]


def test_without_a_listener_nothing_is_asked():
    Reporter(None, lambda: pytest.fail("asked"), 0.0)(now=True)


@pytest.mark.parametrize("name", ["", "file.lock"])
def test_a_lock_is_held_once_and_goes_with_its_block(tmp_path, name):
    path = tmp_path / name
    with locked(path) as first, locked(path, wait=False) as second:
        assert (first, second) == (True, False)
    with locked(path, wait=False) as third:
        assert third
    with pytest.raises(BlockingIOError), locked(path):  # the block's own errors are its own
        raise BlockingIOError
