"""Time limits for tool calls."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

REPEATED = 0.01  # seconds until Overtime is raised again, if user code catches it


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
        signal.setitimer(signal.ITIMER_REAL, 0)  # stop the timer here too: Overtime may interrupt the call above
        # None stands for a handler from C code, which signal.signal rejects
        signal.signal(signal.SIGALRM, former or signal.SIG_DFL)
        if delay:
            signal.setitimer(signal.ITIMER_REAL, max(start + delay - time.monotonic(), REPEATED), interval)


def stop(seconds: float, *_):
    raise Overtime(f"the call took more than {seconds:g} second{'' if seconds == 1 else 's'}")
