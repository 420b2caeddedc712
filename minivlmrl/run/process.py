"""Run one rank's process, and report errors to the user and to torchrun."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from minivlmrl.errors import in_one_line, print_traceback, user_error_message
from minivlmrl.json_files import write_json

# Seconds before a rank reports a lost connection to another rank. torchrun shows only the first error, which must be
# the other rank's.
LOST_RANK_REPORTS = 3.0


def report_user_error(message: str):
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        info = {"py_callstack": message, "timestamp": str(int(time.time()))}
        write_json(Path(error_file), {"message": {"message": message, "extraInfo": info}})
    if not error_file or os.environ.get("RANK", "0") == "0":  # print the message once, not on every rank
        print(message, file=sys.stderr, flush=True)


def run_rank(work: Callable[[], int]):
    """Call `work` in this rank's process, and exit with the exit code from `work`.

    Exit codes: 2 for an error that the user can correct, 1 for a bug or a lost rank.
    """

    @record
    def recorded() -> int:
        try:
            return work()
        except SystemExit as error:  # sys.exit(0) in user code, which torchrun would treat as success
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
            # ignore SIGTERM from torchrun, which would end this rank before it reports the error
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(LOST_RANK_REPORTS)
            report_user_error(
                f"rank {os.environ.get('RANK')} lost the connection to another rank, which ended or did not answer in "
                f"time ({in_one_line(error)}); look for an earlier error of that rank (the system may have "
                "killed it for lack of memory), and continue with --resume=auto"
            )
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
    # exit without Python's shutdown, in which gloo may abort (pytorch issue 179291)
    os._exit(code or 0)
