"""The states of a run on the disk: all that a killed run needs to go on as if it had never stopped.

output_dir/states/000120/    after 120 optimizer steps of all stages
    *.distcp, .metadata      weights and moments, which torch.distributed.checkpoint reads on any number of ranks
    run.pt                   Progress, and the algorithm's state_dict
    complete.json            checksums of the other files; written last

A state is written between rollouts, so nothing of a rollout is in it, and every draw depends on a key, so no random
generator is. While it is written its folder is called 000120.partial: under its own name it is complete or absent.
"""

import hashlib
import io
import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from minivlmrl.grpo import Algorithm
from minivlmrl.hub.folder import flush_file
from minivlmrl.run.config import RunConfig
from minivlmrl.run.evaluate import Answer, Evaluation
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import reshard
from minivlmrl.scale.signals import Preempted, StopSignals

RUN, COMPLETE = "run.pt", "complete.json"
warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")


@dataclass
class Progress:
    """How far a run has come: the same on all ranks, except `seconds` and `logs`, of which rank 0's are kept."""

    stages: list[str]  # as in the recipe
    stage: int = 0  # the index of the present one
    step: int = 0  # its optimizer steps so far ...
    steps: int = 0  # ... and those of all stages
    draws: int = 0  # how often the present stage has drawn rows ...
    rows: int = 0  # ... and of how many; 0: it has not begun
    results: dict[str, Evaluation] = field(default_factory=dict)  # evaluations so far
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage so far
    logs: dict[str, str] = field(default_factory=dict)  # metrics.jsonl and timings.jsonl so far

    def begin_stage(self, number: int):
        """The stage of this number is next."""
        self.stage, self.step, self.draws, self.rows = number, 0, 0, 0

    def check_rows(self, rows: int):
        """Refuse to go on with another number of rows: they would come in another order."""
        if self.rows not in (0, rows):
            raise ValueError(f"resume: the state is of a run with {self.rows} rows, this one has {rows}")
        self.rows = rows

    def advance(self, stage: str, draws: int, seconds: float):
        """One more optimizer step is done."""
        self.step, self.steps, self.draws = self.step + 1, self.steps + 1, draws
        self.seconds[stage] = seconds


def tensors(algorithm: Algorithm, optimizer: Optimizer) -> dict[str, Tensor]:
    """Name the weights and moments themselves; a parameter that never had a gradient has no moments."""
    modules = nn.ModuleDict(algorithm.modules())
    reshard(modules)
    found = dict(modules.named_parameters())  # layers that policy and reference share once
    for name, parameter in algorithm.trained.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}/{moment}"] = value
    return found


@dataclass
class State:
    """A state on the disk, without its tensors."""

    path: Path
    progress: Progress
    algorithm: dict  # its state_dict
    seed: int  # of the run

    def restore(self, algorithm: Algorithm, optimizer: Optimizer):
        """Read it into a newly built algorithm and optimizer on any number of ranks (ValueError: they do not fit)."""
        saved = FileSystemReader(self.path).read_metadata().state_dict_metadata
        for name, parameter in algorithm.trained.named_parameters():
            for key in [key for key in saved if key.startswith(f"optimizer.{name}/")]:
                scalar = saved[key].size != parameter.shape  # AdamW's step
                like = torch.zeros((), device=parameter.device) if scalar else torch.zeros_like(parameter)
                optimizer.state[parameter][key.rpartition("/")[2]] = like
        found = tensors(algorithm, optimizer)
        if found.keys() != saved.keys():
            other = min(found.keys() ^ saved.keys())
            raise ValueError(f"{self.path}: this state is of another model or recipe; only one of the two has {other}")
        try:
            load(found, checkpoint_id=self.path)
        except CheckpointException as error:
            raise ValueError(f"{self.path}: cannot be read into this model ({reason(error)})") from error
        algorithm.load_state_dict(self.algorithm)


def reason(error: BaseException) -> str:
    """The first rank's own error in a CheckpointException."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0] if failures else error)


class States:
    """The states of one run."""

    def __init__(self, config: RunConfig, world: World, signals: StopSignals):
        self.folder, self.config, self.world, self.signals = Path(config.output_dir) / "states", config, world, signals
        self.saved = 0  # optimizer steps of the last state

    def after_step(self, progress: Progress, algorithm: Algorithm, optimizer: Optimizer, log: MetricsLog, ends_rollout):
        """Save a state at the end of a rollout if one is due or a signal has come; after a signal leave (Preempted).

        One is due at the end of a stage, and when a multiple of state_steps was reached since the last one.
        """
        stage_ends = progress.step == getattr(self.config, progress.stages[progress.stage]).max_steps
        if not ends_rollout and not stage_ends:
            return
        every, stop = self.config.state_steps, self.signals.asked()
        if stop or (every and (stage_ends or progress.steps // every > self.saved // every)):
            progress.logs = log.written()
            path = self.save(progress, algorithm, optimizer)
        if stop:
            raise Preempted(f"preempted: the state is in {path}; --resume=auto goes on from there")

    def to_resume(self) -> State | None:
        """Read the state to go on from, as config.resume says; None: begin with the first step."""
        state = self.choose()
        if self.world.is_main:
            for leftover in self.folder.glob("*.partial"):  # of an interrupted save or removal
                shutil.rmtree(leftover)
        if state is None:
            return None
        progress, config, known = state.progress, self.config, state.progress.stage + 1
        if (progress.stages[:known], state.seed) != (config.stages[:known], config.seed):
            of = f"{state.path} is of a run with stages {progress.stages} and seed {state.seed}"
            raise ValueError(f"resume: {of}; keep them")
        if self.world.is_main:
            done = f"{progress.step} steps of {progress.stages[progress.stage]} are done"
            print(f"resumes from {state.path}: {done}", flush=True)
        progress.stages, self.saved = config.stages, progress.steps
        return state

    def choose(self) -> State | None:
        resume = self.config.resume
        paths = self.world.gather_objects(self.paths())[0]  # a shared file system may show another host an older list
        restarted = self.world.sum(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))[0] > 0  # not all ranks know
        if (restarted and paths) or resume == "auto":
            return self.newest(paths)
        path = None if resume in (None, "never") else Path(resume)
        if path and not path.is_dir():
            raise ValueError(f"resume: {path}: no such folder; give 'auto', 'never' or the folder of a state")
        own = path and path.resolve().parent == self.folder.resolve()
        if paths and not own and resume != "never":
            cure = "--resume=auto goes on from there, --resume=never removes them and begins anew, another --output_dir"
            newest = f"{self.folder} holds states of an earlier run, the newest {paths[-1].name}"
            raise ValueError(f"{newest}; {cure} leaves them alone")
        state = path and self.read(path)
        if path and state is None:
            raise ValueError(f"resume: {path} is damaged")
        for other in paths if self.world.is_main else ():
            if not own or int(other.name) > int(path.name):  # of the run that is given up
                shutil.rmtree(_rename(other, "old.partial"))
        return state

    def paths(self) -> list[Path]:
        """Folders of states, the oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if re.fullmatch(r"\d{6,}", path.name)), key=lambda path: int(path.name))

    def newest(self, paths: list[Path]) -> State | None:
        """Read the newest state that is not damaged, and rename later ones; None: there are no states."""
        damaged = []
        while paths and (state := self.read(paths[-1])) is None:
            damaged.append(paths.pop())
        if damaged and not paths:
            raise ValueError(f"{self.folder}: all states are damaged; --resume=never removes them and begins anew")
        for path in damaged if self.world.is_main else ():
            _rename(path, "damaged")
        return state if paths else None

    def read(self, path: Path) -> State | None:
        """Read a state without its tensors; None, and a line that says why, if it is damaged. Ranks share the check."""
        damages = []
        try:
            files = json.loads((path / COMPLETE).read_text())
            own = sorted(files)[self.world.rank :: self.world.size]
            damages = [f"{name} is not what was written" for name in own if _checksum(path / name) != files[name]]
        except (OSError, ValueError) as error:
            damages = [str(error)]
        damages = [damage for part in self.world.gather_objects(damages) for damage in part]
        if damages:
            if self.world.is_main:
                print(f"state {path} is damaged and not used: {damages[0]}", flush=True)
            return None
        with torch.serialization.safe_globals([Progress, Evaluation, Answer]):
            return State(path, *torch.load(path / RUN, weights_only=True))

    def save(self, progress: Progress, algorithm: Algorithm, optimizer: Optimizer) -> Path:
        """Write a state, all ranks together, and remove the oldest if there are too many; returns its folder."""
        path = self.folder / f"{progress.steps:06d}"
        partial = path.with_name(path.name + ".partial")
        torch.save((progress, algorithm.state_dict(), self.config.seed), run := io.BytesIO())
        try:
            save(tensors(algorithm, optimizer), storage_writer=FileSystemWriter(partial))  # fails on all ranks or none
            names = [file.name for file in partial.glob(f"__{self.world.rank}_*")]
            if self.world.is_main:
                (partial / RUN).write_bytes(run.getvalue())
                names += [RUN, ".metadata"]
            parts = self.world.gather_objects({name: _checksum(partial / name) for name in names})
            if self.world.is_main:
                checksums = {name: checksum for part in parts for name, checksum in part.items()}
                (partial / COMPLETE).write_text(json.dumps(checksums, indent=1))
                for written in (partial / RUN, partial / COMPLETE, partial):  # torch has flushed its own files
                    flush_file(written)
                partial.rename(path)
                flush_file(self.folder)
                for old in self.paths()[: -self.config.keep_states]:
                    shutil.rmtree(_rename(old, "old.partial"))
        except (OSError, CheckpointException) as error:
            shutil.rmtree(partial, ignore_errors=True)
            last = f"the last complete state is {kept[-1]}" if (kept := self.paths()) else "there is no earlier state"
            raise ValueError(f"the state {path} could not be written ({reason(error)}); {last}") from error
        self.saved = progress.steps
        return path


def _rename(path: Path, suffix: str) -> Path:
    """Take its name from a state, also before it is removed: no incomplete state ever has it."""
    renamed = Path(f"{path}.{suffix}")
    shutil.rmtree(renamed, ignore_errors=True)  # of an earlier state of this number
    return path.rename(renamed)


def _checksum(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "blake2b").hexdigest()
