"""Tracker `tensorboard`: write metrics for TensorBoard to tensorboard/ in the run folder."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from minivlmrl.config.options import RunConfig
from minivlmrl.errors import optional_dependency

with optional_dependency("tensorboard", "the tracker needs the package tensorboard"):
    from torch.utils.tensorboard import SummaryWriter


def tracker(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Return a function log(values, steps) that writes metrics. TensorBoard hides steps repeated after a resume.

    Args:
        steps: optimizer steps before a resume, 0 in a new run.
        closing: exit stack that is closed when the run ends.
    """
    folder = Path(config.output_dir) / "tensorboard"

    @cache
    def writer() -> SummaryWriter:
        # only the first log() deletes old files, so runs that fail earlier delete nothing
        if not steps:
            shutil.rmtree(folder, ignore_errors=True)
        return closing.enter_context(SummaryWriter(str(folder), purge_step=steps + 1))

    def log(values: dict[str, float], steps: int):
        for name, value in values.items():
            writer().add_scalar(name, value, steps)

    return log
