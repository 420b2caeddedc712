"""Rewards by name: what each is given, in which of TRL's forms, and what is wrong if it fails."""

import asyncio
import inspect
import math
import numbers
import operator
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, zip_longest

from torch import Tensor

from minivlmrl.data.file_dataset import GIVEN
from minivlmrl.data.turns import text_of
from minivlmrl.reward_functions.box_rewards import box_columns
from minivlmrl.reward_functions.names import get_reward, required_columns
from minivlmrl.rewards import ask_rewards, reward_columns

# columns that hold turns where a row is a conversation
CONVERSATIONS = ("prompt", "messages", "conversations")
LARGEST = 3.4e38  # of float32


class RewardFailed(ValueError):
    """A reward has failed on one of the ranks: all raise this, and may save what was trained."""


def recipe_rewards(weights: dict[str, float], world) -> dict[Callable, float]:
    """Make functions of named rewards, which check what they return; each with its weight."""
    return {asker(name, world.together): weight for name, weight in weights.items()}


def recipe_columns(rows, prompts, completions, processor) -> dict[str, list]:
    """Collect what a recipe's rewards are given: see rewards.reward_columns and box_columns."""
    columns = reward_columns(rows, completions, processor)
    columns["environments"] = [c.environment for group in completions for c in group]
    return columns | box_columns(rows, prompts, processor, len(completions[0]))


def ask_by_name(names: Iterable[str], columns: dict[str, list], together=operator.call) -> Tensor:
    """Ask K rewards by their names: (n, K) float32, NaN where one answers None."""
    return ask_rewards([asker(name, together) for name in names], columns)


def asker(name: str, together: Callable = operator.call) -> Callable:
    """Make a reward of a name, with TRL's signature (RewardFailed: the row and what is wrong)."""

    def ask(completions: list[str], **columns) -> list[float]:
        try:
            return together(lambda: call_reward(name, completions, columns))
        except ValueError as error:
            raise RewardFailed(*error.args) from error

    return ask


def call_reward(name: str, completions: list[str], columns: dict[str, list]) -> list[float]:
    """Ask one reward about n completions: n numbers, NaN for None (ValueError: names the row)."""
    judged = [names is None or name in names for names in columns.get("row_rewards", ())]
    if not all(judged):  # some rows are of files with other rewards
        some = {column: list(compress(values, judged)) for column, values in columns.items()}
        del some["row_rewards"]
        own = list(compress(completions, judged))
        values = iter(call_reward(name, own, some) if own else ())
        return [next(values) if asked else math.nan for asked in judged]
    missing = [column for column in required_columns([name]) if column not in columns]
    if missing:
        have = f"the rows have {sorted(set(columns) - GIVEN)}"
        raise ValueError(f"reward {name} needs column {missing[0]!r}; {have}")
    function = get_reward(name)
    if not str(getattr(function, "func", function).__module__).startswith("minivlmrl."):
        columns = columns | trl_columns(completions, columns)
    columns = {"completions": completions} | columns
    try:
        values = _call(function, columns)
    except Exception as error:
        raise _blamed(name, function, completions, columns, error) from error
    return checked_values(name, values, completions, columns.get("row_names", ()))


def trl_columns(completions: list[str], columns: dict[str, list]) -> dict[str, list]:
    """Write completions and prompts as TRL does: messages if a row is a conversation, or text."""
    asked = columns.get("prompts", [[]] * len(completions))
    turns = [columns[name] for name in CONVERSATIONS if name in columns]
    found = {"completions": [], "prompts": []}
    for i, (text, messages) in enumerate(zip(completions, asked, strict=True)):
        chat = any(isinstance(column[i], list) for column in turns)
        last = text_of(messages[-1]) if messages else ""
        found["completions"].append([{"role": "assistant", "content": text}] if chat else text)
        found["prompts"].append(messages if chat else last)
    return found


def _call(function: Callable, columns: dict[str, list]) -> list:
    values = function(**columns)
    if inspect.iscoroutine(values):  # in a thread of its own: a notebook's has a running event loop
        with ThreadPoolExecutor(1) as pool:
            values = pool.submit(asyncio.run, values).result()
    return values


def _blamed(
    name: str, function: Callable, completions: list[str], columns: dict[str, list], error
) -> ValueError:
    """Find the first completion with which a reward fails, by asking about one at a time."""
    for i, text in enumerate(completions):
        try:
            _call(function, {column: values[i : i + 1] for column, values in columns.items()})
        except Exception as alone:
            row = f"{columns['row_names'][i]}: " if "row_names" in columns else ""
            # one of ours says what is wrong
            if isinstance(alone, ValueError) and str(alone).startswith("reward "):
                return ValueError(f"{row}{alone}")
            said = f"{row}reward {name} raised {alone!r}{line_of(function, alone)}"
            return ValueError(f"{said} for the completion {text!r:.80}")
    said = f"reward {name} raised {error!r}{line_of(function, error)}"
    return ValueError(f"{said} for {len(completions)} completions together, for none alone")


def line_of(function: Callable, error: Exception) -> str:
    """Say which line of the file that a reward is in has raised an error: " in mine.py:7"."""
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    file = code and code.co_filename
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == file]
    return f" in {file}:{lines[-1]}" if lines else ""


def checked_values(
    name: str, values, completions: list[str], rows: Sequence[str] = ()
) -> list[float]:
    """Turn what a reward says of n completions into n numbers, NaN for None (ValueError: no)."""
    try:
        values = list(values)
    except TypeError as error:
        cure = "it must be a list, one number a completion"
        raise ValueError(f"reward {name} returned {values!r:.80}; {cure}") from error
    if len(values) != len(completions):
        raise ValueError(f"reward {name} returned {len(values)} values, not {len(completions)}")
    found = []
    for value, completion, row in zip_longest(values, completions, rows):
        if hasattr(value, "item") and value.ndim == 0:  # of a tensor or an array
            value = value.item()
        if value is not None and not (isinstance(value, numbers.Real) and abs(value) <= LARGEST):
            cure = "it must be a finite number, or None for 'cannot judge'"
            said = f"reward {name} returned {value!r:.80} for the completion {completion!r:.80}"
            raise ValueError(f"{row}: {said}; {cure}" if row else f"{said}; {cure}")
        found.append(math.nan if value is None else float(value))
    return found
