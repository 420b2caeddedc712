"""Save a checkpoint and exit after SIGTERM, SIGUSR1, SIGINT (Ctrl-C) or SIGHUP (lost terminal)."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from minivlmrl.config.time_limit import shorten_limits
from minivlmrl.distributed.process_group import World

# exit code for a run that was stopped by a signal and can be resumed (EX_TEMPFAIL in sysexits.h)
PREEMPTED = 75
# Further signals within this many seconds count as the same request, because a scheduler and torchrun may both forward
# one signal.
SAME_REQUEST = 5.0
LAST_CALL = 10.0  # seconds that a reward or a tool has after a signal


class Preempted(Exception):
    """Raised on all ranks after a signal; the run saves a checkpoint and exits with PREEMPTED."""


class StopSignals:
    """Context manager that turns the first stop signal into a saved checkpoint and a clean exit.

    A second signal, SAME_REQUEST seconds or more after the first, ends the process at once.
    `world` is the run's World. Long-running work calls its `stop_if_preempted` repeatedly.
    """

    NAMES = "SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGBREAK"
    SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))

    def __init__(self, world: World):
        self.world = replace(world, stop_if_preempted=self.stop_if_preempted)
        self.first: float | None = None  # time of the first signal
        self.exit_code = 0  # exit code of the run: PREEMPTED if a signal ended it
        # function that returns False during the optimizer steps on a rollout, when stopping would lose work
        self.can_stop: Callable[[], bool] = lambda: True

    def __enter__(self) -> "StopSignals":
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self.handlers = {}  # signal -> previous handler, which __exit__ restores
        # Python only allows the main thread to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # for example, nohup ignores SIGHUP
                    self.handlers[number] = signal.signal(number, self.on_signal)
        return self

    def __exit__(self, _type, error, _traceback) -> bool:
        """Restore the signal handlers, and print the message of Preempted instead of raising it."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        shorten_limits(math.inf)
        if not isinstance(error, Preempted):
            return False
        self.exit_code = PREEMPTED
        if self.world.is_main:
            print(error, *getattr(error, "__notes__", ()), sep=": ", flush=True)
        return True

    def on_signal(self, number: int, _frame):
        """Record the first signal; end the process if a second one arrives later."""
        now = time.monotonic()
        name = signal.Signals(number).name
        same_request = min(SAME_REQUEST, 1.0) if name == "SIGINT" else SAME_REQUEST
        if name == "SIGHUP":
            for stream in self.terminals:  # because writing to a closed terminal is an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if self.first is None:
            self.first = now
            shorten_limits(LAST_CALL)
            if self.world.is_main:  # os.write, because print is not safe in a signal handler
                text = (
                    f"\n{name}: the run saves a checkpoint as soon as possible and then exits; a reward or a tool "
                    f"may take {LAST_CALL:g} more seconds; send the signal again to exit now\n"
                )
                os.write(2, text.encode())
        elif now - self.first >= same_request:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop_if_preempted(self):
        """Raise Preempted after a signal, unless stopping now would lose optimizer steps.

        All ranks must call this method together.
        """
        if self.is_requested() and self.can_stop():
            raise Preempted("preempted")

    def is_requested(self) -> bool:
        """Return True if any rank has received a signal.

        All ranks must call this method together, so that they stop after the same step.
        """
        return self.world.sum(self.first is not None)[0] > 0
