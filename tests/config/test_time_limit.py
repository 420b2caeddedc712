"""Test that a time limit stops any code: by an exception, or else by ending the process."""

import os
import re
import signal
import threading
import time

import pytest
from children import exit_code, fork

from minivlmrl.config import time_limit as file
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
    assert time.monotonic() - start < file.GRACE
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and threading.active_count() == num_threads


def catch_everything():
    for _ in range(50):  # so that the test fails, instead of hanging, if the process does not end
        try:
            time.sleep(2)
        except:  # noqa: E722
            continue


def replace_the_alarm():
    """Cancel the alarm, as math_verify.parse does, which has its own time limit."""
    signal.alarm(0)
    time.sleep(60)


def in_a_thread():
    """Start a limit outside the main thread, where no signal can raise an exception."""

    def work():
        with time_limit(0.05, "the tool call f"):
            time.sleep(60)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("code", [catch_everything, replace_the_alarm, in_a_thread])
def test_code_that_cannot_be_stopped_ends_the_process(code, monkeypatch, capfd):
    monkeypatch.setattr(file, "GRACE", 0.1)

    def work():
        with time_limit(60.0 if code is in_a_thread else 0.05, "the tool call f"):
            code()

    assert exit_code(fork(work)) == 2
    sentence = (
        "the tool call f took more than 0.05 seconds and cannot be stopped, because it catches every exception or "
        "runs code that is not Python\n"
    )
    assert capfd.readouterr().err == sentence


def test_the_process_does_not_continue_while_it_ends(monkeypatch):
    """A checkpoint that is saved when the process ends must not contain a later optimizer step."""

    def save_for_a_while(message):
        time.sleep(0.3)
        os._exit(7)

    def work():
        monkeypatch.setattr(file, "on_hang", save_for_a_while)
        monkeypatch.setattr(file, "GRACE", 0.0)
        with time_limit(0.05):
            signal.alarm(0)
            time.sleep(0.1)
        return 1

    assert exit_code(fork(work)) == 7


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
