"""Find environments by name, and read their tools and settings; docs/tools.md has an example."""

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Annotated, Protocol

from minivlmrl.agents.schema import json_schema, type_schema
from minivlmrl.config.import_utils import find_named, guarded, with_options
from minivlmrl.config.parsing import build, naming
from minivlmrl.data.folder_template import DEFAULT, WITH_TOOLS, ChatTemplate
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Environment


class RewardingEnvironment(Environment, Protocol):
    """An environment that rewards its completion, for `rewards: {environment: 1}`."""

    def get_reward(self) -> float | list[float] | None:
        """Return the reward, or one for each turn of a trajectory; None: it cannot be judged."""


@dataclass
class Settings:
    """Settings that the class of an environment may change, in attributes of these names."""

    declare_tools: bool = True  # in the system text of a prompt, as its family's template does
    max_tool_calls: Annotated[int, ">= 0"] = 8  # calls of a completion; further ones get no answer
    max_tool_seconds: Annotated[float, "> 0"] = 30.0  # seconds of a call
    max_tool_characters: Annotated[int, ">= 1"] = 2**16  # characters of an answer
    max_tool_pixels: Annotated[int, ">= 1"] = 2**26  # pixels of all pictures of an answer


def get_environment(name: str) -> Callable[[], Environment]:
    """Find the constructor of an environment: its class, or one made of functions, its tools.

    Options in brackets are arguments of the class: "my_tools.py:Turn(step=45)".

    Raises:
        ValueError: there is none of this name, or it is not an environment.
    """
    kind, options = find_named("sampling.environment", name, {})
    with naming(f"sampling.environment {name}"):
        if not inspect.isclass(kind):
            kind = class_of(kind)
        make = with_options(kind, options)
        environment = guarded("__init__", make)
        settings_of(environment)
        tools = tools_of(environment)
        if not tools or not hasattr(environment, "reset"):
            raise ValueError("it needs reset(self, **columns), and tools: other public methods")
        for tool in tools.values():
            arguments_of(tool)
    return make


class Stateless:
    """The base class of environments that are made of functions."""

    def reset(self, **columns):
        pass


def class_of(functions: Callable | list[Callable]) -> type[Environment]:
    """Make a class of an environment whose tools are these functions, or this one."""
    listed = functions if isinstance(functions, list) else [functions]
    members = {}
    for function in listed:
        if not inspect.isfunction(function):
            raise ValueError(f"it is {functions!r:.60}, no class, function or list of functions")
        members[function.__name__] = staticmethod(function)
    return type("Functions", (Stateless,), members)


def with_tools(processor: Processor, name: str) -> Processor:
    """Return a processor that knows an environment's tools, with a template that declares them."""
    environment = get_environment(name)()
    template = processor.template
    tools = tools_of(environment)
    if settings_of(environment).declare_tools:
        if template is None or template.text == DEFAULT:  # of Qwen2-VL and Qwen2.5-VL
            values = template.token_names if template else {}
            template = ChatTemplate(WITH_TOOLS, name, processor.tokenizer.special_tokens, values)
            files = processor.tokenizer.files  # an export has it too
            files.pop("chat_template.json", None)
            files["chat_template.jinja"] = WITH_TOOLS.encode()
        with naming(f"sampling.environment {name}"):
            template = template.declaring([json_schema(tool) for tool in tools.values()])
    return replace(processor, tools=(*tools,), template=template)


def environment_reward(
    environments: Sequence[RewardingEnvironment | None], turn_texts: list[list[str]], **columns
) -> list[float | None]:
    """Reward each completion with its environment's get_reward, as TRL does.

    A get_reward may return a list with a number for each turn of a trajectory; they are added up.
    """
    rewards = []
    for environment, texts in zip(environments, turn_texts, strict=True):
        with naming("reward environment"):
            reward = None
            if environment is not None:
                reward = guarded("get_reward", environment.get_reward)
            if isinstance(reward, list):
                if len(reward) != len(texts):
                    raise ValueError(
                        f"get_reward returned {len(reward)} numbers for {len(texts)} turns; "
                        "return one for each turn, or one number"
                    )
                reward = sum(reward)
        rewards.append(reward)
    return rewards


def check_reward(name: str | None, rewards: Iterable[str]):
    """Raise ValueError if get_reward is not among the rewards, or is and does not exist."""
    has_reward = name is not None and hasattr(get_environment(name)(), "get_reward")
    if has_reward and "environment" not in rewards:
        raise ValueError(f"{name} has get_reward, which rewards: {{environment: 1}} asks")
    if "environment" in rewards and not has_reward:
        raise ValueError(f"{name} lacks get_reward, which rewards: {{environment: 1}} asks")


def settings_of(environment: Environment) -> Settings:
    """Return the settings of an environment (ValueError: a value is not valid)."""
    values = {}
    for field in fields(Settings):
        if hasattr(environment, field.name):
            values[field.name] = getattr(environment, field.name)
    return build(Settings, values, type(environment).__name__)


def tools_of(environment: Environment) -> dict[str, Callable]:
    """Return the tools by name: all public methods except reset, get_reward and observe."""
    tools = {}
    for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
        if name not in ("reset", "get_reward", "observe") and name[0] != "_":
            tools[name] = getattr(environment, name)
    return tools


def arguments_of(tool: Callable) -> type:
    """Make a dataclass of a tool's arguments, for `build` (ValueError: a type is not JSON's)."""
    arguments = []
    with naming(f"tool {tool.__name__}"):
        hints = guarded("a type", typing.get_type_hints, tool, include_extras=True)
        for name, parameter in inspect.signature(tool).parameters.items():
            if name not in hints:
                raise ValueError(f"its argument {name!r} needs a type")
            type_schema(hints[name])
            field = [name, hints[name]]
            if parameter.default is not parameter.empty:
                field.append(parameter.default)
            arguments.append(field)
        return make_dataclass(tool.__name__, arguments)
