"""Parse the tool calls in generated text, run the tools, and render their results as text.

Tool calls have two formats: <zoom>1, 2</zoom>, and Qwen's <tool_call>...</tool_call>.
"""

import json
import re
import typing
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from PIL.Image import Image
from torch import Tensor

from minivlmrl.config.parsing import build, read_value
from minivlmrl.data.chat_template import END, START, VISION, join_text
from minivlmrl.data.image import Grid
from minivlmrl.data.messages import part_kind
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_files import map_nested
from minivlmrl.data.rows import Row
from minivlmrl.errors import UserError, error_context, pluralize, require, truncate
from minivlmrl.extras.agents.environment import Environment, Settings, arguments_of, get_environment, settings_of
from minivlmrl.extras.agents.time_limit import Overtime, time_limit
from minivlmrl.json_files import parse_json

# Python constants in Qwen3.5 tool calls, and their JSON equivalents
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{8,}")  # memory address, such as 0x7f3a91c0
# (tool name, text between the tags); for Qwen's <tool_call>, the name is "" and the text contains it
Call = tuple[str, str]
# (image returned by a tool, its patches, its patch grid)
Picture = tuple[Image, Tensor, Grid]
# exceptions in a tool do not end the run: the model reads the message as tool result
FAILURES = Exception, SystemExit, Overtime


def find_calls(text: str, tools: Collection[str], ended: bool) -> list[Call]:
    """Find tool calls, ready to run, in the text since the last tool result.

    A call such as <zoom>1, 2</zoom> runs as soon as its tag is closed, so only the first is returned. Calls in Qwen's
    format run together when the turn has ended.
    """
    begins = {}  # {tool name: where its arguments begin in `text`}
    for tag in re.finditer(rf"<(/?)({'|'.join(tools)})>", text):
        name = tag[2]
        if not tag[1]:
            begins[name] = tag.end()
        elif name in begins:
            return [(name, text[begins[name] : tag.start()])]
    calls = [part.partition("<tool_call>") for part in text.split("</tool_call>")[:-1]]
    return [("", inside) for _, tag, inside in calls if tag and ended]


def answer_call(
    tools: dict[str, Callable], name: str, inside: str, processor: Processor, settings: Settings
) -> tuple[list[dict], list[Picture], bool]:
    """Run a tool call. If the tool fails or returns too much, the result is the text "error: ...".

    Args:
        name, inside: tool name, and tool arguments as text.
    Returns:
        message parts for the result, images with patches and grids, and whether the call succeeded
    """
    try:
        with time_limit(settings.max_tool_seconds):
            result = call(tools, name, inside)
            results = result if isinstance(result, list) else [result]
            parts = [part(item) for item in results]
        images = [shown["image"] for shown in parts if "image" in shown]
        sizes = {
            "characters": sum(len(shown.get("text", "")) for shown in parts),
            "pixels": sum(image.width * image.height for image in images),
        }
        for unit, size in sizes.items():
            limit = getattr(settings, f"max_tool_{unit}")
            require(size <= limit, f"the answer's number of {unit}", size, f"{limit} or less")
        pictures = [(image, *processor.image_processor(image)) for image in images]
        return parts, pictures, True
    except FAILURES as error:
        # hide memory addresses: they differ between runs
        text = f"error: {ADDRESS.sub('0x', str(error)) or type(error).__name__}"
        return [part(text[: settings.max_tool_characters])], [], False


def begin(make: Callable[[], Environment], columns: dict) -> Environment:
    """Create an environment for a completion, and reset it."""
    environment = make()
    text = call_method(environment, "reset", **columns)
    if text is not None:
        raise UserError(
            f"reset returned {truncate(text, 40)}, but it must return None; put text for the model into the row's "
            "prompt"
        )
    return environment


def begin_with_row(name: str, row: Row) -> Environment:
    """Create an environment for a dataset row, to test it before training."""
    columns = {"images": [*row.images], "extents": [x.size for x in row.images]}
    with error_context(f"{row.where or 'the first row'}: sampling.environment {name}"):
        return begin(get_environment(name), row.columns | columns | {"prompt": row.messages})


def call_method(environment: Environment, name: str, /, *arguments, **columns):
    """Call an environment method, with the time limit for tool calls."""
    try:
        with time_limit(settings_of(environment).max_tool_seconds):
            return getattr(environment, name)(*arguments, **columns)
    except Overtime as error:
        raise UserError(f"{name}: {error}") from error


def call(tools: dict[str, Callable], name: str, inside: str):
    """Parse and validate tool call arguments, and run the tool."""
    if name:
        arguments = read_values(name, inside, tools)
    else:
        written = read_parameters(inside, tools) or parse_json(inside, json.loads)
        if not isinstance(written, dict) or not isinstance(written.get("name"), str):
            raise UserError('a tool call must have the form {"name": ..., "arguments": {...}}')
        name = written["name"]
        arguments = written.get("arguments", {})
        if name not in tools:
            raise UserError(f"there is no tool {name!r}; the tools are {', '.join(tools)}")
    values = vars(build(arguments_of(tools[name]), arguments, name))
    # reject infinities and lone surrogates: they could crash get_reward
    with error_context(name):
        json.dumps(values, allow_nan=False, ensure_ascii=False, default=str).encode()
    return tools[name](**values)


def read_values(name: str, inside: str, tools: dict[str, Callable]) -> dict:
    """Parse positional arguments, such as `1, "cat"`, and return them by parameter name."""
    expected = fields(arguments_of(tools[name]))
    values = [inside.strip()]
    if [field.type for field in expected] != [str]:
        with suppress(ValueError):
            values = parse_json(f"[{inside}]", json.loads)
    if len(values) > len(expected):
        raise UserError(f"{name} takes {pluralize(len(expected), 'argument')}, not {len(values)}")
    return {field.name: value for field, value in zip(expected, values, strict=False)}


def read_parameters(inside: str, tools: dict[str, Callable]) -> dict | None:
    """Parse a tool call in Qwen3.5's format <function=...>; return None for other formats."""
    before, tag, call = inside.partition("<function=")
    if before.strip() or not tag:
        return None
    name, _, body = call.partition(">")
    hints = typing.get_type_hints(tools[name]) if name in tools else {}
    arguments = {}
    for parameter in body.split("</parameter>")[:-1]:
        key, _, value = parameter.partition("<parameter=")[2].partition(">")
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = read_parameter(hints.get(key, str), value)
    return {"name": name, "arguments": arguments}


def read_parameter(hint, text: str):
    """Parse an argument in Qwen3.5's format: JSON with unquoted strings.

    Example: for the type int | str, 7 becomes an integer, but 7.5, seven and "7" (in quotes) stay strings.
    """
    value = text
    with suppress(ValueError):
        value = parse_json(CONSTANTS.get(text, text), json.loads)
    if isinstance(value, str):
        return text
    for choice in (value, text):
        with suppress(ValueError):
            read_value(hint, choice, "", json=True)
            return choice
    return value  # wrong type: `build` raises the error later


def part(result) -> dict:
    """Convert a tool result, such as a string or a PIL image, to a chat message part."""
    kind = part_kind(result)
    shown = result.get("image") if kind == "image" else result
    if isinstance(shown, Image):
        return {"type": "image", "image": shown}
    text = result["text"] if kind == "text" else str(result)
    return {"type": "text", "text": valid_text(text)}


def valid_text(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 cannot encode, with "?"."""
    return map_nested(value, lambda text: text.encode(errors="replace").decode())


def turn_opening(processor: Processor) -> list[str]:
    """Return the text that the chat template inserts between a user turn and the assistant's answer."""
    pieces = processor.template.render([{"role": "user", "content": "?"}])
    last_end = len(pieces) - pieces[::-1].index(END)
    return pieces[last_end:]


def render_answers(answers: list[list[dict]], opening: Sequence[str] = ()) -> list[str]:
    """Render tool results as text to append to the completion.

    Args:
        answers: message parts, one list per tool result.
        opening: text from turn_opening(), which begins the next assistant turn. Without it, tool results stay in the
            current assistant turn, in <result> tags.
    """
    text = "<result>{}</result>"
    start = ""
    end = ""
    if opening:
        text = "{}"
        start = "\n<tool_response>\n"
        end = "\n</tool_response>"
    pieces = []
    for parts in answers:
        pieces.append(start)
        for shown in parts:
            pieces += VISION if "image" in shown else [text.format(shown["text"])]
        pieces.append(end)
    if opening:
        pieces = ["\n", START, "user", *pieces, END, *opening]
    return join_text(pieces)
