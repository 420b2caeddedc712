"""Registry of reward functions, with checks for arguments and return values.

A reward is a name in REWARDS, or a function: "my_rewards.py:brevity" or "package.module:brevity", possibly with
options: "mine.py:near(tolerance=0.05)".
"""

import inspect
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from types import SimpleNamespace
from typing import Any

from minivlmrl.config.import_utils import own_signature, parameters_of, resolve_function
from minivlmrl.config.options import RunConfig
from minivlmrl.config.time_limit import Overtime, time_limit
from minivlmrl.data.messages import as_turns, text_of
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, pluralize, truncate
from minivlmrl.rewards.columns import REWARD_ARGUMENTS

REWARDS: dict[str, str | Callable] = {  # {reward name: "module:function" or function}
    "format": "minivlmrl.rewards.text:tag_format",
    "accuracy": "minivlmrl.rewards.text:accuracy",
    "iou": "minivlmrl.rewards.boxes:mean_iou",
    "acc_0_5": "minivlmrl.rewards.boxes:acc_0_5",
    "box_format": "minivlmrl.rewards.boxes:box_format",
    "reward_model": "minivlmrl.extras.reward_model:reward_model",
    "environment": "minivlmrl.extras.agents.environment:environment_reward",
}
# rewards that preflight.py calls before training, to find invalid solutions
COMPARE_SOLUTIONS = ("accuracy", "iou", "acc_0_5")
MAX_FLOAT32 = 3.4e38
QUIET = dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)
# names of built-in step metrics, which log_metric rejects
STEP_METRICS = {"stage", "step", "loss", "entropy", "kl", "grad_norm", "learning_rate"}


# error from completion[0]["content"] in a reward function that expects messages, but gets a string
READS_MESSAGES = re.compile(
    "string indices must be integers|'str' object (?:is not a mapping|has no attribute '(?:get|items|keys|pop|values)')"
)
# possible sets of arguments to pass as messages; for conversations, TRL passes both
FORMS = (), ("prompts",), ("prompts", "completions")


def in_form(columns: dict[str, list], form: Collection[str]) -> dict[str, list]:
    """Convert `prompts` and `completions` to messages if they are in `form`, otherwise to strings."""
    converted = {}
    for name, role in (("prompts", "user"), ("completions", "assistant")):
        conversations = [as_turns(value, role) for value in columns.get(name, ())]
        if name in form:
            converted[name] = [[{**turn, "content": text_of(turn)} for turn in turns] for turns in conversations]
        elif conversations:
            converted[name] = ["".join(map(text_of, turns[-1:])) for turns in conversations]
    return columns | converted


class RewardLog:
    """Provides the reward arguments `trainer_state` and `log_metric`, as in TRL."""

    def __init__(self, global_step: int = 1, max_steps: int = 1):  # default: step 1 of 1
        self.trainer_state = SimpleNamespace(global_step=global_step, max_steps=max_steps)
        self.metrics: dict[str, list[float]] = {}  # {metric: this rank's values in the current rollout}

    def log_metric(self, name: str, value: float):
        """Log a finite number as a metric; metrics.jsonl contains the mean over the rollout."""
        number = plain_value(value)
        if name in STEP_METRICS:
            raise UserError(f"log_metric: {name!r} is already a metric of every step; use another name")
        if not isinstance(number, numbers.Real) or not math.isfinite(number):
            raise UserError(f"log_metric: {name} is {truncate(number, 80)}, but it must be a finite number")
        self.metrics.setdefault(name, []).append(float(number))


class RewardFailed(UserError):
    """Error in a reward function, raised on all ranks, so that they save a checkpoint together."""


@dataclass(eq=False)
class Reward:
    """A named reward function, with TRL's signature."""

    name: str
    function: Callable
    world: World = field(default_factory=World)
    log: RewardLog | None = None  # log of the training stage, None in evaluations and commands
    max_seconds: float | None = None  # time limit per call in seconds, None = no limit
    form: tuple[str, ...] = ()  # arguments passed as messages, one of FORMS

    @property
    def columns(self) -> set[str]:
        """Names of required columns: the function's parameters without a default."""
        parameters = parameters_of(self.function)
        return {name for name in self.optional_columns if parameters[name].default is inspect.Parameter.empty}

    @property
    def optional_columns(self) -> set[str]:
        """Names of columns that the function may read: all its parameters."""
        parameters = parameters_of(self.function).values()
        return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - REWARD_ARGUMENTS

    @property
    def receives_all(self) -> bool:
        """True for a user's function with a parameter such as **columns."""
        function = getattr(self.function, "func", self.function)  # a reward with options is a functools.partial
        # functools.wraps copies __module__ but not __globals__
        module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        parameters = own_signature(function).parameters.values()
        # built-in rewards ignore their **columns
        return not module.startswith("minivlmrl.") and any(p.kind is p.VAR_KEYWORD for p in parameters)

    def with_world(self, world: World, log: RewardLog | None = None) -> "Reward":
        """Return a copy of the reward that raises RewardFailed on all ranks if the function fails on one rank."""
        return replace(self, world=world, log=log)

    def __call__(self, /, completions: list[str], **columns) -> list[float]:
        """Return n rewards, NaN where the function returned None.

        If a row lists reward names in column `row_rewards`, other rewards are NaN.

        Raises:
            RewardFailed: the reward function failed; the message names the row.
        """
        row_rewards = columns.pop("row_rewards", [None] * len(completions))
        is_scored = [names is None or self.name in names for names in row_rewards]
        log = self.log or RewardLog()
        extras = list(compress(columns.pop("extras", [{} for _ in completions]), is_scored))
        callbacks = {
            "trainer_state": log.trainer_state,
            "log_metric": log.log_metric,
            "log_extra": partial(log_extra, self.name, extras),
        }
        for name in callbacks.keys() & columns.keys():  # passed by a user's reward function that calls this reward
            callbacks[name] = columns.pop(name)
        columns["completions"] = completions
        columns = {name: list(compress(values, is_scored)) for name, values in columns.items()}
        score = partial(self._score, columns, callbacks)
        try:
            scored = iter(self.world.run_on_all_ranks(score, f"compute the reward {self.name}"))
        except RewardFailed:
            self.world.stop_if_preempted()  # a preemption signal shortens the time limit
            raise
        return [next(scored) if is_one else math.nan for is_one in is_scored]

    def _score(self, columns: dict[str, list], callbacks: dict[str, Any]) -> list[float]:
        """Call the reward function, and check the returned values."""
        texts = columns["completions"]
        if not texts:
            return []
        rows = columns.get("row_names") or ["" for _ in texts]
        try:
            with nullcontext() if self.max_seconds is None else time_limit(self.max_seconds):
                try:
                    values = self._call(columns, callbacks)
                except Exception as error:
                    found = self._find_failure(columns, callbacks)
                    raise RewardFailed(f"{found}: {type(error).__name__}: {error}") from error
        except Overtime as error:
            prefix = rows[0] and f"{rows[0]}: "
            raise RewardFailed(
                f"{prefix}reward {self.name}, for {pluralize(len(texts), 'completion')} from this row on: {error}; "
                "make it faster, or increase max_reward_seconds"
            ) from error
        return checked_values(self.name, values, texts, [row and f"{row}: " for row in rows])

    def _call(self, columns: dict[str, list], callbacks: dict[str, Any]) -> Any:
        """Call the reward function; if it fails on strings, find which arguments it expects as messages."""
        try:
            return self._values(columns, self.form, callbacks)
        except (AttributeError, IndexError, TypeError):
            form = self._find_form(columns, callbacks)
            if form == self.form:
                raise
        self.form = form
        return self._values(columns, form, callbacks)

    def _values(self, columns: dict[str, list], form: Collection[str], callbacks: dict[str, Any]) -> Any:
        values = self.function(**in_form(columns, form) | callbacks)
        return [*values] if isinstance(values, Iterator) else values  # a generator fails only when it is read

    def _find_form(self, columns: dict[str, list], callbacks: dict[str, Any]) -> tuple[str, ...]:
        """Find which arguments the reward function expects as messages."""
        # replace empty strings, because completion[0] fails on "" before reading ["content"]
        columns = columns | {"completions": [text or "?" for text in columns["completions"]]}
        for form in FORMS:
            try:
                self._values(columns, form, callbacks | QUIET)
            except Exception as error:
                if READS_MESSAGES.search(str(error)):
                    continue
            return form
        return ()

    def _find_failure(self, columns: dict[str, list], callbacks: dict[str, Any]) -> str:
        """Call the reward function per completion, and describe the first failure."""
        callbacks = callbacks | QUIET
        rows = columns.get("row_names") or ["" for _ in columns["completions"]]
        for i, (row, text) in enumerate(zip(rows, columns["completions"], strict=True)):
            try:
                one = {name: [values[i]] for name, values in columns.items()}
                self._values(one, self.form, callbacks)
            except Exception:
                return f"{row and f'{row}: '}reward {self.name}, for the completion {truncate(text, 80)}"
        return f"reward {self.name}, for {pluralize(len(rows), 'completion')} together"


def get_reward(name: str, max_seconds: float | None = None) -> Reward:
    """Load a reward by name, possibly with options: "iou" or "mine.py:near(tolerance=0.05)"."""
    return Reward(name, resolve_function("reward", name, REWARDS), max_seconds=max_seconds)


def training_rewards(config: RunConfig) -> list[Reward]:
    return [get_reward(name, config.max_reward_seconds) for name in config.rewards]


def held_out_rewards(config: RunConfig) -> list[Reward]:
    return [get_reward(name, config.max_reward_seconds) for name in config.eval_rewards]


def required_columns(rewards: Iterable[Reward]) -> list[str]:
    return sorted(set().union(*(reward.columns for reward in rewards)))


def checked_values(name: str, values, completions: list[str], prefixes: list[str]) -> list[float]:
    """Convert the values that a reward function returned to floats, None to NaN."""
    try:
        if isinstance(values, dict | set | str):
            raise TypeError
        scored_rows = list(zip(values, completions, prefixes, strict=True))
    except (TypeError, ValueError) as error:
        raise RewardFailed(
            f"reward {name} returned {truncate(values, 80)}, but "
            f"it must return a list with one number per completion, here {len(completions)}"
        ) from error
    checked = []
    for value, text, prefix in scored_rows:
        value = plain_value(value)
        if value is None:
            checked.append(math.nan)
        elif isinstance(value, float | int | numbers.Real) and abs(value) <= MAX_FLOAT32:
            checked.append(float(value))
        else:
            raise RewardFailed(
                f"{prefix}reward {name} returned {truncate(value, 80)} for the completion {truncate(text, 80)}, "
                "but it must return a finite number, or None if it cannot score the completion"
            )
    return checked


def plain_value(value: Any) -> float | str | None:
    """Convert a scalar tensor or array to a Python number; return other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def log_extra(reward_name: str, extras: list[dict], column: str, values: list):
    """Log one value per completion, like TRL's log_extra(column, values).

    Reasons in column "why" are logged per reward, for example {"format": "no <answer>"}. Values without a JSON type
    are logged as str(value).
    """
    if len(values) != len(extras):
        raise UserError(
            f"log_extra: {column!r} has {pluralize(len(values), 'value')} for {pluralize(len(extras), 'completion')}; "
            "give one value for each completion"
        )
    for extra, value in zip(extras, map(plain_value, values), strict=True):
        is_json = value is None or isinstance(value, str | int | float)
        value = value if is_json else str(value)
        if column != "why":
            extra[column] = value
        elif value not in (None, ""):
            extra.setdefault("why", {})[reward_name] = value
