"""Waiting for a lock: what counts as waiting."""

from __future__ import annotations

from types import SimpleNamespace

from mukron.workers import locks


def test_a_process_that_was_paused_itself_goes_on_waiting(monkeypatch):
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += 600 if now == 0 else seconds

    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    attempts = iter([False, False, True])
    locks.wait_for(lambda: next(attempts), "lock")
    assert now > locks.GIVEN_UP_AFTER
