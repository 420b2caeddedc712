"""Test that a time limit stops code by an exception."""

import re
import signal
import threading
import time

import pytest

from minivlmrl.extras.agents import time_limit as limits

STOPPED = {
    "a sleep": lambda: time.sleep(60),
    "a lock": threading.Event().wait,
    "a regular expression": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
}


@pytest.mark.parametrize("code", STOPPED)
def test_code_is_stopped_by_an_exception(code):
    start = time.monotonic()
    num_threads = threading.active_count()  # pytest's workers and progress bars also have threads
    with pytest.raises(limits.Overtime, match=r"^the call took more than 0\.05 seconds$"), limits.time_limit(0.05):
        STOPPED[code]()
    assert time.monotonic() - start < 2.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and threading.active_count() == num_threads


def test_overtime_is_raised_again_in_code_that_catches_it():
    caught = []
    with pytest.raises(limits.Overtime), limits.time_limit(0.05):
        while True:
            try:
                time.sleep(60)
            except BaseException:
                caught.append(1)
                if len(caught) == 3:
                    raise
    assert len(caught) == 3


@pytest.fixture
def alarm():
    """Set an alarm in 100 seconds, as pytest-timeout does for each test."""
    former, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 100)
    yield
    signal.setitimer(signal.ITIMER_REAL, *timer)
    signal.signal(signal.SIGALRM, former)


def test_an_alarm_of_the_caller_keeps_its_time(alarm):
    with limits.time_limit(50):
        pass
    assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
