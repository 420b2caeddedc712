"""Training progress, saved as run.json in states."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from minivlmrl.config.parsing import build
from minivlmrl.json_files import read_json

RUN = "run.json"


@dataclass
class TrainerState:
    seed: int
    stages: list[str]
    stage: Annotated[int, ">= 0"] = 0  # current stage, as an index in `stages`
    step: Annotated[int, ">= 0"] = 0  # optimizer steps in the current stage
    steps: Annotated[int, ">= 0"] = 0  # optimizer steps in all stages
    batches_consumed: Annotated[int, ">= 0"] = 0  # row batches used in the current stage
    # evaluation metrics, such as {"after_sft": {"eval/accuracy_greedy": 0.4}}
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    best: float | None = None  # best evaluation so far (best_metric), negated if lower is better
    seconds: dict[str, float] = field(default_factory=dict)  # training time per stage, in seconds
    recipe: dict = field(default_factory=dict)  # recipe options; see run/recipe_changes.py
    hashes: dict[str, str] = field(default_factory=dict)  # hashes of files read by the run
    # {log file: how many lines it had when the state was saved}
    num_log_lines: dict[str, Annotated[int, ">= 0"]] = field(default_factory=dict)
    optimizer: list[dict] = field(default_factory=list)  # numbers in parameter groups; see group_numbers
    logs: dict[str, str] = field(default_factory=dict)  # state of callbacks, from Callback.state_dict


def read_trainer_state(folder: Path) -> TrainerState:
    content = read_json(folder / RUN)
    content.setdefault("batches_consumed", content.get("draws", 0))  # older states have the name "draws" for it
    return build(TrainerState, content, str(folder / RUN), json=True)
