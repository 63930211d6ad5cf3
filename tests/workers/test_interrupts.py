"""Ctrl-C waits for the step under way, in every room alike."""

from __future__ import annotations

import signal
import threading

import pytest

from mukron.workers.interrupts import interruptible


def press(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


@pytest.fixture(autouse=True)
def handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("terminate", [False, True])
def test_the_first_press_is_a_question_and_the_second_acts(terminate):
    with interruptible(terminate=terminate) as stopped:
        assert not stopped()
        press()
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_patient_block_hears_the_same_signal_twice():
    with interruptible(terminate=True, patient=True) as stopped:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            press(number)
            assert stopped()


def test_all_blocks_around_hear_it_and_the_second_press_acts_within_both():
    with interruptible(terminate=True) as study:
        with interruptible() as run:
            press()
            assert run()
            assert study()
            with pytest.raises(KeyboardInterrupt):
                press()
        assert study()


def test_being_told_to_end_is_ctrl_c():
    with interruptible(terminate=True) as study, interruptible() as run:
        press(signal.SIGTERM)
        assert study()
        assert run()


def test_a_handler_of_the_user_is_called_too():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with interruptible() as stopped:
            press()
            press()
            assert stopped()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [signal.SIGINT, signal.SIGINT]


def test_a_signal_that_is_ignored_reaches_a_foremans_worker_alone():
    """A shell without job control starts background processes so; a foreman must still be able to stop his workers."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as stopped:
            press()
            assert not stopped()
        with interruptible(terminate=True) as stopped:
            press()
            assert stopped()
            with pytest.raises(KeyboardInterrupt):
                press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_never_stopped():
    answers = []

    def work() -> None:
        with interruptible(terminate=True) as stopped:
            answers.append(stopped())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [False]
