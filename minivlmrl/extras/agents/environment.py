"""Load a user-defined tool environment, a Python class whose methods a model can call; see docs/agents.md."""

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Annotated, Any, Protocol

from minivlmrl.config.import_utils import resolve_object, with_options
from minivlmrl.config.parsing import build
from minivlmrl.data.chat_template import DEFAULT, WITH_TOOLS, ChatTemplate
from minivlmrl.data.processor import Processor
from minivlmrl.errors import UserError, error_context, pluralize, require, truncate
from minivlmrl.extras.agents.schema import json_schema, type_schema
from minivlmrl.extras.agents.tool_processor import ToolProcessor
from minivlmrl.rewards.registry import run_async


class Environment(Protocol):
    """Interface for tool environments: a class whose public methods a model can call as tools.

    Each completion gets its own instance. The methods `reset` (required), `get_reward` and `observe` are not tools. If
    a tool sets `done = True`, the completion ends. With `rewards: {environment: 1}`, get_reward() returns the reward: a
    number, a list with one number per turn (optional for the last turn), or None for no score. Attributes such as
    `max_tool_calls = 3` override the defaults in Settings.
    """

    def reset(self, **columns) -> None:
        """Prepare the environment for a completion. The keyword arguments are the columns of the dataset row."""


@dataclass
class Settings:
    # list the tools in the system message
    declare_tools: bool = True
    # maximum tool calls per completion; further calls are ignored
    max_tool_calls: Annotated[int, ">= 0"] = 8
    # time limit per tool call, in seconds
    max_tool_seconds: Annotated[float, "(0, inf)"] = 30.0
    # maximum characters per tool result
    max_tool_characters: Annotated[int, ">= 1"] = 2**16
    # maximum pixels per tool result, all its images together
    max_tool_pixels: Annotated[int, ">= 1"] = 2**26


def get_environment(name: str) -> Callable[[], Environment]:
    """Load the environment class named, for example, "my_tools.py:Turn(step=45)", and check its tools."""
    kind, options = resolve_object("sampling.environment", name, {})
    with error_context(f"sampling.environment {name}"):
        if not inspect.isclass(kind):  # make plain functions the tools of a new class
            functions = kind if isinstance(kind, list) else [kind]
            if not all(map(inspect.isfunction, functions)):
                raise UserError(f"expected a class, a function or a list of functions, but found {truncate(kind, 60)}")
            methods = {function.__name__: staticmethod(function) for function in functions}
            kind = type("Functions", (Stateless,), methods)
        make = with_options(kind, options)
        environment = make()
        settings_of(environment)
        tools = tools_of(environment)
        if not tools or not hasattr(environment, "reset"):
            raise UserError(
                "an environment needs a method reset(self, **columns) and at least one tool, a public method"
            )
        for tool in tools.values():
            arguments_of(tool)
    return make


class Stateless:
    """Base class for environments built from plain functions."""

    def reset(self, **columns):
        pass


def with_tools(processor: Processor, name: str) -> Processor:
    """Copy a processor, and list an environment's tools in its chat template."""
    environment = get_environment(name)()
    template = processor.template
    tools = tools_of(environment)
    if settings_of(environment).declare_tools:
        if template.text == DEFAULT:
            # Qwen2-VL and Qwen2.5-VL chat templates do not support tools
            template = ChatTemplate(WITH_TOOLS, name, processor.tokenizer.special_tokens, template.token_names)
            files = processor.tokenizer.files
            files.pop("chat_template.json", None)
            files["chat_template.jinja"] = WITH_TOOLS.encode()
        with error_context(f"sampling.environment {name}"):
            template = template.with_tools([json_schema(tool) for tool in tools.values()])
    return ToolProcessor(**vars(processor) | {"tools": (*tools,), "template": template})


def environment_reward(environments: Sequence[Any], turn_texts: list[list[str]], **columns) -> list[float | None]:
    """Return one reward per environment: the result of get_reward(), summed if it is a list."""
    rewards = []
    for environment, texts in zip(environments, turn_texts, strict=True):
        with error_context("reward environment"):
            reward = None if environment is None else run_async(environment.get_reward())
            if isinstance(reward, list):
                expected = (
                    f"one number for each of {pluralize(len(texts), 'turn')} (the last may lack it), or their sum"
                )
                require(len(texts) - len(reward) in (0, 1), "the result of get_reward", reward, expected)
                reward = sum(reward)
        rewards.append(reward)
    return rewards


def check_reward(name: str | None, rewards: Iterable[str]):
    """Raise UserError if the recipe uses the reward `environment` without a method get_reward, or the reverse."""
    has_reward = name is not None and hasattr(get_environment(name)(), "get_reward")
    if has_reward != ("environment" in rewards):
        raise UserError(
            f"rewards must contain environment if, and only if, sampling.environment ({name}) has a method get_reward"
        )


def settings_of(environment: Environment) -> Settings:
    """Read settings from environment attributes, such as max_tool_calls."""
    names = [field.name for field in fields(Settings) if hasattr(environment, field.name)]
    values = {name: getattr(environment, name) for name in names}
    return build(Settings, values, type(environment).__name__)


def tools_of(environment: Environment) -> dict[str, Callable]:
    """Return all environment tools as {name: bound method}."""
    tools = {}
    for name, member in inspect.getmembers(type(environment)):
        # unwrap class methods and cached methods, which are valid tools
        function = inspect.unwrap(getattr(member, "__func__", member))
        is_hidden = name[0] == "_" or name in ("reset", "get_reward", "observe")
        if inspect.isfunction(function) and not is_hidden:
            tools[name] = getattr(environment, name)
    return tools


def arguments_of(tool: Callable) -> type:
    """Create a dataclass with the parameters of a tool as fields, to validate arguments."""
    arguments = []
    with error_context(f"tool {tool.__name__}"):
        if inspect.iscoroutinefunction(tool) or inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
            raise UserError(
                "an async function or a generator returns no result; return it from asyncio.run, or a string"
            )
        hints = typing.get_type_hints(tool, include_extras=True)
        for name, parameter in inspect.signature(tool).parameters.items():
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if name not in hints or not by_name:
                raise UserError(f"the argument {name!r} must have a type hint and no / or *")
            type_schema(hints[name])
            field = [name, hints[name]]
            if parameter.default is not parameter.empty:
                field.append(parameter.default)
            arguments.append(field)
        return make_dataclass(tool.__name__, arguments)
