"""The state of a run: all that it takes to go on as if it had never stopped.

The states of a run on the disk: when one is written, and which one is gone on from.

output_dir/states/000120/    after 120 optimizer steps of all stages
    *.distcp, .metadata      weights and moments: torch.distributed.checkpoint cuts them for any number of ranks
    rank_0.pt, ...           of each rank: random generators, and what its algorithm is in the middle of
    run.pt                   of the run: Progress
    complete.json            length and checksum of every other file; written last
While it is written the folder is called 000120.partial, so under its own name a state is whole or absent.
"""

import dataclasses
import io
import json
import os
import random
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minivlmrl.algorithms.algorithm import Algorithm
from minivlmrl.hub.atomic_folder import flush_file
from minivlmrl.run.config import RunConfig
from minivlmrl.run.evaluate import Answer, Evaluation
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import reshard
from minivlmrl.scale.signals import Preempted, StopSignals


@dataclass
class Progress:
    """How far a run has come, the same on all ranks but for `seconds` and `logs`."""

    stages: list[str]  # as in the recipe
    stage: int = 0  # number of the present one
    step: int = 0  # its optimizer steps that are done ...
    steps: int = 0  # ... and those of all stages
    results: dict[str, Evaluation] = field(default_factory=dict)  # evaluations so far
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage so far
    logs: dict[str, str] = field(default_factory=dict)  # metrics.jsonl and timings.jsonl so far

    def state_dict(self) -> dict:
        """As plain data."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_state_dict(values: dict) -> "Progress":
        """What state_dict was made of."""
        results = {
            name: Evaluation(**result | {"answers": [Answer(**answer) for answer in result["answers"]]})
            for name, result in values["results"].items()
        }
        return Progress(**values | {"results": results})


def tensors(algorithm: Algorithm, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments by name, themselves and no copies (DTensors where the model is sharded).

    A parameter that never had a gradient has no moments, and must have none when it comes back.
    """
    found, seen = {}, set()
    for module, owner in algorithm.modules().items():
        reshard(owner)
        for name, parameter in owner.named_parameters():
            if id(parameter) not in seen:  # policy and reference may share layers
                found[f"{module}/{name}"] = parameter
            seen.add(id(parameter))
    for name, parameter in algorithm.trained.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer/{name}/{moment}"] = value
    return found


def rank_part(algorithm: Algorithm) -> dict:
    """What each rank keeps for itself, as plain data."""
    name, keys, *rest = np.random.get_state()
    generators = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, keys.tolist(), *rest)}
    if algorithm.world.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(algorithm.world.device)
    return {"generators": generators, "algorithm": algorithm.state_dict()}


@dataclass
class State:
    """A state on the disk."""

    path: Path
    progress: Progress
    parts: list[dict]  # rank_part of every rank that wrote it

    def restore(self, algorithm: Algorithm, optimizer: torch.optim.Optimizer):
        """Put everything back into a freshly built algorithm and optimizer, on any number of ranks."""
        from torch.distributed.checkpoint import FileSystemReader, load
        from torch.distributed.checkpoint.api import CheckpointException

        saved = FileSystemReader(self.path).read_metadata().state_dict_metadata
        for name, parameter in algorithm.trained.named_parameters():
            moments = [key.rpartition("/")[2] for key in saved if key.startswith(f"optimizer/{name}/")]
            for moment in moments:
                whole = saved[f"optimizer/{name}/{moment}"].size == parameter.shape
                like = torch.zeros_like(parameter) if whole else torch.zeros((), device=parameter.device)
                optimizer.state[parameter][moment] = like
        wanted = tensors(algorithm, optimizer)
        if wanted.keys() != saved.keys():
            other = min(wanted.keys() ^ saved.keys())
            raise ValueError(f"{self.path}: this state is of another model or recipe; only one of the two has {other}")
        try:
            with quiet():
                load(wanted, checkpoint_id=self.path)
        except CheckpointException as error:
            raise ValueError(f"{self.path}: cannot be read into this model ({reason(error)})") from error
        algorithm.load_state_dict([part["algorithm"] for part in self.parts])
        if len(self.parts) == algorithm.world.size:  # other ranks than those that wrote keep their fresh generators
            generators = self.parts[algorithm.world.rank]["generators"]
            torch.set_rng_state(generators["torch"])
            random.setstate(generators["python"])
            np.random.set_state(generators["numpy"])
            if algorithm.world.device.type == "cuda" and "cuda" in generators:
                torch.cuda.set_rng_state(generators["cuda"], algorithm.world.device)


def reason(error: BaseException) -> str:
    """Of a CheckpointException the first rank's own error."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0] if failures else error)


def quiet() -> warnings.catch_warnings:
    """Without the note of torch.distributed.checkpoint that there is one process only."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


COMPLETE = "complete.json"


class States:
    """The states of one run.

    Args:
        config: says where and when they are written, how many are kept, and how to resume.
    """

    def __init__(self, config: RunConfig, world: World, signals: StopSignals):
        self.folder, self.config, self.world, self.signals = Path(config.output_dir) / "states", config, world, signals

    def after_step(self, progress: Progress, algorithm: Algorithm, optimizer: torch.optim.Optimizer, log: MetricsLog):
        """Save the state if it is time to, or if a signal has come; then leave (Preempted)."""
        every, stop = self.config.state_steps, self.signals.asked()
        stage_ends = progress.step == getattr(self.config, progress.stages[progress.stage]).max_steps
        if stop or (every and (progress.steps % every == 0 or stage_ends)):
            progress.logs = log.written()
            path = self.save(progress, algorithm, optimizer)
        if stop:
            raise Preempted(f"preempted: the state is in {path}; --resume=auto goes on from there")

    def to_resume(self) -> State | None:
        """The state to go on from; None: begin with the first step.

        Raises:
            ValueError: there are states and the recipe does not say what to do with them, none of them is whole, or
                it is of a run with other stages.
        """
        state = self.choose()
        if state is not None:
            stages, number = state.progress.stages, state.progress.stage
            if self.config.stages[: number + 1] != stages[: number + 1]:
                raise ValueError(
                    f"resume: {state.path} is of a run with stages {stages}, in {stages[number]}; keep them"
                )
            state.progress.stages = self.config.stages
            if self.world.is_main:
                done = f"{state.progress.step} steps of {stages[number]} are done"
                print(f"resumes from {state.path}: {done}", flush=True)
        return state

    def choose(self) -> State | None:
        """What config.resume says."""
        resume = self.config.resume
        paths = self.world.gather_objects(self.paths())[0]  # a shared file system may show another host an older list
        restarted = self.world.sum(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))[0] > 0  # not known to all
        path = None if resume in (None, "auto", "never") else Path(resume)
        if (restarted and paths) or resume == "auto":
            return self.newest(paths)
        if path is not None and not path.is_dir():
            raise ValueError(f"resume: {path}: no such folder; give 'auto', 'never' or the folder of a state")
        own = path is not None and path.resolve().parent == self.folder.resolve()
        if paths and not own and resume != "never":
            raise ValueError(
                f"{self.folder} holds states of an earlier run, the newest {paths[-1].name}; --resume=auto goes "
                "on from there, --resume=never removes them and begins anew, another --output_dir leaves them alone"
            )
        state = None if path is None else self.read(path)
        if path is not None and state is None:
            raise ValueError(f"resume: {path} is damaged")
        later = [other for other in paths if not own or int(other.name) > int(path.name)]
        self.alone(lambda: [_remove(other) for other in later])  # of the run that is given up here
        return state

    def paths(self) -> list[Path]:
        """Folders of states, the oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if re.fullmatch(r"\d{6,}", path.name)), key=lambda path: int(path.name))

    def newest(self, paths: list[Path]) -> State | None:
        """The newest state that is whole; damaged ones are reported and put aside. None: there are no states."""
        whole = next((state for path in reversed(paths) if (state := self.read(path)) is not None), None)
        if whole is None and paths:
            raise ValueError(f"{self.folder}: no state is whole; --resume=never removes them and begins anew")
        damaged = paths[paths.index(whole.path) + 1 :] if whole else []
        self.alone(lambda: [_put_aside(path) for path in damaged])  # else they count among those that are kept
        return whole

    def read(self, path: Path) -> State | None:
        """A state but for its tensors; None, and a line that says why, if it is damaged. Ranks share the checking."""
        damage = [reason for reasons in self.world.gather_objects(self.damage(path)) for reason in reasons]
        if damage:
            if self.world.is_main:
                print(f"state {path} is damaged and not used: {damage[0]}", flush=True)
            return None
        progress = Progress.from_state_dict(torch.load(path / "run.pt", weights_only=True))
        ranks = len(list(path.glob("rank_*.pt")))
        parts = [torch.load(path / f"rank_{rank}.pt", weights_only=True) for rank in range(ranks)]
        return State(path, progress, parts)

    def damage(self, path: Path) -> list[str]:
        """What is wrong with the files that this rank checks."""
        try:
            files = json.loads((path / COMPLETE).read_text())
        except (OSError, ValueError) as error:
            return [f"{COMPLETE}: {error}"]
        wrong = []
        for name in sorted(files)[self.world.rank :: self.world.size]:
            try:
                if _fingerprint(path / name) != files[name]:
                    wrong.append(f"{name} is not what was written")
            except OSError as error:
                wrong.append(f"{name}: {error}")
        return wrong

    def save(self, progress: Progress, algorithm: Algorithm, optimizer: torch.optim.Optimizer) -> Path:
        """Write a state, all ranks together, and remove those that are too many.

        Returns:
            Its folder.
        Raises:
            ValueError: it could not be written, which file and why. Earlier states are as they were.
        """
        from torch.distributed.checkpoint import FileSystemWriter, save

        path = self.folder / f"{progress.steps:06d}"
        aside = path.with_name(path.name + ".partial")

        def begin():
            self.clear()
            aside.mkdir(parents=True)
            _write(aside / "run.pt", progress.state_dict())

        def write_tensors():
            with quiet():
                save(tensors(algorithm, optimizer), storage_writer=FileSystemWriter(aside))

        def fingerprints():
            mine = [f"rank_{self.world.rank}.pt", *(file.name for file in aside.glob(f"__{self.world.rank}_*"))]
            return {name: _fingerprint(aside / name) for name in mine + ["run.pt", ".metadata"] * self.world.is_main}

        def complete():
            everyones = {name: mark for files in marks for name, mark in files.items()}
            _write(aside / COMPLETE, json.dumps(everyones, indent=1).encode())
            aside.rename(path)
            flush_file(self.folder)
            for old in self.paths()[: -self.config.keep_states]:
                _remove(old)

        try:
            self.alone(begin)
            self.together(lambda: _write(aside / f"rank_{self.world.rank}.pt", rank_part(algorithm)))
            self.together(write_tensors)
            marks = self.together(fingerprints)
            self.alone(complete)
        except _FailedError as error:
            self.alone(self.clear)
            kept = self.paths()
            last = f"the last whole state is {kept[-1]}" if kept else "there is no earlier state"
            raise ValueError(f"the state {path} could not be written ({error}); {last}") from error
        return path

    def clear(self):
        """Remove what an interrupted save or removal has left."""
        for leftover in self.folder.glob("*.partial"):
            shutil.rmtree(leftover)

    def together(self, action: Callable):
        """Every rank's result of an action, or the failure of one on all."""
        from torch.distributed.checkpoint.api import CheckpointException

        result = failure = None
        try:
            result = action()
        except (OSError, CheckpointException) as error:
            failure = f"rank {self.world.rank}: {reason(error)}"
        results = self.world.gather_objects((result, failure))
        failures = [failure for _, failure in results if failure]
        if failures:
            raise _FailedError(failures[0])
        return [result for result, _ in results]

    def alone(self, action: Callable):
        """The first rank acts, the others wait."""
        self.together(action if self.world.is_main else lambda: None)


class _FailedError(ValueError):
    """A rank could not do its part; says which and why."""


def _write(file: Path, content):
    """Write bytes, or plain data as torch.save does, down to the disk."""
    if not isinstance(content, bytes):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        content = buffer.getvalue()
    with file.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def _remove(path: Path):
    """Remove a state; its name goes first, so that half a state never bears it."""
    if path.exists():
        aside = path.with_name(path.name + ".old.partial")
        path.rename(aside)
        shutil.rmtree(aside)


def _put_aside(path: Path):
    """Rename a damaged state; one that was put aside earlier, under the same number, goes."""
    aside = Path(f"{path}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _fingerprint(file: Path) -> list[int]:
    """Length and CRC-32."""
    length = checksum = 0
    with file.open("rb") as handle:
        while block := handle.read(1 << 22):
            length, checksum = length + len(block), zlib.crc32(block, checksum)
    return [length, checksum]
