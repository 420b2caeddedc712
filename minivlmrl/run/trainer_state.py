"""The progress of a run, which rank 0 saves in the file run.json of each checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from minivlmrl.config.parsing import build
from minivlmrl.errors import pluralize
from minivlmrl.json_files import read_json

RUN = "run.json"


@dataclass
class Fingerprints:
    """Hashes of the files that a run reads."""

    base: str | None = None  # base weights of an adapter, which a checkpoint does not contain
    rows: dict[str, str] = field(default_factory=dict)  # {option that names a data file: hash}
    media: dict[str, str] = field(default_factory=dict)  # {stage: hash of sizes and times of images and videos}
    code: dict[str, str] = field(default_factory=dict)  # {file with the user's code: hash}


@dataclass
class TrainerState:
    seed: int  # run seed
    stages: list[str]  # the recipe's stages, in order
    stage: Annotated[int, ">= 0"] = 0  # the current stage's index
    step: Annotated[int, ">= 0"] = 0  # optimizer steps done in the current stage
    steps: Annotated[int, ">= 0"] = 0  # optimizer steps done in all stages
    batches_consumed: Annotated[int, ">= 0"] = 0  # batches of rows that the current stage has used
    rows: Annotated[int, ">= 0"] = 0  # number of rows in the current stage's dataset; 0 before the stage begins
    # metrics of each evaluation, for example after the stage sft: {"after_sft": {"eval/accuracy_greedy": 0.4}}
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    best: float | None = None  # best value of best_metric so far, negated if training lowers the metric
    seconds: dict[str, float] = field(default_factory=dict)  # each stage's training time
    recipe: dict = field(default_factory=dict)  # the recipe's options; see run/recipe_changes.py
    files: Fingerprints = field(default_factory=Fingerprints)  # of the files that the recipe names
    # {log file: number of its lines so far}
    num_log_lines: dict[str, Annotated[int, ">= 0"]] = field(kw_only=True)
    # {log file: line of the last step}, which an error after the update may have kept from being written
    last_lines: dict[str, dict] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)  # texts that callbacks save; see Callback.state_dict

    def begin_stage(self, number: int):
        self.stage = number
        self.step = 0
        self.batches_consumed = 0
        self.rows = 0

    def check_rows(self, rows: int):
        """Raise ValueError if the number of rows has changed since the checkpoint."""
        if self.rows not in (0, rows):
            raise ValueError(
                f"resume: the checkpoint was saved with {pluralize(self.rows, 'row')}, but the dataset now has "
                f"{rows}; restore the earlier rows, or accept the change with --resume=FOLDER (the checkpoint)"
            )
        self.rows = rows

    def advance(self, batches_consumed: int):
        self.step += 1
        self.steps += 1
        self.batches_consumed = batches_consumed


def read_trainer_state(folder: Path) -> TrainerState:
    """Read a checkpoint's run.json."""
    content = read_json(folder / RUN)
    content.setdefault("batches_consumed", content.get("draws", 0))  # name in older checkpoints
    return build(TrainerState, content, str(folder / RUN), json=True)
