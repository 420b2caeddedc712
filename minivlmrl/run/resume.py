"""The states of a run on the disk: all that a killed run needs to go on as if it had never stopped.

output_dir/states/000120/    after 120 optimizer steps of all stages
    *.safetensors            weights, moments and the algorithm's state_dict, see run/state_files.py
    run.json                 Progress
    complete.json            checksums of the other files; written last

A state is written between rollouts and has nothing of one; every draw depends on a key, so it has
no random generator. While it is written its folder is called 000120.partial.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic as clock
from typing import Annotated

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from minivlmrl.adapters.lora import plain_name, shared_base
from minivlmrl.algorithms.base import Algorithm
from minivlmrl.batch import Step
from minivlmrl.hub.dataset import find_split
from minivlmrl.hub.folder import (
    digest,
    find_folder,
    flush_file,
    json_text,
    parse_json,
    read_json,
    weight_files,
    write_json,
)
from minivlmrl.hub.recipe_values import build, require
from minivlmrl.reward_functions.names import RewardFailed
from minivlmrl.run.config import RunConfig, flat
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.optimizer import empty_state
from minivlmrl.run.signals import StopSignals
from minivlmrl.run.state_files import blocks, find_pieces, read_into, write_tensors
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import reshard

RUN, COMPLETE = "run.json", "complete.json"
KEPT = 2  # states of a run, in case the newest is damaged
# of a stage: how many rows a draw has
DRAWN = "prompts_per_step", "steps_per_generation", "num_mini_batches"
# what a recipe leads to and does not say: hashes of files
BASE, ROWS = "weights below the adapter", "rows of data.train_file"


@dataclass
class Progress:
    """How far a run has come: the same on all ranks, but for rank 0's `seconds` and `logs`."""

    seed: int  # of the run
    stages: list[str]  # as in the recipe
    stage: Annotated[int, ">= 0"] = 0  # the index of the present one
    step: Annotated[int, ">= 0"] = 0  # its optimizer steps so far ...
    steps: Annotated[int, ">= 0"] = 0  # ... and those of all stages
    draws: Annotated[int, ">= 0"] = 0  # how often the present stage has drawn rows ...
    rows: Annotated[int, ">= 0"] = 0  # ... and of how many; 0: it has not begun
    # evaluations between stages so far
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    best: float | None = None  # of keep_best so far, a loss with a minus
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage so far
    recipe: dict = field(default_factory=dict)  # see recipe_values
    # metrics.jsonl, timings.jsonl and evaluations.jsonl so far, and what the alarms know
    logs: dict[str, str] = field(default_factory=dict)

    def begin_stage(self, number: int):
        self.stage = number
        self.step = 0
        self.draws = 0
        self.rows = 0

    def check_rows(self, rows: int):
        """Refuse to go on with another number of rows: they would come in another order."""
        if self.rows not in (0, rows):
            raise ValueError(f"resume: the state is of a run with {self.rows} rows, not {rows}")
        self.rows = rows

    def advance(self, stage: str, draws: int, seconds: float):
        self.step, self.steps, self.draws = self.step + 1, self.steps + 1, draws
        self.seconds[stage] = seconds


def recipe_values(config: RunConfig) -> dict[str, object]:
    """Name what a recipe says, "grpo.beta", the threads it takes, and hashes of its files."""
    values = asdict(config) | {"num_threads": torch.get_num_threads()}
    names = values.keys() - {"stages", "output_dir", "resume"}
    values = flat({name: values[name] for name in names})
    path, file = config.model.path, config.data.train_file
    if config.adapter.r:  # a state does not hold what is below adapters
        weights = weight_files(find_folder(path)) if path else [Path(config.model.config)]
        values[BASE] = digest(blocks(weights))
    if file:
        values[ROWS] = _checksum(Path(file))
    return parse_json(json_text(values))


def tensors(algorithm: Algorithm, optimizer: Optimizer) -> dict[str, Tensor]:
    """Name all tensors of a state; a parameter that never had a gradient has no moments."""
    modules = nn.ModuleDict(algorithm.modules())
    reshard(modules)
    # which model.path has
    base = shared_base(algorithm.policy)
    named = modules.named_parameters()
    found = {plain_name(name): p for name, p in named if id(p) not in base}
    for name, parameter in algorithm.trained.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}/{moment}"] = value
    return found


def state_folders(folder: Path) -> list[Path]:
    """Folders of states, the oldest first (ValueError: two are of the same step)."""
    whole = (path for path in folder.glob("*") if re.fullmatch(r"[0-9]{6,}", path.name))
    found = sorted(whole, key=lambda path: int(path.name))
    for first, second in pairwise(found):
        if int(first.name) == int(second.name):
            raise ValueError(f"{first} and {second.name} are of one step; remove the wrong one")
    return found


def check_resume(config: RunConfig) -> list[Path]:
    """List a run's states (ValueError: it would overwrite them, or there is none to go on from)."""
    folder = Path(config.output_dir) / "states"
    resume = config.resume
    path = None if resume in (None, "auto", "never") else Path(resume).resolve()
    if path and (not path.is_dir() or (path / "states").is_dir()):
        ways = "give 'auto', 'never' or the folder of a state, RUN/states/000120"
        raise ValueError(f"resume: {resume}: no such state; {ways}")
    states = state_folders(folder)
    if states and resume not in ("auto", "never") and (not path or path.parent != folder.resolve()):
        cure = "--resume=auto goes on from there, --resume=never removes them and begins anew"
        of = f"of an earlier run, the newest {states[-1].name}"
        raise ValueError(f"{folder} holds states {of}; {cure}")
    return states


class States:
    """The states of one run."""

    def __init__(self, config: RunConfig, world: World, signals: StopSignals):
        self.folder = Path(config.output_dir) / "states"
        self.config, self.world, self.signals = config, world, signals
        # optimizer steps of the last state, and when it was saved
        self.saved = 0
        self.time = clock()

    def after_step(self, progress: Progress, log: MetricsLog, ends_rollout: bool):
        """Save a state at the end of a rollout if it is time; leave after a signal (Preempted)."""
        config = self.config
        stage = progress.stages[progress.stage]
        stage_ends = progress.step == getattr(config, stage).max_steps
        whole = ends_rollout or stage_ends
        self.signals.save = partial(self.keep, progress, log) if whole else lambda: None
        if not whole:
            return
        every, minutes = config.state_steps, config.state_minutes
        late = self.world.sum(self.world.is_main and 0 < 60 * minutes <= clock() - self.time)[0]
        late = late or (every and progress.steps // every > self.saved // every)
        if late or (stage_ends and (every or minutes)):
            self.keep(progress, log)
        self.signals.leave()

    def keep(self, progress: Progress, log: MetricsLog) -> Path:
        """Save what was trained, if that is not done yet; returns the folder of its state."""
        if self.saved != progress.steps:
            progress.logs = log.written()
            self.save(progress)
        return self.path(progress)

    def saved_before_mistakes(
        self, steps: Iterator[Step], results, progress: Progress, log: MetricsLog
    ) -> Iterator[Step]:
        """Yield steps; evaluate after each that is due, a resumed run too, and after the last.

        Where that or a rollout fails, of several ranks a reward alone, save what was trained.
        """
        between, algorithm, last = True, self.algorithm, self.algorithm.config.max_steps
        while True:
            try:
                if progress.step:
                    results.after_step(algorithm, progress.step)
                if progress.step == last:
                    return results.measure(f"after_{algorithm.stage}", algorithm)
                step = next(steps)
            except ValueError as error:
                alone = self.world.size > 1 and not isinstance(error, RewardFailed)
                diverged = isinstance(error.__cause__, FloatingPointError)
                if alone or diverged or not between or not progress.steps:
                    raise
                cure = f"the state is in {self.keep(progress, log)}: mend it, then --resume=auto"
                raise ValueError(f"{error}; {cure}") from error
            between = step.ends_rollout
            yield step

    def to_resume(self) -> Progress:
        """Find the state to go on from, as config.resume says, and how far it is, or begin anew."""
        new = Progress(self.config.seed, self.config.stages, recipe=recipe_values(self.config))
        self.resumed, progress = self.choose() or (None, new)
        if self.world.is_main:
            for leftover in self.folder.glob("*.partial"):  # of an interrupted save or removal
                shutil.rmtree(leftover)
        if self.resumed is None:
            return progress
        config = self.config
        known = progress.stage + 1
        if (progress.stages[:known], progress.seed) != (config.stages[:known], config.seed):
            of = f"a run with stages {progress.stages} and seed {progress.seed}"
            raise ValueError(f"resume: {self.resumed} is of {of}; keep them")
        if self.world.is_main:
            done = f"{progress.step} steps of {config.stages[known - 1]} are done"
            print(f"resumes from {self.resumed}: {done}", flush=True)
        self.compare(progress, new.recipe)
        progress.recipe, progress.stages, self.saved = new.recipe, config.stages, progress.steps
        return progress

    def compare(self, progress: Progress, recipe: dict[str, object]):
        """Say what the recipe says now and did not say in a state; refuse what cannot go on."""
        stage = self.config.stages[progress.stage]
        before = progress.recipe
        same_rows = True
        if self.config.resume != "auto":  # who names a state may take other rows
            progress.rows, same_rows = 0, False
        drawn = [f"{stage}.{size}" for size in DRAWN] if progress.rows else []
        changed = (
            name for name in before.keys() | recipe.keys() if before.get(name) != recipe.get(name)
        )
        for name in sorted(changed):
            change = f"{name} was {before.get(name)!r:.80}, from here on {recipe.get(name)!r:.80}"
            if name in (BASE, "adapter.quantize"):
                cause = "the weights below its adapter (model.path, adapter.quantize) have changed"
                raise ValueError(f"resume: {self.resumed}: {cause}; put them back")
            of_data = name == ROWS or re.match(r"data\.(?!eval_)", name)
            if name in drawn or (same_rows and of_data):
                cause = f"rows would be left out or seen twice; keep it, or --resume={self.resumed}"
                raise ValueError(f"resume: {change}: {cause}")
            if self.world.is_main:
                print(change, flush=True)

    def restore(self, algorithm: Algorithm, optimizer: Optimizer):
        """Read the state that was found, if any, into a stage's parts (ValueError: no fit)."""
        path, self.resumed = self.resumed, None
        self.algorithm, self.optimizer = algorithm, optimizer
        if path is None:
            return
        try:
            pieces = find_pieces(path)
            for name, parameter in algorithm.trained.named_parameters():
                if any(key.startswith(f"optimizer.{name}/") for key in pieces):
                    optimizer.state[parameter] = empty_state(optimizer, parameter)
            found = tensors(algorithm, optimizer)
            if other := min(found.keys() ^ pieces.keys(), default=None):
                raise ValueError(f"only one of the two has {other}")
            for name, tensor in found.items():
                read_into(tensor, name, pieces[name])
        except (SafetensorError, KeyError, RuntimeError, ValueError) as error:
            cause = f"this state is of another model or recipe; {error}"
            raise ValueError(f"{path}: {cause}") from error

    def choose(self) -> tuple[Path, Progress] | None:
        """Read the state that config.resume means, and remove those that are given up by that."""
        resume, state = self.config.resume, None
        # a shared file system may show another host an older list
        paths = self.world.gather_objects(state_folders(self.folder))[0]
        if resume == "auto":
            state = next(filter(None, map(self.read, reversed(paths))), None)
            if paths and state is None:
                cure = "--resume=never removes them and begins anew"
                raise ValueError(f"{self.folder}: all states are damaged; {cure}")
        elif resume not in (None, "never") and (state := self.read(Path(resume))) is None:
            raise ValueError(f"resume: {resume} is damaged")
        for other in paths if self.world.is_main and resume is not None else ():
            if state is None or int(other.name) > int(state[0].name):
                shutil.rmtree(other)
        return state

    def path(self, progress: Progress) -> Path:
        """Name the folder of a state."""
        return self.folder / f"{progress.steps:06d}"

    def read(self, path: Path) -> tuple[Path, Progress] | None:
        """Read a state without its tensors; None and a line that says why if it is damaged."""
        damages = []
        try:
            files = read_json(path / COMPLETE)
            if {file.name for file in path.iterdir()} != {COMPLETE, RUN, *files}:
                raise ValueError(f"{path} does not have the files that {COMPLETE} lists")
            own = sorted(files)[self.world.rank :: self.world.size]
            changed = (name for name in own if _checksum(path / name) != files[name])
            damages = [f"{name} is not what was written" for name in changed]
            progress = build(Progress, read_json(path / RUN), str(path / RUN), json=True)
            count = len(progress.stages)
            require(progress.stage < count, "stage", progress.stage, f"one of {count}")
        except (OSError, ValueError) as error:
            damages.append(str(error))
        damages = [damage for part in self.world.gather_objects(damages) for damage in part]
        if damages and self.world.is_main:
            print(f"state {path} is damaged and not used: {damages[0]}", flush=True)
        return None if damages else (path, progress)

    def save(self, progress: Progress) -> Path:
        """Write a state, all ranks together, remove the oldest of too many; return its folder."""
        path = self.path(progress)
        partial = path.with_name(path.name + ".partial")
        found = tensors(self.algorithm, self.optimizer)
        files = {}

        def write():
            partial.mkdir(parents=True, exist_ok=True)
            names = write_tensors(partial, found, self.world)
            if self.world.is_main:
                write_json(partial / RUN, asdict(progress))
                names.append(RUN)
            files.update({name: _checksum(partial / name) for name in names})

        def finish():
            write_json(partial / COMPLETE, files)
            for written in (partial / RUN, partial / COMPLETE, partial):
                flush_file(written)
            partial.rename(path)
            flush_file(self.folder)
            for old in state_folders(self.folder)[:-KEPT]:
                shutil.rmtree(old)

        try:
            self.world.together(write)
            for part in self.world.gather_objects(files):
                files.update(part)
            self.world.together(finish if self.world.is_main else int)
        except (OSError, SafetensorError, ValueError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            kept = state_folders(self.folder)
            last = f"the last complete state is {kept[-1]}" if kept else "there is no earlier state"
            raise ValueError(f"the state {path} could not be written ({error}); {last}") from error
        self.saved = progress.steps
        self.time = clock()
        return path


def _checksum(file: Path) -> str:
    """Of what a file holds; of a folder, of the names and sizes in it."""
    if file.is_dir():
        listed = sorted((str(path), path.stat().st_size) for path in file.rglob("*"))
        return digest([json_text(listed)])
    return digest([file] if file.is_file() else find_split(str(file)))
