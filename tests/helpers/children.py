"""Fork child processes in a test. A child exits after its work, so that it never continues as a second pytest."""

import os
import signal
import traceback
from collections.abc import Callable

import pytest

from minivlmrl.run.signals import StopSignals


def fork(work: Callable[[], int | None]) -> int:
    """Call work() in a child process, and return the child's id.

    The child exits with the code that work() returns, or with 1 after an exception.
    """
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
    """Wait for a child and return its exit code. It is the negative signal number if a signal ended the child."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def default_signals():
    """Restore the default handlers of signals: nohup ignores SIGHUP, and `pytest &` in a script ignores SIGINT."""
    defaults = {number: signal.SIG_DFL for number in StopSignals.SIGNALS} | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
