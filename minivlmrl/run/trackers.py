"""Trackers of other people: metrics go to TensorBoard or Weights & Biases under the names of metrics.jsonl.

The x axis is optimizer steps done, over all stages. Names of evaluations begin with eval/.
"""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from minivlmrl.scale.ranks import World


def tensorboard(config, steps: int) -> tuple[Callable, Callable]:
    """Write the folder tensorboard/ of the run; a resumed run hides what an earlier attempt wrote of later steps.

    Returns:
        log(values, steps) and close(), as every tracker.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(config.output_dir) / "tensorboard"
    if not steps:
        shutil.rmtree(folder, ignore_errors=True)
    writer = SummaryWriter(str(folder), purge_step=steps + 1)

    def log(values: dict[str, float], steps: int):
        for name, value in values.items():
            writer.add_scalar(name, value, steps)

    return log, writer.close


def weights_and_biases(config, steps: int) -> tuple[Callable, Callable]:
    """Send to the project minivlmrl, or with WANDB_MODE=offline write wandb/; a resumed run is another one there."""
    import wandb

    folder = Path(config.output_dir)
    run = wandb.init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))
    return lambda values, steps: run.log(values, step=steps), run.finish


TRACKERS = {"tensorboard": tensorboard, "wandb": weights_and_biases}  # by the name of package and extra


class Trackers:
    """Those that report_to names, on the first rank, at the step that progress has come to."""

    def __init__(self, config, world: World, progress):
        names = dict.fromkeys(config.report_to) if world.is_main else ()
        self.steps, self.trackers = progress.steps, [TRACKERS[name](config, progress.steps) for name in names]

    def step(self, metrics: dict[str, float | None]):
        """Take the metrics of an optimizer step; None is left out."""
        self.steps += 1
        self.log({name: value for name, value in metrics.items() if value is not None})

    def evaluation(self, values: dict[str, float]):
        """Take an evaluation after the last step."""
        self.log(curves(values))

    def log(self, values: dict[str, float]):
        for log, _ in self.trackers:
            log(values, self.steps)

    def close(self):
        for _, close in self.trackers:
            close()


def curves(evaluation: dict[str, float]) -> dict[str, float]:
    """Name the values of an evaluation as curves: {"iou greedy": 0.5} -> {"eval/iou_greedy": 0.5}."""
    return {f"eval/{name.replace(' ', '_')}": value for name, value in evaluation.items()}


def check_trackers(names: list[str]):
    """Refuse a tracker whose package is not installed (ValueError), before anything is loaded."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder wandb/ of its runs is no package
            raise ValueError(f"report_to: {name} is not installed; pip install 'minivlmrl[{name}]'")
