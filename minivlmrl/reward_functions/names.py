"""Names of rewards -> functions: of the table, "my_rewards.py:brevity" or "package.module:brevity".

Options may follow, named parameters of the function: "number(tolerance=0.05)".
"""

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterable

from minivlmrl.data.file_dataset import GIVEN
from minivlmrl.hub.checker import naming
from minivlmrl.hub.load import load_name

FILES = {  # file: its rewards, and the function where a name cannot be one in Python
    "minivlmrl.rewards": "format accuracy",
    "minivlmrl.reward_functions.judges": "choice yes_no class=class_name",
    "minivlmrl.reward_functions.number": "number",
    "minivlmrl.reward_functions.math_answer": "math",
    "minivlmrl.reward_functions.lengths": "cosine repetition",
    "minivlmrl.reward_functions.box_rewards": "iou acc_0_5 giou point box_format",
    "minivlmrl.reward_functions.detection": "detection ap_50 weighted_sum",
    "minivlmrl.reward_functions.http_judge": "judge",
    "minivlmrl.algorithms.reward_model": "reward_model",
}
REWARDS: dict[str, str | Callable] = {
    name.partition("=")[0]: f"{file}:{name.rpartition('=')[2]}"
    for file in FILES
    for name in FILES[file].split()
}


def get_reward(name: str) -> Callable:
    """Find the function of a reward (ValueError: there is none, or it has no such option)."""
    written = re.fullmatch(r"((?:.*?:)?\w+)\((.*)\)", name, re.DOTALL)
    target, options = written.groups() if written else (name, "")
    found = REWARDS.get(target, target)
    if not callable(found) and ":" not in found:
        raise ValueError(f"unknown reward {target!r}; there are: {', '.join(sorted(REWARDS))}")
    with naming("reward"):
        function = found if callable(found) else load_name(found)
    if not callable(function):
        raise ValueError(f"reward {name}: it is {function!r:.80}, no function")
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"reward {name}: end its arguments with **columns")
    if not options.strip():
        return function
    return functools.partial(function, **_read_options(name, function, options))


def required_columns(names: Iterable[str]) -> list[str]:
    """List the columns that these rewards need: their named parameters without a default."""
    functions = [inspect.signature(get_reward(name)) for name in names]
    parameters = [p for function in functions for p in function.parameters.values()]
    needed = {p.name for p in parameters if p.kind != p.VAR_KEYWORD and p.default is p.empty}
    return sorted(needed - GIVEN)


def _read_options(name: str, function: Callable, text: str) -> dict[str, object]:
    """Read "tolerance=0.05, units=['cm']": a function's named parameters, as literals."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        good = isinstance(call.func, ast.Name) and not call.args
    except (SyntaxError, ValueError):
        good = False
    if not good:
        raise ValueError(f"reward {name}: its options must have the form name=value, name=value")
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.default is not p.empty]
    for option in options:
        if option not in known:
            there = ", ".join(known) or "none"
            raise ValueError(f"reward {name}: there is no option {option!r}; there are: {there}")
    return options
