"""Run one rank's process, and report errors to the user and to torchrun."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from minivlmrl.distributed.process_group import monitored_barrier
from minivlmrl.errors import print_traceback, user_error_message
from minivlmrl.json_files import write_json


def report_user_error(message: str):
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        info = {"py_callstack": message, "timestamp": str(int(time.time()))}
        write_json(Path(error_file), {"message": {"message": message, "extraInfo": info}})
    if not error_file or os.environ.get("RANK", "0") == "0":  # print the message once, not on every rank
        print(message, file=sys.stderr, flush=True)


def lost_ranks(error: RuntimeError) -> str:
    """Return an error message that names the ranks that caused a failed collective; "" if all ranks respond."""
    failures = []

    def ask():
        try:
            monitored_barrier(timedelta(seconds=3), names_all=True)
        except RuntimeError as late:
            failures.append(late)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(6)
    if asking.is_alive():  # monitored_barrier exceeds its timeout only if rank 0 does not respond
        failures.append("Rank 0 failed to pass")
    if not failures:
        return ""
    # wait, so that the failed rank reports first: torchrun shows only the first error
    time.sleep(3)
    named = re.search(r"Ranks? ([\d, ]*\d) failed to pass", f"{error}\n{failures[0]}")
    name = f"rank {named[1]}" if named else "a rank"
    return (
        f"{name} ended or did not answer in time, so rank {os.environ['RANK']} ends too; look for an earlier error of "
        "that rank (the system may have killed it for lack of memory), and continue with --resume=auto"
    )


def run_rank(work: Callable[[], int]):
    """Call `work` in this rank's process, and exit with the returned code.

    Exit codes: 2 for an error that the user can correct, 1 for a bug or a lost rank.
    """

    @record
    def recorded() -> int:
        try:
            return work()
        except SystemExit as error:  # torchrun would treat sys.exit(0) in user code as success
            raise RuntimeError("the run called sys.exit before its end") from error
        except Exception as error:
            line = user_error_message(error)
            if line is not None:
                report_user_error(line)
                return 2
            if not isinstance(error, RuntimeError):
                raise
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            # ignore SIGTERM from torchrun, which would end this rank before it can report the lost ranks
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            lost = lost_ranks(error)
            if not lost:
                raise
            report_user_error(lost)
            return 1

    try:
        code = recorded()
    except Exception as error:
        print_traceback(error)
        code = 1
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # skip Python's shutdown, in which gloo may abort (pytorch/pytorch#179291)
    os._exit(code or 0)
