"""Let ranks wait for each other for any time, and notice at once when a rank ends.

A collective operation fails if a rank is late by more than the process group's timeout. This is
right for training, in which all ranks do the same, but not for sampling, tools, rewards and saving,
which may take much longer on one rank than on another.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

INTERVAL = 0.5  # seconds between two exchanges while this rank computes
NOTICE = 60.0  # seconds of waiting after which the ranks that are waited for are printed
ENDED = 2**62  # number of waits that a rank reports at a run's end


class Pulse:
    """A thread that exchanges with all ranks how many times each rank has begun to wait.

    The threads use a gloo group of their own, so that their exchanges cannot be confused with the
    collective operations of the main threads.

    Args:
        timeout: time after which a rank counts as lost if its thread does not take part, for
            example because the network is interrupted. The main thread may be busy for longer.
        on_lost: function that is called when a rank is lost, even if the main thread is busy.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, on_lost: Callable[[], None]):
        self.rank = rank
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.on_lost = on_lost
        self.num_waits = 0  # number of waits on this rank
        self.num_waits_of_ranks = [0] * size  # all ranks' counts at the last exchange
        self.error: RuntimeError | None = None  # the exchange's error after a rank was lost
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        """Exchange the wait counts until all ranks have ended, or a rank is lost."""
        try:
            while min(self.num_waits_of_ranks) < ENDED:
                sent = self.num_waits
                numbers = torch.zeros(len(self.num_waits_of_ranks), dtype=torch.long)
                numbers[self.rank] = sent
                dist.all_reduce(numbers, group=self.group)
                with self.changed:
                    self.num_waits_of_ranks = numbers.tolist()
                    self.changed.notify_all()
                    # a rank that waits begins the next exchange at once
                    is_busy = self.num_waits == sent == min(self.num_waits_of_ranks)
                    if is_busy and sent < ENDED:
                        self.changed.wait_for(lambda sent=sent: self.num_waits != sent, INTERVAL)
        except RuntimeError as error:
            self.on_lost()
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def wait(self, work: str):
        """Wait until all ranks call this method; after NOTICE seconds, print who is waited for.

        Args:
            work: the work that the ranks have done, for the message.

        Raises:
            RuntimeError: a rank was lost.
        """
        with self.changed:
            self.num_waits += 1
            self.changed.notify_all()
            begin = time.monotonic()
            next_notice = NOTICE
            while late := self.late_ranks():
                if self.error is not None:
                    raise self.error
                self.changed.wait(min(NOTICE, 1.0))
                seconds = time.monotonic() - begin
                if seconds >= next_notice:
                    next_notice *= 2
                    self.print_late(late, seconds, work)

    def late_ranks(self) -> list[int]:
        """Return the ranks that this rank waits for."""
        numbers = enumerate(self.num_waits_of_ranks)
        return [rank for rank, number in numbers if number < self.num_waits]

    def print_late(self, late: list[int], seconds: float, work: str):
        """Print the ranks that are waited for, on the first rank that waits."""
        waiting = [rank for rank in range(len(self.num_waits_of_ranks)) if rank not in late]
        if waiting[:1] == [self.rank]:
            print(
                f"rank {self.rank} has waited {seconds:.0f} seconds for "
                f"{'rank' if len(late) == 1 else 'ranks'} {', '.join(map(str, late))} ({work})",
                flush=True,
            )

    def end(self):
        """End the thread on all ranks. All ranks must call this method."""
        with self.changed:
            self.num_waits = ENDED
            self.changed.notify_all()
        self.thread.join()
