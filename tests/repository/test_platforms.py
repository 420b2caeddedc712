"""Imitate macOS and Windows: a run without the functions that Windows lacks, and memory in the units of macOS."""

import builtins
import errno
import fcntl
import io
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minivlmrl.run.metrics import memory_use

RUN = """
import sys
from tests.repository.test_platforms import pretend

def train(*options):
    from minivlmrl.commands.train import train_recipe
    short = ["--sft.max_steps=1", "--grpo.max_steps=2", "--grpo.prompts_per_step=2", "--data.eval_rows=2"]
    logs = ["--log_completions=1", "--state_steps=1", "--rewards={../my_rewards.py:length: 1.0}"]
    assert train_recipe(["shapes.yaml", *short, *logs, *options]) == 0

train("--output_dir=linux")
for name in [name for name in sys.modules if name.startswith("minivlmrl")]:
    del sys.modules[name]  # imported again on the simulated Windows
pretend()
train("--output_dir=windows", "--grpo.max_steps=1")
train("--output_dir=windows", "--resume=auto")
from minivlmrl.extras.agents.time_limit import time_limit
from minivlmrl.run.lock import locked
from minivlmrl.distributed.process_group import World
with time_limit(1), locked("windows", World()), locked("windows", World()):
    pass
"""
# files with times or options
OTHER = {"timings.jsonl", "config.yaml", "report.html", "summary.json", "run.json", "complete.json"}


def refuse(number: int):
    raise OSError(number, os.strerror(number))


def pretend():
    """Make Python behave as on Windows, except for path names.

    The modules fcntl and resource, timers and two signals are missing. A folder cannot be opened, a file opened for
    reading cannot be flushed, and a file cannot be renamed to an existing one. Each folder seems to be on a drive of
    its own, and lines of text end with two characters.
    """
    opened, synced, renamed, text = os.open, os.fsync, os.rename, io.open

    def open_handle(path, flags, *more, **options):
        is_folder = os.path.isdir(path) and not options  # but not in shutil.rmtree, which works differently on Windows
        return refuse(errno.EACCES) if is_folder else opened(path, flags, *more, **options)

    def open_text(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **options):
        newline = newline if {*"br"} & {*mode} or newline is not None else "\r\n"
        return text(file, mode, buffering, encoding, errors, newline, **options)

    read_only = lambda handle: fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY  # noqa: E731
    locking = lambda handle, *_: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: E731
    os.open, io.open, builtins.open = open_handle, open_text, open_text
    os.fsync = lambda handle: refuse(errno.EBADF) if read_only(handle) else synced(handle)
    os.rename = lambda old, new: refuse(errno.EEXIST) if os.path.exists(new) else renamed(old, new)
    os.path.relpath = lambda path: refuse(errno.EINVAL)
    sys.modules |= {"fcntl": None, "resource": None, "msvcrt": SimpleNamespace(locking=locking, LK_NBLCK=2)}
    for module, name in ((signal, "SIGUSR1"), (signal, "SIGHUP"), (signal, "SIGALRM"), (os, "O_DIRECTORY")):
        delattr(module, name)


@pytest.mark.slow
def test_windows_trains_resumes_and_saves_the_same_bytes(tmp_path):
    (home := tmp_path / "home").mkdir()
    (tmp_path / "my_rewards.py").write_text("def length(completions, **columns): return [*map(len, completions)]")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # a locale without UTF-8
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNDEFAULTENCODING": "1"}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=home, env=environment, capture_output=True, text=True)
    assert "output_dir: another run is writing into windows" in done.stderr.splitlines()[-1], done.stderr
    assert not [line for line in done.stderr.splitlines() if "EncodingWarning" in line and "/minivlmrl/" in line]
    files = []
    for run in (home / "linux", home / "windows"):
        written = [path for path in run.rglob("*") if path.is_file() and path.name not in OTHER]
        files.append({path.relative_to(run): path.read_bytes() for path in written})
    assert files[0] == files[1] and len(files[0]) > 9


def test_peak_memory_has_another_unit_on_macos_and_is_missing_on_windows(monkeypatch):
    [here] = memory_use().values()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory_use() == {"peak_memory_gib": pytest.approx(here / 1024, abs=1e-3)}
    monkeypatch.setitem(sys.modules, "resource", None)
    assert memory_use() == {}
