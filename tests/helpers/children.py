"""Fork child processes that exit after their work, and never continue as a second pytest."""

import functools
import gc
import os
import signal
import socket
import traceback
from collections.abc import Callable

import pytest

from minivlmrl.distributed import process_group
from minivlmrl.run.signals import StopSignals


def fork(work: Callable[[], int | None]) -> int:
    """Fork a process that exits with work(), or with 1 after an exception; return the process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    """Wait for a child process; return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_processes(size: int, work: Callable[[int], int | None]) -> list[int]:
    """Call work(rank) in forked processes with torchrun's environment variables; return exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def begin(rank):
        gc.freeze()  # never free old process groups here: a forked process lacks their threads, and would abort
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return work(rank)

    return [exit_code(child) for child in [fork(functools.partial(begin, rank)) for rank in range(size)]]


def fork_ranks(size: int, work: Callable[[process_group.World], int | None], timeout: float) -> list[int]:
    """Call work(world) on gloo ranks in forked processes; return exit codes."""
    return fork_processes(size, lambda rank: work(process_group.setup(1, timeout, sharded=False)))


def hook_call(owner, name, number, before=lambda *_: None, after=lambda *_: None):
    """Replace a function so that its call `number` (from 1) also runs `before` and `after`."""
    original, calls = getattr(owner, name), []

    @functools.wraps(original)
    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            before(*arguments)
        result = original(*arguments, **options)
        if len(calls) == number:
            after(*arguments)
        return result

    setattr(owner, name, call)


@pytest.fixture
def default_signals():
    """Restore default signal handlers: nohup ignores SIGHUP, `pytest &` in a script SIGINT."""
    defaults = {number: signal.SIG_DFL for number in StopSignals.SIGNALS} | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
