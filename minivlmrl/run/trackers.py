"""Trackers of other people: metrics go to TensorBoard or Weights & Biases under the names of metrics.jsonl.

The x axis is optimizer steps done, over all stages. Names of evaluations begin with eval/.
"""

import importlib.util
import shutil
from dataclasses import asdict
from pathlib import Path

from minivlmrl.scale.ranks import World


class TensorBoard:
    """Writes the folder tensorboard/ of the run; a resumed run hides what an earlier attempt wrote of later steps."""

    def __init__(self, config, steps: int):
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.output_dir) / "tensorboard"
        if not steps:
            shutil.rmtree(folder, ignore_errors=True)
        self.writer = SummaryWriter(str(folder), purge_step=steps + 1)

    def log(self, values: dict[str, float], steps: int):
        for name, value in values.items():
            self.writer.add_scalar(name, value, steps)

    def close(self):
        self.writer.close()


class WandB:
    """Sends to the project minivlmrl, or with WANDB_MODE=offline writes wandb/; a resumed run is another one there."""

    def __init__(self, config, steps: int):
        import wandb

        folder = Path(config.output_dir)
        self.run = wandb.init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))

    def log(self, values: dict[str, float], steps: int):
        self.run.log(values, step=steps)

    def close(self):
        self.run.finish()


TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB}  # by the name of package and extra


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
        for tracker in self.trackers:
            tracker.log(values, self.steps)

    def close(self):
        for tracker in self.trackers:
            tracker.close()


def curves(evaluation: dict[str, float]) -> dict[str, float]:
    """Name the values of an evaluation as curves: {"iou greedy": 0.5} -> {"eval/iou_greedy": 0.5}."""
    return {f"eval/{name.replace(' ', '_')}": value for name, value in evaluation.items()}


def check_trackers(names: list[str]):
    """Refuse a tracker whose package is not installed (ValueError), before anything is loaded."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder wandb/ of its runs is no package
            raise ValueError(f"report_to: {name} is not installed; pip install 'minivlmrl[{name}]'")
