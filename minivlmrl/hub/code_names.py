"""Names of code: "name", "file.py:name" or "package.module:name", each maybe with options.

"name(option=1)" finds the object that is called `name` and gives it that option.
"""

import ast
import functools
import importlib
import inspect
import re
import runpy
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from minivlmrl.hub.recipe_values import naming, read_value


@functools.cache
def load_name(target: str) -> Any:
    """Import what a name says (ValueError: it cannot be; a user's file may raise anything)."""
    module, _, name = target.rpartition(":")
    try:
        if module.endswith(".py"):
            homes = Path(), *Path(__file__).resolve().parents[1:3]  # here, or ours: run/config.py
            found = filter(Path.is_file, (home / module for home in homes))
            return runpy.run_path(str(next(found, module)))[name]
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{target}: it cannot be loaded ({cause})") from error


def find_named(kind: str, text: str, table: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Find what "name(option=value)" says, in a table or a file; and its options, literals.

    Args:
        kind: what is named, for errors: "reward near(0.5): its options must have the form ...".
        table: name -> object, or the "package.module:name" of one.
    """
    written = re.fullmatch(r"((?:.*?:)?\w+)\((.*)\)", text, re.DOTALL)
    name, options = written.groups() if written else (text, "")
    found = table.get(name, name)
    if isinstance(found, str):
        if ":" not in found:
            there = ", ".join([*sorted(table), "file.py:name"])
            raise ValueError(f"unknown {kind} {name!r}; there are: {there}")
        with naming(kind):
            found = load_name(found)
    try:
        call = ast.parse(f"f({options})", mode="eval").body
        if call.args or not isinstance(call.func, ast.Name):
            raise SyntaxError
        return found, {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, AttributeError) as error:
        form = "its options must have the form name=value, name=value"
        raise ValueError(f"{kind} {text}: {form}") from error


def with_options(function: Callable, options: dict[str, Any]) -> Callable:
    """Give a function some of its parameters with a default; bounds of Annotated ones are checked.

    Raises:
        ValueError: there is no such parameter, or its value is not valid.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p.annotation for p in parameters if p.default is not p.empty}
    values = {}
    for name, value in options.items():
        if name not in known:
            there = ", ".join(known) or "none"
            raise ValueError(f"there is no option {name!r}; there are: {there}")
        bounded = typing.get_origin(known[name]) is Annotated
        values[name] = read_value(known[name], value, name, json=False) if bounded else value
    return functools.partial(function, **values) if values else function
