"""The tracker `wandb`, which sends a run's metrics to the project minivlmrl of Weights & Biases.

With WANDB_MODE=offline, metrics are written to wandb/ in the run's folder, and not sent. A resumed run appears as a new
run.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from wandb import init  # pyright: ignore[reportMissingImports]  # optional

from minivlmrl.config.options import RunConfig


def tracker(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Create the tracker of Weights & Biases; see extras/tensorboard.py for the arguments."""
    folder = Path(config.output_dir)
    run = init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))
    closing.callback(run.finish)
    return run.log
