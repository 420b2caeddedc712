"""The process of one rank, and how it tells torchrun and the user what went wrong."""

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.parsing import shortened
from minivlmrl.files import write_json


def is_first() -> bool:
    """Whether this process is the first rank, before and after the run."""
    return os.environ.get("RANK", "0") == "0"


def show_mistake(error: Exception) -> bool:
    """Print what a disk refuses, or an error that this package has worded, as one line.

    torchrun shows it too.

    Returns False for what is neither: a bug.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    our_folders = (str(Path(__file__).parents[1]), str(recipes_folder()))
    is_ours = last.filename.startswith(our_folders)
    message = shortened(" ".join(str(error).split()))
    code = getattr(error, "errno", None)
    names_a_file = getattr(error, "filename", None) is not None
    if code in (errno.ENOSPC, errno.EDQUOT):
        message += ": the disk is full; make room and go on with --resume=auto"
    elif code == errno.EFBIG:
        message += ": raise the largest size of a file (ulimit -f) and go on with --resume=auto"
    elif not names_a_file and not (is_ours and (last.line or "").startswith("raise ")):
        return False
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        info = {"py_callstack": message, "timestamp": str(int(time.time()))}
        write_json(Path(error_file), {"message": {"message": message, "extraInfo": info}})
    if not error_file or is_first():  # one line, not one of each rank
        print(message, file=sys.stderr)
    return True


def run_rank(work: Callable[[], int]):
    """Call work as one rank, and end the process with its exit code: 2 a mistake, 1 a bug."""

    @record
    def recorded() -> int:
        try:
            return work()
        except (ValueError, OSError) as error:
            if not show_mistake(error):
                raise
            return 2
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                # caused by another rank, whose error torchrun must see first: it shows that one
                time.sleep(3)
            raise

    try:
        code = recorded()
    except Exception:
        traceback.print_exc()
        code = 1
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread of gloo that frees a tensor in Python's shutdown aborts it (pytorch pull request
    # 179291)
    os._exit(code or 0)
