"""The progress of a run, which a checkpoint stores as run.json beside its tensors."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from minivlmrl.config.parsing import build
from minivlmrl.json_files import read_json

RUN = "run.json"


@dataclass
class TrainerState:
    """The progress of a run, whose fields a checkpoint stores in run.json.

    `seconds`, `num_log_lines` and `logs` may differ between ranks, and run.json has those of rank 0.
    """

    seed: int  # run seed
    stages: list[str]  # the recipe's stages, in order
    stage: Annotated[int, ">= 0"] = 0  # the current stage's index
    step: Annotated[int, ">= 0"] = 0  # optimizer steps done in the current stage
    steps: Annotated[int, ">= 0"] = 0  # optimizer steps done in all stages
    draws: Annotated[int, ">= 0"] = 0  # batches of rows that the current stage has taken
    # number of rows in the dataset of the current stage; 0 before the stage begins
    rows: Annotated[int, ">= 0"] = 0
    # metrics of the evaluations before and after stages: {name of the evaluation: {metric: value}}
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    best: float | None = None  # best value of best_metric so far; eval/loss is negated
    # each stage's training time in seconds
    seconds: dict[str, float] = field(default_factory=dict)
    # the options of the recipe, and hashes of files, from recipe_values in run/checkpoints.py
    recipe: dict = field(default_factory=dict)
    # {log file: number of its lines so far}
    num_log_lines: dict[str, Annotated[int, ">= 0"]] = field(kw_only=True)
    # {name: text} from the method state_dict of callbacks
    logs: dict[str, str] = field(default_factory=dict)

    def begin_stage(self, number: int):
        """Set the counters to the beginning of the stage with the index `number`."""
        self.stage = number
        self.step = 0
        self.draws = 0
        self.rows = 0

    def check_rows(self, rows: int):
        """Raise ValueError if the number of rows has changed since the checkpoint, because the order of the rows
        depends on it."""
        if self.rows not in (0, rows):
            raise ValueError(
                f"resume: the checkpoint was saved with {self.rows} rows, but the dataset now has {rows}; restore the "
                "earlier rows, or accept the change with --resume=FOLDER, the folder of the checkpoint"
            )
        self.rows = rows

    def advance(self, stage: str, draws: int, seconds: float):
        """Count one optimizer step of the current stage."""
        self.step += 1
        self.steps += 1
        self.draws = draws
        self.seconds[stage] = seconds


def read_trainer_state(folder: Path) -> TrainerState:
    """Read a checkpoint's run.json."""
    return build(TrainerState, read_json(folder / RUN), str(folder / RUN), json=True)
