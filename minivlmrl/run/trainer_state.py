"""A run's progress: the part of a checkpoint that is not a tensor, stored as run.json."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from minivlmrl.config.parsing import build
from minivlmrl.json_files import read_json

RUN = "run.json"


@dataclass
class TrainerState:
    """A run's progress, stored in run.json under the same field names.

    All ranks have the same values, except for `seconds`, `num_log_lines` and `logs`, for which rank 0 counts.
    """

    seed: int  # run seed
    stages: list[str]  # the recipe's stages, in order
    stage: Annotated[int, ">= 0"] = 0  # the current stage's index
    step: Annotated[int, ">= 0"] = 0  # optimizer steps done in the current stage
    steps: Annotated[int, ">= 0"] = 0  # optimizer steps done in all stages
    draws: Annotated[int, ">= 0"] = 0  # batches of rows that the current stage has taken
    # number of rows in the current stage's dataset; 0 before the stage begins
    rows: Annotated[int, ">= 0"] = 0
    # metrics from the evaluations between stages, by the evaluation's name
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    best: float | None = None  # best value of best_metric so far; eval/loss is negated
    # each stage's training time in seconds
    seconds: dict[str, float] = field(default_factory=dict)
    # the run's options by name, see recipe_values in run/checkpoints.py
    recipe: dict = field(default_factory=dict)
    # number of lines that each log file in the run's folder has so far
    num_log_lines: dict[str, Annotated[int, ">= 0"]] = field(kw_only=True)
    # texts from which callbacks continue after a resume
    logs: dict[str, str] = field(default_factory=dict)

    def begin_stage(self, number: int):
        """Begin the stage with this index, of which no step is done yet."""
        self.stage = number
        self.step = 0
        self.draws = 0
        self.rows = 0

    def check_rows(self, rows: int):
        """Raise ValueError if the number of rows has changed, because their order depends on it."""
        if self.rows not in (0, rows):
            raise ValueError(
                f"resume: the checkpoint was saved with {self.rows} rows, but the dataset now has {rows}; restore the "
                "earlier rows, or accept the change with --resume=FOLDER, the folder of the checkpoint"
            )
        self.rows = rows

    def advance(self, stage: str, draws: int, seconds: float):
        """Count one optimizer step in the present stage."""
        self.step += 1
        self.steps += 1
        self.draws = draws
        self.seconds[stage] = seconds


def read_trainer_state(folder: Path) -> TrainerState:
    """Read a checkpoint's run.json."""
    return build(TrainerState, read_json(folder / RUN), str(folder / RUN), json=True)
