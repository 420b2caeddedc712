"""Print what a bug report needs: versions, commit and device."""

import platform
import subprocess

import torch

from minivlmrl import __version__
from minivlmrl.errors import PACKAGE


def version_text() -> str:
    """Return one line, such as "minivlmrl 0.6.0 (commit 9091b662), Python 3.12.3, torch 2.13.0+cpu, device cpu"."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return (
        f"minivlmrl {__version__} ({commit()}), Python {platform.python_version()}, torch {torch.__version__}, "
        f"device {device}"
    )


def commit() -> str:
    """Return the commit of the repository clone, such as "commit 9091b662, with changes"."""
    if not (PACKAGE.parent / ".git").exists():
        return "not a clone"
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty=, with changes", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "commit unknown, because git is not installed"
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "commit unknown"
