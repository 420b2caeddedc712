"""The tracker `wandb`: send metrics to the project minivlmrl of Weights & Biases.

With WANDB_MODE=offline, it writes to wandb/ in the run's folder instead. A resumed run appears as a new run.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from wandb import init  # pyright: ignore[reportMissingImports]  # optional

from minivlmrl.config.options import RunConfig


def tracker(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Create the tracker, with the arguments and the result of extras/tensorboard.py."""
    folder = Path(config.output_dir)
    run = init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))
    closing.callback(run.finish)
    return run.log
