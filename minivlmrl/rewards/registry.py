"""Rewards by name: of the table, "my_rewards.py:brevity" or "package.module:brevity".

Options may follow, named parameters of the function: "mine.py:near(tolerance=0.05)". A recipe's rewards
are found once; each checks what it is given and returns, and names the row that it fails on.
"""

import asyncio
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from typing import Protocol, runtime_checkable

from minivlmrl.config.import_utils import raised, resolve_object, with_options
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import did_you_mean, error_context
from minivlmrl.data.boxes import box_columns
from minivlmrl.data.messages import text_of
from minivlmrl.data.rows import REWARD_ARGUMENTS
from minivlmrl.distributed.process_group import World
from minivlmrl.rewards.columns import reward_columns

REWARDS: dict[str, str | Callable] = {  # name: "module:function", or the function itself
    "format": "minivlmrl.rewards.text:tag_format",
    "accuracy": "minivlmrl.rewards.text:accuracy",
    "iou": "minivlmrl.rewards.boxes:mean_iou",
    "acc_0_5": "minivlmrl.rewards.boxes:acc_0_5",
    "giou": "minivlmrl.rewards.boxes:mean_giou",
    "box_format": "minivlmrl.rewards.boxes:box_format",
    "reward_model": "minivlmrl.trainers.reward_model:reward_model",
    "environment": "minivlmrl.agents.environment:environment_reward",
}
LARGEST = 3.4e38  # of float32
# metrics of every step, which no reward may log
STEP_METRICS = {"stage", "step", "loss", "entropy", "kl", "grad_norm", "learning_rate"}


class Text(str):
    """A text that rewards written for TRL may ask as messages: text[0]["content"] is all of it."""

    message: dict[str, str]

    def __new__(cls, text: str, role: str = "assistant", content: str | None = None):
        message_text = super().__new__(cls, text)
        message_text.message = {"role": role, "content": str(text) if content is None else content}
        return message_text

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.message[key]
        if key not in (0, -1):
            return super().__getitem__(key)
        letter = super().__getitem__(slice(key, key + 1 or None))  # "" of an empty text
        return Text(letter, **self.message)


def question(prompt: Text | list[dict]) -> Text:
    """Make a text of a prompt's last turn; a reward that asks another one hands it on."""
    return Text("".join(map(text_of, prompt[-1:])), "user") if isinstance(prompt, list) else prompt


@dataclass
class StageProgress:
    """What rewards may read of a run, by TRL's names: optimizer steps of the present stage."""

    global_step: int = 0
    max_steps: int = 0


class RewardLog:
    """What a stage tells its rewards, and they tell it: TRL's trainer_state and log_metric."""

    def __init__(self, global_step: int = 0, max_steps: int = 0):
        self.trainer_state = StageProgress(global_step, max_steps)
        self.metrics: dict[str, list[float]] = {}  # of the present rollout, on this rank

    def log_metric(self, name: str, value: float):
        """Note a finite number: metrics.jsonl has its mean over a rollout and the ranks."""
        number = plain_value(value)
        if name in STEP_METRICS:
            raise ValueError(f"log_metric: every step has {name!r} already; take another name")
        if not isinstance(number, numbers.Real) or not math.isfinite(number):
            raise ValueError(f"log_metric: {name} is {number!r:.80}, it must be a finite number")
        self.metrics.setdefault(name, []).append(float(number))


class RewardFailed(ValueError):
    """A reward has failed on one of the ranks: all raise this, and may save what was trained."""


@dataclass(eq=False)
class Reward:
    """A reward that was found by its name: it has TRL's signature and checks what is returned."""

    name: str
    function: Callable
    # (work) -> what it returns, or the error of any rank, see World.run_on_all_ranks
    run_on_all_ranks: Callable = operator.call
    log: RewardLog | None = None  # of a stage; evaluations and tools have none

    @property
    def columns(self) -> set[str]:
        """Name the columns it needs: the function's named parameters without a default."""
        parameters = inspect.signature(self.function).parameters.values()
        needed = {p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD}
        return needed - REWARD_ARGUMENTS

    def on(self, world: World, log: RewardLog | None = None) -> "Reward":
        """Return this reward for the ranks of a run, which fail together."""
        return replace(self, run_on_all_ranks=world.run_on_all_ranks, log=log)

    def __call__(self, /, completions: list[str], **columns) -> list[float]:
        """Judge n completions: n numbers, NaN for None (RewardFailed: names the row)."""
        try:
            return self.run_on_all_ranks(
                lambda: self._judge({"completions": completions} | columns)
            )
        except ValueError as error:
            raise RewardFailed(*error.args) from error

    def _judge(self, columns: dict[str, list]) -> list[float]:
        """Ask about the rows that are not of a file with other rewards; of these NaN."""
        log = self.log or RewardLog()
        given = {"trainer_state": log.trainer_state, "log_metric": log.log_metric}
        for name in [*given, "log_extra"]:
            if name in columns:  # a reward that asks another one hands them on
                given[name] = columns.pop(name)
        row_rewards = columns.pop("row_rewards", [None] * len(columns["completions"]))
        is_judged = [names is None or self.name in names for names in row_rewards]
        if not any(is_judged):
            return [math.nan] * len(is_judged)
        columns = {column: list(compress(values, is_judged)) for column, values in columns.items()}
        missing_columns = sorted(self.columns - columns.keys())
        if missing_columns:
            raise ValueError(
                f"reward {self.name} needs column {missing_columns[0]!r}; "
                f"the rows have {sorted(columns.keys() - REWARD_ARGUMENTS)}"
                f"{did_you_mean(missing_columns[0], columns)}"
            )
        texts = columns["completions"]
        extras = columns.pop("extras", [{} for _ in texts])
        given.setdefault("log_extra", partial(log_extra, extras))
        prefixes = [f"{row}: " for row in columns.get("row_names", ())] or [""] * len(texts)
        columns["completions"] = [Text(text) for text in texts]
        if columns.get("prompts"):
            columns["prompts"] = [question(prompt) for prompt in columns["prompts"]]
        try:
            values = _call(self.function, columns | given)
        except (Exception, SystemExit) as error:
            raise self._blamed(texts, prefixes, columns, given, error) from error
        values = iter(checked_values(self.name, values, texts, prefixes))
        return [next(values) if judged else math.nan for judged in is_judged]

    def _blamed(
        self, texts: list[str], prefixes: list[str], columns: dict, given: dict, error
    ) -> ValueError:
        """Find the first completion with which it fails, by asking about one at a time."""
        prefix = ""
        failed_with = f"{len(texts)} completions together and none alone"
        for i, text in enumerate(texts):
            given["log_extra"] = partial(log_extra, [{}])
            try:
                row = {name: [values[i]] for name, values in columns.items()}
                _call(self.function, row | given)
            except (Exception, SystemExit) as error_alone:
                prefix = prefixes[i]
                failed_with = f"the completion {text!r:.80}"
                error = error_alone
                break
        if isinstance(error, ValueError) and str(error).startswith("reward "):
            return ValueError(f"{prefix}{error}")  # one of ours says what is wrong
        reason = raised(self.function, error, columns)
        return ValueError(f"{prefix}reward {self.name}, for {failed_with}, {reason}")


def get_reward(name: str) -> Reward:
    """Find a reward (ValueError: there is none, or its function has no such option)."""
    function, options = resolve_object("reward", name, REWARDS)
    with error_context(f"reward {name}"):
        function = with_options(function, options)
        if not inspect.getfullargspec(function).varkw:
            raise ValueError("end its arguments with **columns")
        return Reward(name, function)


def training_rewards(run: RunConfig) -> list[Reward]:
    """Find the functions of a recipe's `rewards`."""
    return [get_reward(name) for name in run.rewards]


def held_out_rewards(run: RunConfig) -> list[Reward]:
    """Find the functions of a recipe's `data.eval_rewards`."""
    return [get_reward(name) for name in run.data.eval_rewards]


def columns_of(rewards: Iterable[Reward]) -> list[str]:
    """List the columns that any of these rewards needs."""
    return sorted(set().union(*(reward.columns for reward in rewards)))


def recipe_columns(rows, prompts, completions, processor) -> dict[str, list]:
    """Collect what a recipe's rewards are given: see reward_columns and box_columns.

    turn_texts: of each completion the texts of its turns; one, unless it is a trajectory.
    """
    columns = reward_columns(rows, completions, processor)
    flat = list(chain(*completions))
    columns["environments"] = [completion.environment for completion in flat]
    columns["extras"] = [completion.extra for completion in flat]
    columns["turn_texts"] = [
        [processor.decode_assistant_turn(turn) for turn in c.turns or [c]] for c in flat
    ]
    return columns | box_columns(rows, prompts, processor, len(completions[0]))


def checked_values(name: str, values, completions: list[str], prefixes: list[str]) -> list[float]:
    """Turn what a reward says of n completions into n numbers, NaN for None (ValueError: no)."""
    try:
        if isinstance(values, dict | set | str):  # whose keys or letters could pass for numbers
            raise TypeError
        judged_rows = list(zip(values, completions, prefixes, strict=True))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward {name} returned {values!r:.80}; "
            f"it must be a list of {len(completions)} numbers, one a completion"
        ) from error
    checked = []
    for value, text, prefix in judged_rows:
        value = plain_value(value)
        if value is None:
            checked.append(math.nan)
        elif isinstance(value, float | int | numbers.Real) and abs(value) <= LARGEST:
            checked.append(float(value))
        else:
            raise ValueError(
                f"{prefix}reward {name} returned {value!r:.80} for the completion {text!r:.80}; "
                "it must be a finite number, or None for 'cannot judge'"
            )
    return checked


@runtime_checkable
class Array(Protocol):
    """A tensor or an array, of any library."""

    @property
    def ndim(self) -> int: ...
    def item(self) -> float: ...


def plain_value(value: Array | float | str | None) -> Array | float | str | None:
    """Return the Python value of a tensor or an array of no dimensions; others as they are."""
    return value.item() if isinstance(value, Array) and value.ndim == 0 else value


def log_extra(extras: list[dict], column: str, values: list):
    """Note a value of each completion: TRL's log_extra(column, values); others than JSON's as text.

    Raises:
        ValueError: it has not one value a completion.
    """
    if len(values) != len(extras):
        raise ValueError(
            f"log_extra: {column} has {len(values)} values, it must have {len(extras)}, "
            "one a completion"
        )
    for extra, value in zip(extras, map(plain_value, values), strict=True):
        is_json = value is None or isinstance(value, str | int | float)
        extra[column] = value if is_json else str(value)


def _call(function: Callable, columns: dict[str, list]) -> list:
    values = function(**columns)
    if inspect.iscoroutine(values):  # in a thread of its own: a notebook's has a running event loop
        with ThreadPoolExecutor(1) as pool:
            values = pool.submit(asyncio.run, values).result()
    return values
