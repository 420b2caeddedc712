"""Callbacks add behaviour to the training loop without changing its code.

run/loop.py calls the methods of each callback on all ranks, at the moment that the method's name
describes. The default callbacks check memory, warn if a run is not learning, and write
report.html. To add a callback, pass a list:
`run_training(config, [*default_callbacks(config), MyCallback()])`.
"""

from torch.optim import Optimizer

from minivlmrl.config.import_utils import load_name
from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.distributed.process_group import World
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer


class Callback:
    """Base class of all callbacks, whose methods do nothing."""

    def on_setup(self, config: RunConfig, world: World):
        """Check the recipe before rows and weights are loaded; raise ValueError to stop the run."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        """Called once before training, when the run's folder has config.yaml and log files."""

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        """Called before a stage starts, or before it resumes if state.step is over 0."""

    def on_step_begin(
        self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches
    ):
        """Called before the update of optimizer step `number`, whose rollout is already sampled."""

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        """Called after an optimizer step; `values` are its metrics, as in metrics.jsonl."""

    def on_evaluation(self, stage: str, steps_done: int, num_rows: int):
        """Called after an evaluation on held-out rows, which wrote a line of evaluations.jsonl."""

    def on_run_end(self):
        """Called at the end of the run, also if an error or a signal ends it."""

    def state_dict(self) -> dict[str, str]:
        """Return name -> text to save in checkpoints.

        A resumed run passes these texts to on_stage_begin, in state.logs.
        """
        return {}


def default_callbacks(config: RunConfig) -> list[Callback]:
    """Build the default callbacks.

    They are imported by name here, so that run/ does not depend on diagnostics/.
    """
    names = ["warnings:TrainingWarnings", "report:ReportPage"]
    if config.check_memory and config.model.path:
        names.insert(0, "memory:MemoryCheck")
    return [load_name(f"minivlmrl.diagnostics.{name}")() for name in names]
