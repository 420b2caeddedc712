"""Objects by name: "package.module:name" or "file.py:name"; options: "number(tolerance=0.05)"."""

import ast
import functools
import importlib
import inspect
import re
import runpy
from collections.abc import Callable


@functools.cache
def load_name(target: str):
    """Import what a name says (ValueError: it cannot be; a user's file may raise anything)."""
    module, _, name = target.rpartition(":")
    try:
        if module.endswith(".py"):
            return runpy.run_path(module)[name]
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{target}: it cannot be loaded ({cause})") from error


def with_options(kind: str, name: str, find: Callable[[str], Callable]) -> Callable:
    """Find the function of a name, with the options in its brackets as arguments.

    Args:
        kind: what it is, for errors: "reward number(tolerence=1): there is no option ...".
        find: name without brackets -> function; its parameters with a default are the options.
    """
    written = re.fullmatch(r"((?:.*?:)?\w+)\((.*)\)", name, re.DOTALL)
    function = find(written[1] if written else name)
    if not written or not written[2].strip():
        return function
    try:
        call = ast.parse(f"f({written[2]})", mode="eval").body
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        valid = isinstance(call.func, ast.Name) and not call.args
    except (SyntaxError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"{kind} {name}: its options must have the form name=value, name=value")
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.default is not p.empty]
    if unknown := [option for option in options if option not in known]:
        there = ", ".join(known) or "none"
        raise ValueError(f"{kind} {name}: there is no option {unknown[0]!r}; there are: {there}")
    return functools.partial(function, **options)
