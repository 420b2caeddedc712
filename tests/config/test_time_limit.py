"""Test that a time limit stops code by an exception."""

import re
import signal
import threading
import time

import pytest

from minivlmrl.config.time_limit import Overtime, is_interrupt, time_limit


def endless():
    while True:
        pass


STOPPED = {
    "a loop": endless,
    "a sleep": lambda: time.sleep(60),
    "a lock": threading.Event().wait,
    "a regular expression": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
}


@pytest.mark.parametrize("code", STOPPED)
def test_code_is_stopped_by_an_exception(code):
    start = time.monotonic()
    num_threads = threading.active_count()  # pytest's workers and progress bars have threads
    with pytest.raises(Overtime, match=r"^the call took more than 0\.05 seconds$"), time_limit(0.05):
        STOPPED[code]()
    assert time.monotonic() - start < 2.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and threading.active_count() == num_threads


def test_overtime_is_raised_again_in_code_that_catches_it():
    caught = []
    with pytest.raises(Overtime), time_limit(0.05):
        while True:
            try:
                time.sleep(60)
            except BaseException:
                caught.append(1)
                if len(caught) == 3:
                    raise
    assert len(caught) == 3


def test_ctrl_c_is_not_an_error_of_the_code():
    """During a run StopSignals handles SIGINT, so that a KeyboardInterrupt comes from the code."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert is_interrupt(KeyboardInterrupt()) and is_interrupt(Overtime())
        assert not is_interrupt(SystemExit()) and not is_interrupt(GeneratorExit())
        signal.signal(signal.SIGINT, lambda *_: None)
        assert not is_interrupt(KeyboardInterrupt()) and is_interrupt(Overtime())
    finally:
        signal.signal(signal.SIGINT, before)
