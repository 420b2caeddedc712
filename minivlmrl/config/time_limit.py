"""Limit how long a user's code may run."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

REPEATED = 0.01  # seconds after which Overtime is raised again in code that catches it
longest = math.inf  # upper bound in seconds for all time limits, set by shorten_limits


class Overtime(BaseException):
    """Raised if a user's code takes too long. Overtime is a BaseException, so `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise the exception Overtime in a `with` block that runs longer than `seconds`.

    A timer sends the signal SIGALRM, which also interrupts a sleep, a request or a regular expression. There is no time
    limit on Windows or outside the main thread. The signal cannot stop C code that never returns, or code that handles
    SIGALRM itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_):
        limit = min(seconds, longest)
        raise Overtime(f"the call took more than {limit:g} second{'' if limit == 1 else 's'}")

    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, longest), REPEATED)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # again, because Overtime may have interrupted the first call
        # `former` is None if C code installed the handler; signal.signal does not accept None.
        signal.signal(signal.SIGALRM, former or signal.SIG_DFL)


def shorten_limits(seconds: float):
    """Lower the current time limit and all later time limits to at most `seconds`.

    A run calls shorten_limits after a stop signal, so that a reward function that hangs does not delay the end of the
    run.
    """
    global longest
    longest = seconds
    if hasattr(signal, "SIGALRM") and signal.getitimer(signal.ITIMER_REAL)[0] > seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED)
