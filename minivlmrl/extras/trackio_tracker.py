"""Tracker `trackio`: send metrics to Trackio, project minivlmrl. A resumed run appears as a new run."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from minivlmrl.config.options import RunConfig
from minivlmrl.errors import optional_dependency

with optional_dependency("trackio", "the tracker needs the package trackio"):
    from trackio import init  # pyright: ignore[reportMissingImports]


def tracker(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Create the tracker; see extras/tensorboard.py for the arguments."""
    run = init("minivlmrl", Path(config.output_dir).name, config=asdict(config))
    closing.callback(run.finish)
    return run.log
