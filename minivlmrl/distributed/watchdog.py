"""Report late ranks, and end processes that hang."""

import faulthandler
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

NOTICE = 60.0  # seconds until a waiting rank reports late ranks

stop_watchdog = faulthandler.cancel_dump_traceback_later


@contextmanager
def log_stragglers(store: Store | None, rank: int, size: int, work: str) -> Iterator[None]:
    """Print which ranks are late if a `with` block takes longer than a minute.

    Args:
        store: torch.distributed store that counts entered `with` blocks per rank, None = print nothing.
        work: what ranks do, such as "read images".
    """
    if store is None:
        yield
        return
    number = store.add(f"waits of rank {rank}", 1)

    def print_notice():
        waits = [store.add(f"waits of rank {other}", 0) for other in range(size)]
        late = [other for other, done in enumerate(waits) if done < number]
        if late:
            print(f"rank {rank} has waited {NOTICE:g} s for ranks {late} to {work}", file=sys.stderr, flush=True)

    timer = threading.Timer(NOTICE, print_notice)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
