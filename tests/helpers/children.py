"""Forked children of a test: each ends where its work ends, and none goes on as a second pytest."""

import os
import signal
import traceback
from collections.abc import Callable

import pytest

from minivlmrl.run.signals import StopSignals


def fork(work: Callable[[], int | None]) -> int:
    """Call work() in a child, which ends with the code that it returns, or with 1 after an error; the child's id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    """Wait for a child; negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def default_signals():
    """Let signals do what they do in a terminal: nohup ignores SIGHUP, `pytest &` of a script SIGINT."""
    defaults = {number: signal.SIG_DFL for number in StopSignals.SIGNALS} | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
