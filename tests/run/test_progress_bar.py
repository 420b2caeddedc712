"""Test the progress bar in terminals of several widths, and that a file or a pipe shows none."""

import fcntl
import os
import struct
import subprocess
import sys
import termios

import pytest

CODE = """
import sys
from minivlmrl.run import progress_bar
progress_bar.SECONDS = 0
with progress_bar.ProgressBar("grpo", 4, initial=1) as bar:
    bar.update(values=["reward=0.50", "kl=0.01"])
    with progress_bar.ProgressBar("answers", 8, leave=False) as answers:
        answers.update(5)
    bar.print("held-out, grpo 2: accuracy=0.500")
    bar.update(2)
"""


def screen(columns: int) -> list[str]:
    """Run CODE with a terminal as stdout and stderr, and return each text that it writes over the bar's line."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while chunk := read(ours):
            written += chunk
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode().replace("\r\n", "\n").split("\r")


def read(handle: int) -> bytes:
    try:
        return os.read(handle, 1024)
    except OSError:  # the process has closed the terminal
        return b""


def test_a_terminal_shows_steps_time_rate_and_values():
    lines = [line.rstrip(" ") for line in screen(120)]
    assert lines[1].startswith("grpo:  25%|##        | 1/4 [0:00:00<?, ?]")
    assert "| 2/4 [0:00:00<0:00:0" in lines[2] and "it/s, reward=0.50, kl=0.01]" in lines[2]
    assert any(line.startswith("answers:  62%|######    | 5/8 [") for line in lines)
    assert lines[-1].startswith("grpo: 100%|##########| 4/4 [") and lines[-1].endswith("\n")
    # the bar makes room for a line, and is drawn again below it
    [number] = [i for i, line in enumerate(lines) if line.startswith("held-out, grpo 2: accuracy=0.500\n")]
    assert lines[number - 1] == "" and lines[number + 1].startswith("grpo:  50%")


@pytest.mark.parametrize(("columns", "width"), [(0, 79), (1, 0), (30, 29)])
def test_a_bar_is_as_wide_as_its_terminal(columns, width):
    """A bar of the whole width would begin a new line; a terminal that says 0 columns is taken as one of 80."""
    lines = [line.rstrip("\n") for line in screen(columns) if "held-out" not in line]
    assert max(map(len, lines)) == width


def test_a_file_gets_only_the_lines():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("held-out, grpo 2: accuracy=0.500\n", "")
