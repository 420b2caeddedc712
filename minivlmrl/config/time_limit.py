"""Time limits for user code."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

REPEATED = 0.01  # seconds until Overtime is raised again, if user code catches it
longest = math.inf  # upper bound on all time limits, in seconds; see shorten_limits


class Overtime(BaseException):
    """Raised when user code takes too long; user code cannot catch it with `except Exception`."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise Overtime in a `with` block that runs longer than `seconds`; None = no limit.

    A timer sends SIGALRM, which also interrupts sleep, requests and regular expressions. The limit has no effect on
    Windows, outside the main thread, in C code that never returns, or in code that sets its own SIGALRM handler.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if seconds is None or not in_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        return

    start = time.monotonic()
    delay, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    former = signal.signal(signal.SIGALRM, partial(stop, seconds))
    signal.setitimer(signal.ITIMER_REAL, min(seconds, longest), REPEATED)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # stop the timer here too: Overtime may interrupt the call above
        # None stands for a handler from C code, which signal.signal rejects
        signal.signal(signal.SIGALRM, former or signal.SIG_DFL)
        if delay:
            signal.setitimer(signal.ITIMER_REAL, max(start + delay - time.monotonic(), REPEATED), interval)


def stop(seconds: float, *_):
    limit = min(seconds, longest)
    raise Overtime(f"the call took more than {limit:g} second{'' if limit == 1 else 's'}")


def shorten_limits(seconds: float):
    """Lower the current and all later time limits to at most `seconds`.

    Called after a stop signal, so that a hanging reward function delays the exit by at most `seconds`.
    """
    global longest
    longest = seconds
    is_ours = hasattr(signal, "SIGALRM") and getattr(signal.getsignal(signal.SIGALRM), "func", None) is stop
    if is_ours and signal.getitimer(signal.ITIMER_REAL)[0] > seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED)
