"""Limit the time of a user's code."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

REPEATED = 0.01  # seconds after which Overtime is raised again in code that catches it
longest = math.inf  # upper bound in seconds for all time limits, set by shorten_limits


class Overtime(BaseException):
    """A user's code takes too long. Because Overtime is a BaseException, `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise the exception Overtime in a `with` block that runs longer than `seconds`.

    A timer sends the signal SIGALRM, which also interrupts a sleep, a request or a regular expression. time_limit has
    no effect on Windows or outside the main thread. Code that replaces the handler of SIGALRM, and C code that never
    returns, is not interrupted.
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
        # The exception Overtime may have interrupted the first call of setitimer, so the timer is stopped again.
        signal.setitimer(signal.ITIMER_REAL, 0)
        # signal.signal returns None for a handler that C code has installed, but does not accept None as a handler.
        signal.signal(signal.SIGALRM, former or signal.SIG_DFL)


def shorten_limits(seconds: float):
    """Shorten the time limit that is running, and all later time limits, to at most `seconds`.

    A run calls shorten_limits after a stop signal, so that the run does not wait for a reward that hangs.
    """
    global longest
    longest = seconds
    if hasattr(signal, "SIGALRM") and signal.getitimer(signal.ITIMER_REAL)[0] > seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED)
