"""Callbacks add behavior to the training loop without changing its code.

The training loop calls each callback's methods on all ranks, in this order:

recipe        on_recipe       before the ranks connect
ranks         on_setup        before rows and weights are loaded
rows          on_rows         before the weights are loaded
weights       on_model        before the output folder is written
output        on_run_begin    after config.yaml and the log files were created
stage         on_stage_begin  after the weights of a checkpoint were restored
step          on_step_begin   after sampling, before the update of the weights
              after_step      directly after the update, before a checkpoint can contain it
              on_step_end     after the step was logged
evaluation    on_evaluation   before the first stage, between steps, and after each stage
checkpoint    state_dict      before a checkpoint is saved
error         on_error        before the steps done so far are saved in a checkpoint
end           on_run_end      even after an error or a signal

The default callbacks watch a run, but do not change its numbers: they check recipe, rows and memory, write report.html,
and warn if training does not learn or the loss ignores an input. They are extras, so a copy without extras/ has none.
To add a callback, pass a list: `run_training(config, [*default_callbacks(config), MyCallback()])`.
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
from minivlmrl.errors import truncate
from minivlmrl.load_extra import has_extras, load_extra
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.signals import Preempted
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer


class Callback:
    """Base class for callbacks, whose methods do nothing until a subclass overrides them."""

    def on_recipe(self, config: RunConfig, trainers: dict[str, type[Trainer]]):
        """Check the recipe before anything is loaded, and before the ranks connect."""

    def on_setup(self, config: RunConfig, world: World):
        """Check the recipe before rows and weights are loaded; raise ValueError to reject the recipe."""

    def on_rows(self, config: RunConfig, datasets: dict[str, Dataset], processor: Processor, world: World):
        """Check the rows of all stages before the weights are loaded; raise ValueError to end the run.

        Args:
            datasets: the rows of each stage, {stage: rows}; the key "eval" has the held-out rows.
        """

    def on_model(
        self, config: RunConfig, datasets: dict[str, Dataset], model: VisionLanguageModel, processor: Processor,
        world: World,
    ):  # fmt: skip
        """Check the rows against the model that was just built."""

    def on_error(self, error: Exception):
        """Handle an error that ends the run; raise a different exception to replace it."""

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        """Run code before the first stage of a run, after config.yaml and the log files were created."""

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        """Run code before a training stage starts or resumes."""

    def on_step_begin(self, trainer: Trainer, optimizer: Optimizer, step: Step, number: int, batches: Batches):
        """Run code in an optimizer step, after sampling the completions and before updating the weights."""

    def after_step(self, trainer: Trainer, number: int):
        """Update state that changes with every step, for example a reference model that follows the policy.

        The change counts as part of the weight update: a checkpoint contains both or neither, so a resumed run is
        exact.

        Args:
            number: index of the step in its stage, from 0.
        """

    def on_step_end(self, trainer: Trainer, step: Step, number: int, values: dict):
        """Run code after an optimizer step, whose metrics are in `values`."""

    def on_evaluation(self, stage: str, steps_done: int, num_rows: int):
        """Run code after an evaluation, whose metrics have been added to evaluations.jsonl."""

    def on_run_end(self):
        """Run code at the end of a run, even after an error or a signal."""

    def state_dict(self) -> dict[str, str]:
        """Return texts to save in a checkpoint, {name: text}; a resumed run finds them in TrainerState.logs."""
        return {}


class Callbacks(list[Callback]):
    """Callbacks of a run: a call of a method calls it on all of them, in order, and returns their results."""

    def __getattr__(self, method: str) -> Callable[..., list]:
        return lambda *arguments: [getattr(callback, method)(*arguments) for callback in self]


class Watcher(Callback):
    """Base class for callbacks that only watch; their errors are printed, and the run goes on without them."""

    failed = False

    def __init_subclass__(cls):
        for name in vars(cls).keys() & vars(Callback).keys() - vars(object).keys():
            if callable(getattr(cls, name)):
                setattr(cls, name, harmless(getattr(cls, name)))


def harmless(hook: Callable) -> Callable:
    @wraps(hook)
    def call(self: Watcher, *arguments, **options):
        try:
            return {} if self.failed else hook(self, *arguments, **options)
        except Preempted:
            raise
        except Exception as error:
            self.failed = True
            text = truncate(error, 300, str).replace("\n", " ")
            print(
                f"{type(self).__name__} failed and no longer watches this run: {type(error).__name__}: {text}. The run "
                "continues, and its numbers do not change",
                file=sys.stderr,
                flush=True,
            )
            return {}

    return call


WATCHERS = {  # {what a callback watches: its class in extras/}
    "recipe": "check.preflight:Preflight",
    "out of memory": "memory.out_of_memory:OutOfMemoryReport",
    "memory": "memory.memory_check:MemoryCheck",
    "inputs": "inputs:InputCheck",
    "learning": "warnings:TrainingWarnings",
    "report": "report:ReportPage",
}


def default_callbacks(config: RunConfig) -> Callbacks:
    """Build the callbacks of a run: those that watch it, unless extras/ is missing, and those that options name."""
    names = dict(WATCHERS) if has_extras() else {}
    if not (config.check_memory and config.model.path):
        names.pop("memory", None)
    if config.reference.sync_ref_model:
        names["reference.sync_ref_model"] = "moving_reference:MovingReference"
    if config.dpo.precompute_ref_log_probs and "dpo" in config.stage_names:
        names["dpo.precompute_ref_log_probs"] = "reference_logps:ReferenceLogps"
    return Callbacks(load_extra(f"minivlmrl.extras.{name}", option)() for option, name in names.items())
