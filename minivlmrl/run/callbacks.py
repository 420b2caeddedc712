"""Callbacks add behaviour to the training loop without changing its code.

run/loop.py calls each callback's methods on all ranks, at the moment that the method's name describes. The default
callbacks check memory, warn if an input does not reach the loss or a run is not learning, and write report.html. To add
a callback, pass a list: `run_training(config, [*default_callbacks(config), MyCallback()])`.
"""

from torch.optim import Optimizer

from minivlmrl.config.import_utils import load_name
from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer


class Callback:
    """Base class for all callbacks. The methods of this class do nothing; a subclass overrides some of them."""

    def on_setup(self, config: RunConfig, world: World):
        """Called before rows and weights are loaded; may raise ValueError to reject the recipe."""

    def on_rows(self, config: RunConfig, datasets: dict[str, Dataset], processor: Processor, world: World):
        """Called after rows and before weights are loaded; may raise ValueError like on_setup.

        Args:
            datasets: each stage's rows by its name, and the held-out rows as "eval".
        """

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        """Called once before training, after config.yaml and the log files have been created."""

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        """Called before a stage starts, or before it resumes if state.step is greater than 0."""

    def on_step_begin(self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches):
        """Called before the update in optimizer step `number`, after its rollout was sampled."""

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        """Called after optimizer step `number`, with its metrics as metrics.jsonl contains them."""

    def on_evaluation(self, stage: str, steps_done: int, num_rows: int):
        """Called after an evaluation on held-out rows has been added to evaluations.jsonl."""

    def on_run_end(self):
        """Called when the run ends, also if it ends with an error or a signal."""

    def state_dict(self) -> dict[str, str]:
        """Return texts to save in checkpoints, by name.

        After a resume, on_stage_begin receives these texts in state.logs.
        """
        return {}


def default_callbacks(config: RunConfig) -> list[Callback]:
    """Build the default callbacks: the memory and input checks, the warnings and the report.

    The classes are imported by name, so that modules in run/ do not depend on diagnostics/.
    """
    names = ["inputs:InputCheck", "warnings:TrainingWarnings", "report:ReportPage"]
    if config.check_memory and config.model.path:
        names.insert(0, "memory_check:MemoryCheck")
    return [load_name(f"minivlmrl.diagnostics.{name}")() for name in names]
