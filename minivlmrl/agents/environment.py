"""Environments by name, and their tools; docs/tools.md says what they are, and has one."""

import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Annotated

from minivlmrl.agents.schema import json_schema, type_schema
from minivlmrl.config.import_utils import find_named, with_options
from minivlmrl.config.parsing import build, naming
from minivlmrl.data.folder_template import DEFAULT, WITH_TOOLS, ChatTemplate
from minivlmrl.data.rows import Processor
from minivlmrl.rewards.registry import guarded


@dataclass
class Settings:
    """What the class of an environment may say otherwise, in fields of these names."""

    declare_tools: bool = True  # in the system text of a prompt, as its family's template does
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


def class_of(functions: object) -> type:
    """Make a class whose tools are these functions, or this one."""
    listed = functions if isinstance(functions, list) else [functions]
    if not all(map(inspect.isfunction, listed)):
        raise ValueError(f"it is {functions!r:.60}, no class, function or list of functions")
    members = {function.__name__: staticmethod(function) for function in listed}
    return type("Functions", (), {"reset": lambda self, **columns: None, **members})


def with_tools(processor: Processor, name: str | None) -> Processor:
    """Tell a processor the tools of an environment, if any, and its template to declare them."""
    if name is None:
        return processor
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


def earned(environments: list, turn_texts: list[list[str]], **columns) -> list[float | None]:
    """Ask the environment of each completion what it has earned, as TRL does.

    A list, of a number for each turn of a trajectory, is added up.
    """
    rewards = []
    for environment, texts in zip(environments, turn_texts, strict=True):
        with naming("reward environment"):
            reward = environment and guarded("get_reward", environment.get_reward)
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
    """Refuse a get_reward that no reward asks, and a reward without it (ValueError)."""
    has_reward = name is not None and hasattr(get_environment(name)(), "get_reward")
    if has_reward and "environment" not in rewards:
        raise ValueError(f"{name} has get_reward, which rewards: {{environment: 1}} asks")
    if "environment" in rewards and not has_reward:
        raise ValueError(f"{name} lacks get_reward, which rewards: {{environment: 1}} asks")


def settings_of(environment: object) -> Settings:
    """Read the settings of an environment (ValueError: one is not valid)."""
    values = {}
    for field in fields(Settings):
        if hasattr(environment, field.name):
            values[field.name] = getattr(environment, field.name)
    return build(Settings, values, type(environment).__name__)


def tools_of(environment: object) -> dict[str, Callable]:
    """List the tools of an environment by name: public methods but reset, get_reward, observe."""
    tools = {}
    for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
        if name not in ("reset", "get_reward", "observe") and name[0] != "_":
            tools[name] = getattr(environment, name)
    return tools


def arguments_of(tool: Callable) -> type:
    """Make a dataclass of a tool's arguments, for `build` (ValueError: a type is wrong)."""
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
