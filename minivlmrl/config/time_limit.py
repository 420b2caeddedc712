"""Limit the time of a user's code."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

REPEATED = 0.01  # seconds after which Overtime is raised again in code that catches it


class Overtime(BaseException):
    """Raised inside code that exceeds its time limit; not an Exception, which the code may catch."""


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
        raise Overtime(f"the call took more than {seconds:g} seconds")

    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        # The alarm may have interrupted the line above, so the timer is cleared again.
        signal.setitimer(signal.ITIMER_REAL, 0)
        # signal.signal returns None if the former handler was not installed from Python.
        signal.signal(signal.SIGALRM, former or signal.SIG_DFL)
