"""Environments by name, and their tools; docs/tools.md says what they are, and has one."""

import inspect
import typing
from collections.abc import Callable
from dataclasses import make_dataclass

from minivlmrl.hub.checker import find_named, naming, with_options


def get_environment(name: str) -> Callable[[], object]:
    """Find what makes an environment: a class, or functions that are its tools (ValueError: none).

    Options in brackets are arguments of the class: "my_tools.py:Turn(step=45)".
    """
    kind, options = find_named("sampling.environment", name, {})
    if not inspect.isclass(kind):
        functions = kind if isinstance(kind, list) else [kind]
        members = {function.__name__: staticmethod(function) for function in functions}
        kind = type("Functions", (), {"reset": lambda self, **columns: None, **members})
    with naming(f"sampling.environment {name}"):
        make = with_options(kind, options)
        for tool in tools_of(make()).values():
            arguments_of(tool)
    return make


def tools_of(environment: object) -> dict[str, Callable]:
    """List the tools of an environment by name: public methods but TRL's reset and get_reward."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    names = [name for name in names if name not in ("reset", "get_reward") and name[0] != "_"]
    return {name: getattr(environment, name) for name in names}


def arguments_of(tool: Callable) -> type:
    """Make a dataclass of a tool's arguments, for hub/checker.py (ValueError: one has no type)."""
    hints, fields = typing.get_type_hints(tool, include_extras=True), []
    for name, parameter in inspect.signature(tool).parameters.items():
        if name not in hints:
            raise ValueError(f"tool {tool.__name__}: its argument {name!r} needs a type")
        default = [] if parameter.default is parameter.empty else [parameter.default]
        fields.append((name, hints[name], *default))
    return make_dataclass(tool.__name__, fields)
