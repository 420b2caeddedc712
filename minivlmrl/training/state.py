"""The state of a run: all that it takes to go on as if it had never stopped."""

import dataclasses
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minivlmrl.rollout.rollout import Answer, Evaluation
from minivlmrl.training.algorithms.algorithm import Algorithm
from minivlmrl.training.sharding import reshard


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
