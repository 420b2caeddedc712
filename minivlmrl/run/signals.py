"""SIGTERM, SIGUSR1, SIGINT (Ctrl-C), SIGHUP (a lost terminal): save and leave soon."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from minivlmrl.distributed.process_group import World

PREEMPTED = 75  # exit code: come again later (EX_TEMPFAIL of sysexits.h)
# further signals within so many seconds count as one: a scheduler and torchrun may both pass one on
SAME_REQUEST = 5.0


class Preempted(Exception):
    """The state is saved; this process must end with exit code PREEMPTED."""


class StopSignals:
    """Note the first signal; a second one, SAME_REQUEST or more later, ends the process at once.

    Its `world` is the one of a run that long work may end, see stop_if_preempted.
    """

    NAMES = "SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGBREAK"
    SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))

    def __init__(self, world: World):
        self.world = replace(world, stop_if_preempted=self.stop_if_preempted)
        self.first: float | None = None  # when the first signal came
        self.exit_code = 0  # of the run: PREEMPTED if a signal ended it
        # name where all that was trained is saved, now if need be; None: the next rollout has begun
        self.save: Callable[[], object] = lambda: "the last state, if there is one"

    def __enter__(self) -> "StopSignals":
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self.handlers = {}  # those that this context replaces
        if threading.current_thread() is threading.main_thread():  # Python allows no other
            for number in self.SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                    self.handlers[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, _type, error, _traceback) -> bool:
        """Print the message of Preempted instead of raising it."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if not isinstance(error, Preempted):
            return False
        self.exit_code = PREEMPTED
        if self.world.is_main:
            print(error, flush=True)
        return True

    def note(self, number: int, _frame):
        """Handle a signal."""
        now = time.monotonic()
        name = signal.Signals(number).name
        same_request = min(SAME_REQUEST, 1.0) if name == "SIGINT" else SAME_REQUEST
        if name == "SIGHUP":
            for stream in self.terminals:  # to write to one that is gone is an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if self.first is None:
            self.first = now
            if self.world.is_main:  # print is not safe in a handler
                text = f"\n{name}: the state is saved as soon as it can be; again: end now\n"
                os.write(2, text.encode())
        elif now - self.first >= same_request:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop_if_preempted(self):
        """After a signal end long work (Preempted) if nothing is lost; all ranks call it."""
        if not self.asked():
            return
        state = self.save()
        if state:
            raise Preempted(f"preempted: --resume=auto goes on from {state}")

    def asked(self) -> bool:
        """Whether any rank was signalled; all ranks call this, to stop after the same step."""
        return self.world.sum(self.first is not None)[0] > 0
