"""Progress of a run: the part of a training state that is not a tensor, stored as run.json."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from minivlmrl.config.loading import flat, nested
from minivlmrl.config.parsing import build, read_json
from minivlmrl.config.renames import eval_rewards, is_from_0_3, rename_metric, translate_options

RUN = "run.json"


@dataclass
class TrainerState:
    """Progress of a run. All ranks hold the same, except for rank 0's `seconds` and `logs`.

    The names of the fields are those of run.json.
    """

    seed: int  # seed of the run
    stages: list[str]  # stages of the recipe, in order
    stage: Annotated[int, ">= 0"] = 0  # index of the present stage
    step: Annotated[int, ">= 0"] = 0  # optimizer steps done in the present stage
    steps: Annotated[int, ">= 0"] = 0  # optimizer steps done in all stages
    draws: Annotated[int, ">= 0"] = 0  # batches of rows that the present stage has taken
    rows: Annotated[int, ">= 0"] = 0  # size of the present stage's dataset, 0 before it begins
    # state of the trainer besides tensors, None before the stage begins
    kept: dict[str, list[float]] | None = None
    # results of the evaluations between stages, for the summary
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    best: float | None = None  # best value of best_metric so far, with a minus for a loss
    seconds: dict[str, float] = field(default_factory=dict)  # training time of each stage
    recipe: dict = field(default_factory=dict)  # options of the run, see recipe_values
    # contents of the log files so far, and what callbacks need to go on
    logs: dict[str, str] = field(default_factory=dict)

    def begin_stage(self, number: int):
        """Move on to the stage with this index."""
        self.stage = number
        self.step = 0
        self.draws = 0
        self.rows = 0
        self.kept = None

    def check_rows(self, rows: int):
        """Raise ValueError if the number of rows has changed, because their order would change."""
        if self.rows not in (0, rows):
            raise ValueError(f"resume: the state is of a run with {self.rows} rows, not {rows}")
        self.rows = rows

    def advance(self, stage: str, draws: int, seconds: float):
        """Count one optimizer step of the present stage."""
        self.step += 1
        self.steps += 1
        self.draws = draws
        self.seconds[stage] = seconds


def read_trainer_state(folder: Path) -> TrainerState:
    """Read run.json in the folder of a state.

    A state of minivlmrl 0.3 gets the new names of options and evaluation metrics.

    Raises:
        ValueError: a field is missing or not valid.
    """
    state = build(TrainerState, read_json(folder / RUN), str(folder / RUN), json=True)
    options = nested(state.recipe)
    if is_from_0_3(options):
        state.recipe = flat(translate_options(options, folder / RUN))
        rewards = eval_rewards(options)
        for name, metrics in state.results.items():
            renamed = {rename_metric(metric, rewards): value for metric, value in metrics.items()}
            state.results[name] = renamed
    return state
