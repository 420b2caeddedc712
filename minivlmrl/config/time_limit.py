"""Limit the time of a user's code."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

REPEATED = 0.01  # seconds after which Overtime is raised again in code that catches it
longest = math.inf  # seconds that every limit has at most, see `shorten_limits`


class Overtime(BaseException):
    """Raised inside code that exceeds its time limit; not a subclass of Exception, which the code may catch."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Overtime inside a `with` block that runs longer than `seconds`.

    Overtime is raised by SIGALRM, which also interrupts a sleep, a request or a regular expression. There is no limit
    on Windows and outside the main thread, nor for code that replaces the alarm or is not Python and never returns.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_):
        raise Overtime(f"the call took more than {min(seconds, longest):g} seconds")

    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, longest), REPEATED)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        # The timer is cleared again, because the alarm may have interrupted the line that cleared it.
        signal.setitimer(signal.ITIMER_REAL, 0)
        # signal.signal returns None if the former handler was not installed from Python.
        signal.signal(signal.SIGALRM, former or signal.SIG_DFL)


def shorten_limits(seconds: float):
    """Limit the rest of a running `time_limit` block, and every later block, to this time.

    A signal handler calls shorten_limits, so that a run that must stop does not wait for a reward that hangs.
    """
    global longest
    longest = seconds
    if hasattr(signal, "SIGALRM") and signal.getitimer(signal.ITIMER_REAL)[0] > seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED)
