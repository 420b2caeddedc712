"""Limit a call's time, and end the process if the call can neither continue nor be stopped."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# interval in seconds at which Overtime is raised again in code that catches it
REPEATED = 0.01
# seconds after the limit at which the process ends, if no exception has stopped the code
GRACE = 2.0


class Overtime(BaseException):
    """Raised inside code that exceeds its time limit.

    The base class is BaseException, because the code may catch every `Exception`.
    """


def end_process(message: str):
    """Print a message and end the process without leaving a user's code."""
    print(message, file=sys.stderr, flush=True)
    os._exit(2)


# The function that is called if a user's code can neither continue nor be interrupted. During
# a run, StopSignals replaces it with a function that also saves a checkpoint.
on_hang: Callable[[str], None] = end_process


def is_interrupt(error: BaseException) -> bool:
    """Return True for Ctrl-C and Overtime, which are no errors of the code in which they are raised.

    During a run, Ctrl-C does not raise KeyboardInterrupt, because StopSignals handles the signal. A
    KeyboardInterrupt is then an error of the code.
    """
    handler = signal.getsignal(signal.SIGINT)
    ctrl_c = isinstance(error, KeyboardInterrupt) and handler is signal.default_int_handler
    return ctrl_c or isinstance(error, Overtime)


@contextmanager
def time_limit(seconds: float, called: str = "the call") -> Iterator[None]:
    """Raise Overtime inside a `with` block that runs longer than `seconds`.

    Overtime is raised by SIGALRM, which also interrupts a sleep, a request or a regular expression.
    If the block has not ended GRACE seconds later, a thread ends the process, see `on_hang`. This
    happens if the block catches every exception, runs other code than Python or has replaced the
    alarm, and also on Windows and outside the main thread. Nothing stops code that holds Python's
    global lock for ever.

    Args:
        seconds: time limit.
        called: what the block calls, for the message when the process ends.
    """

    def end():
        on_hang(
            f"{called} took more than {seconds:g} seconds and cannot be stopped, because it catches "
            "every exception or runs code that is not Python"
        )

    backstop = threading.Timer(seconds + GRACE, end)
    backstop.daemon = True
    backstop.start()
    try:
        with _alarm(seconds):
            yield
    finally:
        backstop.cancel()
        backstop.join()  # if the thread ends the process just now, the block must not continue


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise Overtime in the main thread after some seconds, and then every REPEATED seconds.

    If a SIGALRM timer was set before, it is restored afterwards.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_):
        raise Overtime(f"the call took more than {seconds:g} seconds")

    start = time.monotonic()
    former_handler = signal.signal(signal.SIGALRM, stop)
    former_seconds, former_interval = signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        # The alarm may have interrupted the line above, so the timer is cleared again.
        signal.setitimer(signal.ITIMER_REAL, 0)
        # signal.signal returns None if the former handler was not installed from Python.
        signal.signal(signal.SIGALRM, former_handler or signal.SIG_DFL)
        if former_seconds:
            remaining = max(former_seconds - (time.monotonic() - start), 0.001)
            signal.setitimer(signal.ITIMER_REAL, remaining, former_interval)
