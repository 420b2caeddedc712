"""Load a tool environment with its tools and settings; see docs/agents.md."""

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Annotated, Protocol

from minivlmrl.config.import_utils import resolve_object, with_options
from minivlmrl.config.parsing import build
from minivlmrl.data.folder_template import DEFAULT, WITH_TOOLS, ChatTemplate
from minivlmrl.data.processor import Processor
from minivlmrl.errors import UserError, error_context, pluralize, truncate
from minivlmrl.extras.agents.schema import json_schema, type_schema
from minivlmrl.extras.agents.tool_processor import ToolProcessor


class Environment(Protocol):
    """Tool environment, with the state of one completion.

    Public methods are tools, except `reset` (required), `get_reward` and `observe`. `done = True` ends the completion.
    Other attributes are settings, such as `max_tool_calls = 3`.
    """

    def reset(self, **columns) -> None:
        """Start a completion; arguments: columns of the row."""


class RewardingEnvironment(Environment, Protocol):
    """Tool environment that scores its completion, with `rewards: {environment: 1}`."""

    def get_reward(self) -> float | list[float] | None:
        """Return the reward, None if unknown, or a reward per turn; the last may be missing."""


@dataclass
class Settings:
    """Settings of a tool environment."""

    # declare the tools in the system message, as the chat template does
    declare_tools: bool = True
    # per completion; more are ignored
    max_tool_calls: Annotated[int, ">= 0"] = 8
    # per tool call
    max_tool_seconds: Annotated[float, "(0, inf)"] = 30.0
    # per tool result
    max_tool_characters: Annotated[int, ">= 1"] = 2**16
    # per tool result, all images together
    max_tool_pixels: Annotated[int, ">= 1"] = 2**26


def get_environment(name: str) -> Callable[[], Environment]:
    """Return the constructor for a name in a recipe: a class such as "my_tools.py:Turn(step=45)", or functions."""
    kind, options = resolve_object("sampling.environment", name, {})
    with error_context(f"sampling.environment {name}"):
        if not inspect.isclass(kind):
            kind = class_of(kind)
        make = with_options(kind, options)
        environment = make()
        settings_of(environment)
        tools = tools_of(environment)
        if not tools or not hasattr(environment, "reset"):
            raise UserError(
                "an environment needs a method reset(self, **columns) and at least one other "
                "public method, which is a tool"
            )
        for tool in tools.values():
            arguments_of(tool)
    return make


class Stateless:
    """Base of environments from functions."""

    def reset(self, **columns):
        pass


def class_of(functions: Callable | list[Callable]) -> type[Environment]:
    """Create an environment class from functions."""
    listed = functions if isinstance(functions, list) else [functions]
    members = {}
    for function in listed:
        if not inspect.isfunction(function):
            raise UserError(f"expected a class, a function or a list of functions, but found {truncate(functions, 60)}")
        members[function.__name__] = staticmethod(function)
    return type("Functions", (Stateless,), members)


def with_tools(processor: Processor, name: str) -> Processor:
    """Return a Processor whose chat template declares the tools of an environment."""
    environment = get_environment(name)()
    template = processor.template
    tools = tools_of(environment)
    if settings_of(environment).declare_tools:
        if template is None or template.text == DEFAULT:
            # templates of Qwen2-VL and Qwen2.5-VL cannot declare tools
            values = template.token_names if template else {}
            template = ChatTemplate(WITH_TOOLS, name, processor.tokenizer.special_tokens, values)
            # saved with the model
            files = processor.tokenizer.files
            files.pop("chat_template.json", None)
            files["chat_template.jinja"] = WITH_TOOLS.encode()
        with error_context(f"sampling.environment {name}"):
            template = template.with_tools([json_schema(tool) for tool in tools.values()])
    return ToolProcessor(**vars(processor) | {"tools": (*tools,), "template": template})


def environment_reward(
    environments: Sequence[RewardingEnvironment | None], turn_texts: list[list[str]], **columns
) -> list[float | None]:
    """Return get_reward per completion, as in TRL; rewards of turns are summed, None without an environment."""
    rewards = []
    for environment, texts in zip(environments, turn_texts, strict=True):
        with error_context("reward environment"):
            reward = None if environment is None else environment.get_reward()
            if isinstance(reward, list):
                if len(texts) - len(reward) not in (0, 1):
                    raise UserError(
                        f"get_reward returned {pluralize(len(reward), 'number')} for {pluralize(len(texts), 'turn')}; "
                        "return one number for each turn (the last turn may have none), or a single number"
                    )
                reward = sum(reward)
        rewards.append(reward)
    return rewards


def check_reward(name: str | None, rewards: Iterable[str]):
    """Check that a recipe has the reward "environment" if its environment has get_reward, and only then."""
    has_reward = name is not None and hasattr(get_environment(name)(), "get_reward")
    if has_reward and "environment" not in rewards:
        raise UserError(
            f"the environment {name} has a method get_reward, but the recipe does not use it; set "
            "rewards: {environment: 1}"
        )
    if "environment" in rewards and not has_reward:
        raise UserError(
            f"the recipe sets rewards: {{environment: 1}}, but sampling.environment ({name}) does "
            "not have a method get_reward; add the method or remove this reward"
        )


def settings_of(environment: Environment) -> Settings:
    """Read settings from the attributes of an environment, with defaults."""
    values = {}
    for field in fields(Settings):
        if hasattr(environment, field.name):
            values[field.name] = getattr(environment, field.name)
    return build(Settings, values, type(environment).__name__)


def tools_of(environment: Environment) -> dict[str, Callable]:
    """Return {name: bound method} with all tools."""
    tools = {}
    for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
        if name not in ("reset", "get_reward", "observe") and name[0] != "_":
            tools[name] = getattr(environment, name)
    return tools


def arguments_of(tool: Callable) -> type:
    """Create a dataclass to validate the arguments of a tool."""
    arguments = []
    with error_context(f"tool {tool.__name__}"):
        hints = typing.get_type_hints(tool, include_extras=True)
        for name, parameter in inspect.signature(tool).parameters.items():
            if name not in hints:
                raise UserError(f"the argument {name!r} does not have a type hint; add one")
            type_schema(hints[name])
            field = [name, hints[name]]
            if parameter.default is not parameter.empty:
                field.append(parameter.default)
            arguments.append(field)
        return make_dataclass(tool.__name__, arguments)
