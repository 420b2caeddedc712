"""Callbacks: what happens beside the training loop, without changing it.

run/loop.py calls each method of each callback at the moment that its name says, on all ranks.
The default callbacks check memory, warn while a run is not learning, and write report.html. For
others pass a list: `run_training(config, [*default_callbacks(config), MyCallback()])`.
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
    """Base class of all callbacks; each method does nothing here."""

    def on_setup(self, config: RunConfig, world: World):
        """Check the recipe before rows and weights are loaded; ValueError refuses the run."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        """Begin: the run's folder has a config.yaml and log files, and nothing is trained yet."""

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        """Begin a stage, or resume one if state.step is over 0."""

    def on_step_begin(
        self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches
    ):
        """Look at a step whose rollout is sampled and whose update comes next."""

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        """Look at a step after its update; values are its line of metrics.jsonl."""

    def on_evaluation(self, stage: str, steps_done: int, num_rows: int):
        """Look at an evaluation on held-out rows: the last line of evaluations.jsonl."""

    def on_run_end(self):
        """Finish, also if an error or a signal ends the run."""

    def state_dict(self) -> dict[str, str]:
        """Return what on_stage_begin needs in state.logs when the run is resumed, by name."""
        return {}


def default_callbacks(config: RunConfig) -> list[Callback]:
    """Build the callbacks of a usual run. They are imported by name, because run/ needs none."""
    names = ["warnings:TrainingWarnings", "report:ReportPage"]
    if config.check_memory and config.model.path:
        names.insert(0, "memory:MemoryCheck")
    return [load_name(f"minivlmrl.diagnostics.{name}")() for name in names]
