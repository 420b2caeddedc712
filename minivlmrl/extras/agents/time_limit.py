"""Limit the time for a tool call: interrupt tools that take too long."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

REPEATED = 0.01  # seconds until the timer raises Overtime again, in case the tool has caught it


class Overtime(BaseException):
    """Raised when a tool takes too long; user code cannot catch it with `except Exception`."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Overtime in a `with` block that runs longer than `seconds`.

    A timer sends SIGALRM, which also interrupts sleep, requests and regular expressions. The limit has no effect on
    Windows, outside the main thread, in C code that never returns, or in code that sets its own SIGALRM handler.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        return

    start = time.monotonic()
    delay, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    former = signal.signal(signal.SIGALRM, partial(stop, seconds))
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # stop the timer again: Overtime may have interrupted the first call
        # `former` is None if C code installed the handler; signal.signal rejects None
        signal.signal(signal.SIGALRM, former or signal.SIG_DFL)
        if delay:
            remaining = start + delay - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(remaining, REPEATED), interval)


def stop(seconds: float, *_):
    raise Overtime(f"the call took more than {seconds:g} second{'' if seconds == 1 else 's'}")
