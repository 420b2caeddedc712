"""Metrics go to TensorBoard or Weights & Biases under the names of metrics.jsonl.

The x axis is optimizer steps done, over all stages. Names of evaluations begin with eval/.
"""

import importlib.util
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path


def tensorboard(config, steps: int, closing: ExitStack) -> Callable:
    """Write the run's folder tensorboard/, without later steps of an attempt before a resume.

    Returns:
        log(values, steps), as every tracker; `closing` closes it.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(config.output_dir) / "tensorboard"
    if not steps:
        shutil.rmtree(folder, ignore_errors=True)
    writer = closing.enter_context(SummaryWriter(str(folder), purge_step=steps + 1))

    def log(values: dict[str, float], steps: int):
        for name, value in values.items():
            writer.add_scalar(name, value, steps)

    return log


def weights_and_biases(config, steps: int, closing: ExitStack) -> Callable:
    """Send to the project minivlmrl (WANDB_MODE=offline: wandb/); a resume is another run there."""
    import wandb

    folder = Path(config.output_dir)
    run = wandb.init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))
    closing.callback(run.finish)
    return lambda values, steps: run.log(values, step=steps)


TRACKERS = {"tensorboard": tensorboard, "wandb": weights_and_biases}


def curves(evaluation: dict[str, float]) -> dict[str, float]:
    """Name values of an evaluation as curves: {"iou greedy": 0.5} -> {"eval/iou_greedy": 0.5}."""
    return {f"eval/{name.replace(' ', '_')}": value for name, value in evaluation.items()}


def check_trackers(names: list[str]):
    """Refuse a tracker whose package is not installed (ValueError), before anything is loaded."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder wandb/ of its runs is no package
            raise ValueError(f"report_to: {name} is not installed; pip install 'minivlmrl[{name}]'")
