"""Callbacks: extend the training loop without changing it.

All ranks call the methods of `Callback`. Default callbacks monitor a run without changing its results: they check
recipe, rows and memory, write report.html, and warn if the model does not learn, or ignores an input. To add a
callback: `run_training(config, [*default_callbacks(config), MyCallback()])`.
"""

import sys
from collections.abc import Callable
from functools import wraps

from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, did_you_mean, in_one_line
from minivlmrl.load_extra import has_folder, load_extra
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.signals import Preempted
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer


class Callback:
    """Base class for callbacks; methods do nothing unless overridden."""

    def __init_subclass__(cls):
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                hooks = [hook for hook in vars(Callback) if hook.startswith("on_")]
                raise UserError(f"{cls.__name__}.{name} would never be called{did_you_mean(name, hooks)}")

    def on_recipe(self, config: RunConfig, trainers: dict[str, type[Trainer]]):
        """Check the recipe before the ranks connect; raise UserError to reject it."""

    def on_setup(self, config: RunConfig, world: World):
        """Check the recipe before rows and weights are loaded; raise UserError to reject it."""

    def on_rows(self, config: RunConfig, datasets: dict[str, Dataset], processor: Processor, world: World):
        """Check the rows before the weights are loaded; raise UserError to end the run.

        Args:
            datasets: {stage: rows}, with held-out rows under "eval".
        """

    def on_model(
        self, config: RunConfig, datasets: dict[str, Dataset], model: VisionLanguageModel, processor: Processor,
        world: World,
    ):  # fmt: skip
        """Check rows and model; raise UserError to end the run before it writes to output_dir."""

    def on_error(self, error: Exception):
        """Handle an error that ends the run; raise another exception to replace it."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        """Run code after config.yaml and the log files were created."""

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        """Run code before a stage starts or resumes."""

    def on_step_begin(self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches):
        """Run code after sampling, before the weight update."""

    def after_step(self, trainer: Trainer, number: int):
        """Update what depends on the weights, such as a moving reference model, before a state is saved.

        Args:
            number: optimizer step in this stage, from 0.
        """

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        """Run code after a step was logged; `values` are its metrics."""

    def on_evaluation(self, stage: str, steps_done: int, num_rows: int):
        """Run code after an evaluation was added to evaluations.jsonl."""

    def on_run_end(self):
        """Run code when the run ends, even after an error or a signal."""

    def state_dict(self) -> dict[str, str]:
        """Return {name: string} to save in a state; a resumed run finds it in TrainerState.logs."""
        return {}


class Watcher(Callback):
    """Base class for monitoring callbacks, whose errors must not end the run."""

    failed = False

    def __init_subclass__(cls):
        super().__init_subclass__()
        for name, hook in [*vars(cls).items()]:
            if name in vars(Callback) and callable(hook):
                setattr(cls, name, harmless(hook))


def harmless(hook: Callable) -> Callable:
    """Wrap a callback's method: on an error, print it and call no more methods of this callback."""

    @wraps(hook)
    def call(self: Watcher, *arguments, **options):
        try:
            return {} if self.failed else hook(self, *arguments, **options)
        except Preempted:
            raise
        except Exception as error:
            self.failed = True
            print(
                f"{type(self).__name__} failed and no longer watches this run: {in_one_line(error)}. The run "
                "continues, and its numbers do not change",
                file=sys.stderr,
                flush=True,
            )
            return {}

    return call


WATCHERS = {  # {name of a monitoring callback: "module:class" in minivlmrl}
    "recipe": "monitor.check.preflight:Preflight",
    "out of memory": "monitor.memory.out_of_memory:OutOfMemoryReport",
    "memory": "monitor.memory.memory_check:MemoryCheck",
    "inputs": "monitor.inputs:InputCheck",
    "learning": "monitor.warnings:TrainingWarnings",
    "report": "monitor.report:ReportPage",
}


def default_callbacks(config: RunConfig) -> list[Callback]:
    """Build the monitoring callbacks, and callbacks for recipe options such as reference.sync_ref_model."""
    names = dict(WATCHERS) if has_folder("monitor") else {}
    if not (config.check_memory and config.model.path):
        names.pop("memory", None)
    if config.reference.sync_ref_model:
        names["reference.sync_ref_model"] = "extras.moving_reference:MovingReference"
    if config.dpo.precompute_ref_log_probs and "dpo" in config.stage_names:
        names["dpo.precompute_ref_log_probs"] = "extras.reference_logps:ReferenceLogps"
    return [load_extra(f"minivlmrl.{name}", option)() for option, name in names.items()]
