"""Tracker `wandb`: send metrics to the project minivlmrl on Weights & Biases.

With WANDB_MODE=offline, metrics are only written to wandb/ in the run folder. A resumed run appears as a new run.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from minivlmrl.config.options import RunConfig
from minivlmrl.errors import optional_dependency

with optional_dependency("wandb", "the tracker needs the package wandb"):
    from wandb import init  # pyright: ignore[reportMissingImports]


def tracker(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Create the tracker; see extras/tensorboard.py for the arguments."""
    folder = Path(config.output_dir)
    run = init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))
    closing.callback(run.finish)
    return run.log
