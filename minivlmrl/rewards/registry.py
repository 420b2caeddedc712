"""Registry of reward functions, with checks of arguments and return values.

A reward is a name in REWARDS, "my_rewards.py:brevity" or "package.module:brevity", possibly with options:
"mine.py:near(tolerance=0.05)".
"""

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import compress
from typing import Any

from minivlmrl.config.import_utils import parameters_of, resolve_function
from minivlmrl.config.options import RunConfig
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
# rewards for comparing an answer with the solution; called before training, to find invalid solutions
COMPARE_SOLUTIONS = ("accuracy", "iou", "acc_0_5")
MAX_FLOAT32 = 3.4e38
STEP_METRICS = {  # metric names (up to the first slash) not allowed for rewards
    "stage", "step", "loss", "entropy", "kl", "grad_norm", "learning_rate", "reward", "reward_std",
    "group_reward_std", "frac_reward_zero_std", "rewards", "completions", "clip_ratio", "rollout", "tools", "eval",
    "mean_turns", "num_gen_batches", "cispo_clip_ratio", "vespo", "policy_loss", "value_loss", "approx_kl", "ratio",
}  # fmt: skip
QUIET = dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)

# {reward name: whether its function reads chat messages instead of text}, found out in its first call
READS_MESSAGES: dict[str, bool] = {}
SHARED = {"images", "environments"}  # arguments passed to rewards without a copy


@dataclass
class RewardLog:
    """The reward arguments `trainer_state` (this object) and `log_metric`, as in TRL."""

    global_step: int = 1
    max_steps: int = 1
    metrics: dict[str, list[float]] = field(default_factory=dict)  # {metric: values from this rank and rollout}

    def log_metric(self, name: str, value: float):
        """Log a number; metrics.jsonl contains its mean over the rollout."""
        if name.partition("/")[0] in STEP_METRICS:  # found before a run, because the reward check also calls this
            raise UserError(f"log_metric: {name!r} is a name of the run's own metrics; use another name")
        self.metrics.setdefault(name, []).append(float(value))


class RewardFailed(UserError):
    """Raised on all ranks if a reward function fails on one, so all can save a state together."""


@dataclass(eq=False)
class Reward:
    """A named reward function, with TRL's signature."""

    name: str
    function: Callable
    world: World = field(default_factory=World)  # ranks; if the function fails on one, all raise RewardFailed
    log: RewardLog | None = None  # metrics logged by rewards; None outside training

    @property
    def columns(self) -> set[str]:
        """Dataset columns that are required parameters of the function."""
        parameters = parameters_of(self.function)
        return {name for name in self.optional_columns if parameters[name].default is inspect.Parameter.empty}

    @property
    def optional_columns(self) -> set[str]:
        """Dataset columns that the function may read."""
        parameters = parameters_of(self.function).values()
        return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - REWARD_ARGUMENTS

    @property
    def receives_all(self) -> bool:
        """Whether a user-defined reward takes **columns, and so may read all columns."""
        function = getattr(self.function, "func", self.function)  # a functools.partial if the reward has options
        # functools.wraps changes function.__module__
        module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        parameters = parameters_of(function).values()
        # built-in rewards take **columns, but do not read them
        return not module.startswith("minivlmrl.") and any(p.kind is p.VAR_KEYWORD for p in parameters)

    def __call__(self, /, completions: list[str], **columns) -> list[float]:
        """Return n rewards, NaN where the function returned None.

        If the column `row_rewards` names the rewards for a row, other rewards return NaN. If the function fails, the
        error RewardFailed names the row.
        """
        row_rewards = columns.pop("row_rewards", [None] * len(completions))
        is_scored = [names is None or self.name in names for names in row_rewards]
        log = self.log or RewardLog()
        extras = list(compress(columns.pop("extras", [{} for _ in completions]), is_scored))
        callbacks = {
            "trainer_state": log,
            "log_metric": log.log_metric,
            "log_extra": partial(log_extra, self.name, extras),
        }
        for name in callbacks.keys() & columns.keys():  # if another reward calls this one, use its callbacks
            callbacks[name] = columns.pop(name)
        columns["completions"] = completions
        columns = {name: list(compress(values, is_scored)) for name, values in columns.items()}
        score = partial(self._score, columns, callbacks)
        scored = iter(self.world.run_on_all_ranks(score))
        return [next(scored) if is_one else math.nan for is_one in is_scored]

    def _score(self, columns: dict[str, list], callbacks: dict[str, Any]) -> list[float]:
        texts = columns["completions"]
        if not texts:
            return []
        prefixes = [f"{row}: " for row in columns.get("row_names", ())] or [""] * len(texts)
        if self.name not in READS_MESSAGES:
            self._choose_form(columns, callbacks, prefixes[0])
        try:
            values = self._call(columns, callbacks)
        except Exception as error:
            found = self._find_failure(columns, callbacks, prefixes)
            raise RewardFailed(f"{found}: {type(error).__name__}: {error}") from error
        return checked_values(self.name, values, texts, prefixes)

    def _choose_form(self, columns: dict[str, list], callbacks: dict[str, Any], prefix: str):
        """Find out if the function reads text or chat messages, by calling it with one completion in both forms."""
        one = {name: values[:1] for name, values in columns.items()}
        one["completions"] = [one["completions"][0] or "?"]  # not empty: completion[0] would fail on ""
        errors: list[Exception] = []
        for reads_messages in (False, True):
            try:
                self._call(one, callbacks | QUIET, reads_messages)
            except Exception as error:
                errors.append(error)
            else:
                READS_MESSAGES[self.name] = reads_messages
                return
        texts = dict.fromkeys(f"{type(error).__name__}: {error}" for error in errors)
        raise RewardFailed(
            f"{prefix}reward {self.name}, for the completion {truncate(one['completions'][0], 80)}: "
            f"{'; if prompts and completions are chat messages: '.join(texts)}"
        ) from errors[0]

    def _call(self, columns: dict[str, list], callbacks: dict[str, Any], reads_messages: bool | None = None) -> Any:
        """Call the function with a copy of the columns, and with prompts and completions as text or chat messages."""
        reads_messages = READS_MESSAGES[self.name] if reads_messages is None else reads_messages
        arguments: dict[str, Any] = {**callbacks}
        for name, values in columns.items():
            arguments[name] = values if name in SHARED else [deepcopy(value) for value in values]
        for name, role in (("prompts", "user"), ("completions", "assistant")):
            conversations = [as_turns(value, role) for value in columns.get(name, ())]
            if reads_messages:
                arguments[name] = [[{**turn, "content": text_of(turn)} for turn in turns] for turns in conversations]
            elif conversations:
                arguments[name] = ["".join(map(text_of, turns[-1:])) for turns in conversations]
        values = run_async(self.function(**arguments))
        return [*values] if isinstance(values, Iterator) else values  # a generator raises errors only when read

    def _find_failure(self, columns: dict[str, list], callbacks: dict[str, Any], prefixes: list[str]) -> str:
        """Call the function once per completion, and describe the first completion for which it fails."""
        for i, (prefix, text) in enumerate(zip(prefixes, columns["completions"], strict=True)):
            try:
                self._call({name: [values[i]] for name, values in columns.items()}, callbacks | QUIET)
            except Exception:
                return f"{prefix}reward {self.name}, for the completion {truncate(text, 80)}"
        return f"reward {self.name}, for {pluralize(len(prefixes), 'completion')} together"


def get_reward(name: str) -> Reward:
    return Reward(name, resolve_function("reward", name, REWARDS))


def training_rewards(config: RunConfig) -> list[Reward]:
    return [get_reward(name) for name in config.rewards]


def held_out_rewards(config: RunConfig) -> list[Reward]:
    return [get_reward(name) for name in config.eval_rewards]


def required_columns(rewards: Iterable[Reward]) -> list[str]:
    return sorted(set().union(*(reward.columns for reward in rewards)))


def checked_values(name: str, values, completions: list[str], prefixes: list[str]) -> list[float]:
    """Convert values returned by a reward to floats, None to NaN."""
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


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return one event loop for all async rewards, because their clients and semaphores belong to a single loop."""
    return asyncio.new_event_loop()


def run_async(value: Any) -> Any:
    """Await an `async def` result; return other values unchanged."""
    return event_loop().run_until_complete(value) if inspect.isawaitable(value) else value


def plain_value(value: Any) -> float | str | None:
    """Convert a scalar tensor or array to a Python number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def log_extra(reward_name: str, extras: list[dict], column: str, values: list):
    """Add a column with one value per completion to the completion log, like log_extra(column, values) in TRL.

    Column "why" has one value per reward, such as {"format": "no <answer>"}. Values without a JSON type become
    strings.
    """
    if len(values) != len(extras):
        raise UserError(
            f"log_extra: {column!r} has {pluralize(len(values), 'value')} for {pluralize(len(extras), 'completion')}; "
            "give one value for each completion"
        )
    for extra, value in zip(extras, map(plain_value, values), strict=True):
        if not isinstance(value, str | int | float | None):
            value = str(value)
        if column != "why":
            extra[column] = value
        elif value not in (None, ""):
            extra.setdefault("why", {})[reward_name] = value
