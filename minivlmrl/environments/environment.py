"""Environments by name, and their tools; docs/tools.md says what they are, and has one."""

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Annotated

from PIL.Image import Image

from minivlmrl.environments.schema import type_schema
from minivlmrl.hub.checker import build, find_named, naming, with_options
from minivlmrl.reward_functions.names import guarded
from minivlmrl.rows import Processor


@dataclass
class Limits:
    """What the class of an environment may say otherwise, in fields of these names."""

    max_tool_calls: Annotated[int, ">= 0"] = 8  # of a completion; more go unanswered
    max_tool_seconds: Annotated[float, "> 0"] = 30.0  # of a call
    max_tool_characters: Annotated[int, ">= 1"] = 2**16  # of an answer
    max_tool_pixels: Annotated[int, ">= 1"] = 2**26  # of an answer's pictures together


def get_environment(name: str) -> Callable[[], object]:
    """Find what makes an environment: a class, or functions that are its tools (ValueError: none).

    Options in brackets are arguments of the class: "my_tools.py:Turn(step=45)".
    """
    kind, options = find_named("sampling.environment", name, {})
    with naming(f"sampling.environment {name}"):
        if not inspect.isclass(kind):
            functions = kind if isinstance(kind, list) else [kind]
            if not all(map(inspect.isfunction, functions)):
                raise ValueError(f"it is {kind!r:.60}, no class, function or list of functions")
            members = {function.__name__: staticmethod(function) for function in functions}
            kind = type("Functions", (), {"reset": lambda self, **columns: None, **members})
        make = with_options(kind, options)
        environment = guarded("__init__", make)
        limits_of(environment)
        tools = tools_of(environment)
        if not tools or not hasattr(environment, "reset"):
            raise ValueError("it needs reset(self, **columns), and tools: other public methods")
        for tool in tools.values():
            arguments_of(tool)
    return make


def with_tools(processor: Processor, name: str) -> Processor:
    """Tell a processor the tools of an environment: their answers are not demonstrated."""
    return replace(processor, tools=(*tools_of(get_environment(name)()),))


def limits_of(environment: object) -> Limits:
    """Read the limits of an environment (ValueError: one is not valid)."""
    names = [field.name for field in fields(Limits) if hasattr(environment, field.name)]
    values = {name: getattr(environment, name) for name in names}
    return build(Limits, values, type(environment).__name__)


def tools_of(environment: object) -> dict[str, Callable]:
    """List the tools of an environment by name: public methods but TRL's reset and get_reward."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    names = [name for name in names if name not in ("reset", "get_reward") and name[0] != "_"]
    return {name: getattr(environment, name) for name in names}


def arguments_of(tool: Callable) -> type:
    """Make a dataclass of a tool's arguments, for hub/checker.py (ValueError: a type is wrong)."""
    with naming(f"tool {tool.__name__}"):
        hints, arguments = guarded("a type", typing.get_type_hints, tool, include_extras=True), []
        for name, parameter in inspect.signature(tool).parameters.items():
            if name not in hints:
                raise ValueError(f"its argument {name!r} needs a type")
            type_schema(hints[name])
            default = [] if parameter.default is parameter.empty else [parameter.default]
            arguments.append((name, hints[name], *default))
        return make_dataclass(tool.__name__, arguments)


def copied(value: object) -> object:
    """Copy lists and dicts in a value, for one completion; a picture's pixels when it is changed."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, Image):
        value.load()
        value = value._new(value.im)
        value.readonly = 1  # Pillow copies it before it writes
    return value
