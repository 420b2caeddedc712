"""End processes that hang."""

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

stop_watchdog = faulthandler.cancel_dump_traceback_later


@contextmanager
def hang_watchdog(max_wait: float | None, size: int) -> Iterator[None]:
    """End the process with a traceback and exit code 1 if a `with` block hangs."""
    restart_watchdog(max_wait, size)
    try:
        yield
    finally:
        stop_watchdog()


def restart_watchdog(max_wait: float | None, size: int):
    """Restart the timer that ends this process if it hangs.

    Args:
        max_wait: seconds, None = no limit. With several ranks, the limit is 2 * max_wait: a rank may wait max_wait for
            others, and then save a state.
    """
    if max_wait is not None:
        faulthandler.dump_traceback_later(max_wait if size == 1 else 2 * max_wait, exit=True, file=2)
