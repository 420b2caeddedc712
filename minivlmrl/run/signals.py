"""Save a state and exit after SIGTERM, SIGUSR1, SIGINT (Ctrl-C) or SIGHUP (lost terminal)."""

import os
import signal
import threading
import time
from dataclasses import replace

from minivlmrl.distributed.process_group import World

PREEMPTED = 75  # exit code after a stop signal: EX_TEMPFAIL = try again
# signals within this time count as one, in seconds, because both the scheduler and torchrun may send one
SAME_REQUEST = 5.0


class Preempted(Exception):
    """Raised on all ranks after a stop signal, to save a state and exit with code 75."""

    on_all_ranks = True


class StopSignals:
    """Context manager to handle stop signals during a run.

    A signal more than five seconds after the first (Ctrl-C: one second) ends the process at once. Long tasks such as
    sampling call world.stop_if_preempted, which raises Preempted after a signal.
    """

    NAMES = "SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGBREAK"
    SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))

    def __init__(self, world: World):
        self.world = replace(world, stop_if_preempted=self.stop_if_preempted)
        self.first: float | None = None  # time of the first signal
        self.exit_code = 0  # exit code for the run: PREEMPTED after a signal
        self.can_save = True  # False between two updates on the same rollout, because states contain no rollouts

    def __enter__(self) -> "StopSignals":
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self.handlers = {}  # {signal: previous handler}
        # Python forbids signal handlers in other threads
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # skip ignored signals, such as SIGHUP under nohup
                    self.handlers[number] = signal.signal(number, self.on_signal)
        return self

    def __exit__(self, _type, error, _traceback) -> bool:
        """Restore the signal handlers. If the run was preempted, print and suppress the exception."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if not isinstance(error, Preempted):
            return False
        self.exit_code = PREEMPTED
        if self.world.is_main:
            print(error, *getattr(error, "__notes__", ()), sep=": ", flush=True)
        return True

    def on_signal(self, number: int, _frame):
        now = time.monotonic()
        name = signal.Signals(number).name
        same_request = min(SAME_REQUEST, 1.0) if name == "SIGINT" else SAME_REQUEST
        if name == "SIGHUP":
            for stream in self.terminals:  # discard further output, because writing to a closed terminal fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if self.first is None:
            self.first = now
            if self.world.is_main:  # use os.write, because print is not safe in a signal handler
                text = (
                    f"\n{name}: the run stops as soon as possible, and saves a state if a step is done; send the "
                    "signal again to exit now\n"
                )
                os.write(2, text.encode())
        elif now - self.first >= same_request:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def stop_if_preempted(self):
        """Raise Preempted on all ranks if one has received a signal and a state can be saved.

        All ranks must call this.
        """
        [signaled] = self.world.sum(self.first is not None)
        if signaled and self.can_save:
            raise Preempted("preempted")
