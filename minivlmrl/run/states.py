"""Save and load states, from which a run resumes; a resumed run gives exactly the same results.

Files after 120 optimizer steps in all stages:

output_dir/states/000120/
    *.safetensors            weights and optimizer moments; see run/state_files.py
    run.json                 TrainerState
    complete.json            checksums of the other files; written last

States contain no completions, because they are saved only after the last optimizer step of a rollout. They contain no
random states either, because generators are seeded from the run's seed and the stage, step or row. Incomplete states
are named *.partial.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic as clock
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import reshard
from minivlmrl.errors import UserError, error_context, error_phase, in_one_line, pluralize
from minivlmrl.files import flush_file, remove_folder
from minivlmrl.json_files import read_json, write_json
from minivlmrl.model.plain_weights import base_weights, plain_name, shared_weights
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.optimizer import begin_state, group_numbers
from minivlmrl.run.recipe_changes import changes, check_same, checksum, file_hashes, recipe_options
from minivlmrl.run.signals import Preempted, StopSignals
from minivlmrl.run.state_files import find_shards, read_into, write_tensors
from minivlmrl.run.trainer_state import RUN, TrainerState, read_trainer_state
from minivlmrl.trainers.base import Trainer

COMPLETE = "complete.json"
# stage options that set the number of dataset rows per batch
BATCH_SIZE_OPTIONS = "prompts_per_step", "steps_per_generation"
BEST_OPTIONS = "best_metric", "data.eval_file", "data.eval_rows"  # if one changes, forget the best evaluation so far
NO_STATE = "no state was saved yet: start the run again"
UPDATE = "optimizer"  # training phase of weight updates, for error_phase
NUM_KEPT_STATES = 2  # states to keep; two, in case the newest is damaged


def tensors(trainer: Trainer, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors to save in a state: {name: weights or optimizer moments}.

    Frozen policy weights are left out, because a resumed run loads or initializes them again.
    """
    modules = nn.ModuleDict(trainer.modules())
    reshard(modules)
    frozen = shared_weights(trainer.policy)
    named_tensors: dict[str, Tensor] = {
        plain_name(name): parameter for name, parameter in modules.named_parameters() if id(parameter) not in frozen
    }
    for name, parameter in trainer.trained.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            named_tensors[f"optimizer.{name}/{moment}"] = value
    return named_tensors


def state_folders(folder: Path) -> list[Path]:
    """Return the complete states in states/, oldest first."""
    return sorted(
        (path for path in folder.glob("*") if re.fullmatch(r"[0-9]{6,}", path.name)), key=lambda path: int(path.name)
    )


def check_resume(config: RunConfig) -> list[Path]:
    """Return the states in output_dir, oldest first; raise UserError if --resume is missing or wrong."""
    folder = Path(config.output_dir) / "states"
    resume = config.resume
    is_allowed = resume in ("auto", "never")
    if resume is not None and not is_allowed:
        state = Path(resume)
        if not state.is_dir() or (state / "states").is_dir():
            raise UserError(
                f"resume: {resume} is not the folder of a state; use auto, never, or a folder such as RUN/states/000120"
            )
        is_allowed = state.absolute().parent.resolve() == folder.resolve()
    states = state_folders(folder)
    if states and not is_allowed:
        raise UserError(
            f"{folder} contains states of an earlier run, of which {states[-1].name} is the newest; use "
            "--resume=auto to continue from the newest one, or --resume=never to delete all of them and start again"
        )
    return states


class Resumed(NamedTuple):
    """Where a run starts: at a saved state, or at step 0."""

    folder: Path | None  # state to load, None for a new run
    state: TrainerState
    saved: list[Path]
    old_end: int | None = None  # number of steps in the stage, if it was complete in the state


def resume(config: RunConfig, datasets: Mapping[str, Dataset], world: World) -> Resumed:
    """Select the state to resume from, and compare its recipe and files with this run."""
    hashes = file_hashes(config, datasets)
    check_same(hashes, world)
    new = TrainerState(config.seed, config.stage_names, recipe=recipe_options(config), hashes=hashes)
    # take rank 0's states, because ranks on a network file system may see different ones
    saved = world.gather_objects(state_folders(Path(config.output_dir) / "states"))[0]
    folder, state = select_state(config.resume, saved, world)
    if state is None:
        return Resumed(None, new, saved)
    num_begun = state.stage + 1
    if state.stages[:num_begun] != new.stages[:num_begun] or state.seed != new.seed:
        raise UserError(
            f"resume: {folder} belongs to a run with stages {state.stages} "
            f"and seed {state.seed}; use the same stages and seed to resume it"
        )
    if world.is_main:
        print(f"resuming from {folder}: {pluralize(state.step, 'step')} of {new.stages[state.stage]} done", flush=True)
    # --resume=auto rejects changed rows, --resume=FOLDER accepts them
    same_rows = config.resume == "auto"
    lacks_weights = state.recipe.get("adapter.r") or state.recipe.get("model.freeze")
    frozen = ("weights of model.path", "settings of model.config") if lacks_weights else ()
    is_changed = any(state.hashes.get(name, now) != now for name, now in hashes.items() if name in frozen)
    quantized = {options.get("adapter.quantize") for options in (state.recipe, new.recipe)}
    if is_changed or len(quantized) > 1:
        raise UserError(
            f"resume: the frozen weights, which a state does not contain, have changed since {folder} "
            "was saved; restore the earlier weights (model.path) and adapter.quantize"
        )
    batch_sizes = [f"{new.stages[state.stage]}.{name}" for name in BATCH_SIZE_OPTIONS]
    for name, text in changes(state, new):
        option = name.removeprefix("rows of ").partition(" ")[0]
        is_about_rows = option.startswith("data.") and not option.startswith("data.eval_")
        if same_rows and (is_about_rows or option in batch_sizes):
            raise UserError(
                f"resume: {text}, so rows would be skipped or repeated; restore the earlier "
                f"value, or accept this with --resume={folder}"
            )
        if world.is_main:
            print(text, flush=True)
        if option in BEST_OPTIONS:
            state.best = None
    old_end = state.step if state.step == state.recipe.get(f"{state.stages[state.stage]}.max_steps") else None
    state.recipe = new.recipe
    state.hashes = hashes
    state.stages = new.stages
    return Resumed(folder, state, saved, old_end)


def select_state(resume: str | None, saved: list[Path], world: World) -> tuple[Path, TrainerState] | tuple[None, None]:
    """Return the newest undamaged state."""
    candidates = [] if resume in (None, "never") else [Path(resume)]
    if resume == "auto":
        candidates = saved[::-1]
    for folder in candidates:
        if state := read_state(folder, world):
            return folder, state
    if candidates:
        raise UserError(
            f"resume is {resume}, but every state that it selects is damaged; "
            "--resume=never deletes all states and starts again"
        )
    return None, None


def read_state(folder: Path, world: World) -> TrainerState | None:
    """Read the TrainerState in a state folder; if the state is damaged, print why and return None."""

    def check() -> TrainerState:
        checksums = read_json(folder / COMPLETE)
        if {file.name for file in folder.iterdir()} != {COMPLETE, RUN, *checksums}:
            raise UserError(f"{folder} does not have exactly the files listed in {COMPLETE}")
        for name in sorted(checksums)[world.rank :: world.size]:
            if checksum(folder / name) != checksums[name]:
                raise UserError(f"the contents of {name} do not match its checksum")
        return read_trainer_state(folder)

    try:
        return world.run_on_all_ranks(check)
    except (FileNotFoundError, ValueError) as error:
        if world.is_main:
            print(f"state {folder} is damaged and is ignored: {error}", flush=True)
        return None


def load_state(folder: Path, trainer: Trainer, optimizer: Optimizer):
    """Copy the tensors of a state into the model's weights and the optimizer.

    Weights frozen at the time of saving are not in the state, and stay as they are.
    """
    with error_context(f"{folder}: this state was saved with a different model or recipe"):
        shards = find_shards(folder)
        saved = {key.split("/")[0] for key in shards}
        with_moments = [p for name, p in trainer.trained.named_parameters() if f"optimizer.{name}" in saved]
        begin_state(optimizer, with_moments)
        targets = tensors(trainer, optimizer)
        may_be_frozen = {f"policy.{name}" for name in base_weights(trainer.policy)}
        unmatched = sorted((shards.keys() - targets.keys()) | (targets.keys() - shards.keys() - may_be_frozen))
        if unmatched:
            raise UserError(f"{unmatched[0]} is only in the state or only in the run")
        for name in shards:
            read_into(targets[name], name, shards[name])


def save_state(folder: Path, state: TrainerState, trainer: Trainer, optimizer: Optimizer, world: World):
    """Write a state, and delete all older states except one; all ranks must call this."""
    draft = Path(f"{folder}.partial")
    checksums = {}

    def write():
        draft.mkdir(parents=True, exist_ok=True)
        names = write_tensors(draft, named_tensors, world)
        if world.is_main:
            write_json(draft / RUN, asdict(state))
            names.append(RUN)
        for name in names:
            checksums[name] = checksum(draft / name)

    def finish():
        write_json(draft / COMPLETE, checksums)
        for path in (draft / RUN, draft / COMPLETE, draft):
            flush_file(path)
        draft.rename(folder)
        flush_file(folder.parent)
        for old in state_folders(folder.parent)[:-NUM_KEPT_STATES]:
            remove_folder(old)

    try:
        with error_phase("save"):
            named_tensors = tensors(trainer, optimizer)
            world.run_on_all_ranks(write)
            for rank_checksums in world.gather_objects(checksums):
                checksums.update(rank_checksums)
            world.run_on_rank_zero(finish)
    except Exception:
        shutil.rmtree(draft, ignore_errors=True)
        raise


class StateSaver:
    """Decide when to save a state."""

    def __init__(
        self, config: RunConfig, resumed: Resumed, signals: StopSignals, log: MetricsLog, callbacks: Sequence[Callback]
    ):
        self.folder = Path(config.output_dir) / "states"
        self.config = config
        self.signals = signals
        self.log = log
        self.world = log.world
        self.state = log.state
        self.callbacks = callbacks
        self.saved_steps = self.state.steps if resumed.saved else 0
        self.saved_time = clock()
        self.trainer: Trainer | None = None  # trainer of the current stage; its optimizer is self.optimizer
        self.optimizer: Optimizer

    def after_step(self):
        """Save a state if one is due, and stop the run after a signal."""
        if self.signals.can_save and self.is_due():
            self.ensure_saved()
        self.signals.stop_if_preempted()

    @property
    def stage_ends(self) -> bool:
        return self.trainer is not None and self.state.step == self.trainer.options.max_steps

    def is_due(self) -> bool:
        """Return True on all ranks if a state is due by state_minutes or state_steps."""
        minutes = self.config.state_minutes
        every_steps = self.config.state_steps
        [is_late] = self.world.sum(self.world.is_main and 0 < 60 * minutes <= clock() - self.saved_time)
        has_passed = every_steps and self.state.steps // every_steps > self.saved_steps // every_steps
        return bool(is_late or has_passed or (self.stage_ends and (every_steps or minutes)))

    def ensure_saved(self):
        """Save a state, unless the current step has one; all ranks must call this."""
        state = self.state
        if self.saved_steps == state.steps or self.trainer is None:
            return
        self.log.flush()
        state.optimizer = group_numbers(self.optimizer)
        state.logs = {}
        for callback in self.callbacks:
            state.logs.update(callback.state_dict())
        save_state(self.folder / f"{state.steps:06d}", state, self.trainer, self.optimizer, self.world)
        self.saved_steps = state.steps
        self.saved_time = clock()

    @contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Save a state after a signal, or after an error on all ranks between two steps.

        The error message says how to continue the run.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            errors = (error, error.__cause__)  # __cause__: the original error, if a callback raised this one from it
            in_update = any(getattr(part, "phase", "") == UPDATE for part in errors)
            on_all_ranks = self.world.size == 1 or any(hasattr(part, "on_all_ranks") for part in errors)
            if self.signals.can_save and on_all_ranks and not in_update:
                try:
                    self.ensure_saved()
                except Exception as failure:
                    error.add_note(f"no state could be saved after this error ({in_one_line(failure)})")
            if (self.trainer and self.state.steps) or isinstance(error, Preempted):
                saved = state_folders(self.folder)[-1:]
                error.add_note(f"saved in {saved[0]}: continue with --resume=auto" if saved else NO_STATE)
            raise
