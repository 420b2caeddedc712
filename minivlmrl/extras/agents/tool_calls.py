"""Parse the tool calls in a completion, execute the tools, and render their results as text.

A tool call has one of two formats: tags with the tool's name, such as <zoom>1, 2</zoom>, or Qwen's <tool_call>.
"""

import json
import math
import re
import typing
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

from PIL.Image import Image

from minivlmrl.config.parsing import build, read_value
from minivlmrl.config.time_limit import Overtime, time_limit
from minivlmrl.data.chat_template import END, join_text, render, render_message
from minivlmrl.data.image import ImageProcessor, smart_resize, to_rgb
from minivlmrl.data.messages import part_kind
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row
from minivlmrl.errors import error_context, pluralize, require, truncate
from minivlmrl.extras.agents.environment import Environment, Settings, arguments_of, get_environment, settings_of
from minivlmrl.json_files import parse_json

# Qwen3.5 writes Python constants in its tool calls; this dict translates them to JSON.
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{8,}")  # a memory address, such as 0x7f3a91c0


# a tool call: the tool's name and the text between the tags; the name is empty in Qwen's <tool_call> format
Call = tuple[str, str]
# an image that a tool returned, and the image's patch grid (frames, rows, columns)
Picture = tuple[Image, tuple[int, int, int]]


# exceptions in a tool that do not end the run; the model reads their messages as the tool's result
FAILURES = Exception, SystemExit, Overtime


def find_calls(text: str, tools: Collection[str], ended: bool) -> list[Call]:
    """Find the tool calls in the text that the policy wrote since the last tool result.

    A tool call such as <zoom>1, 2</zoom> is found as soon as the model closes the tag. In Qwen's format, one turn may
    contain several tool calls, which are found when the turn has ended.

    Returns:
        The calls in text order. A call such as <zoom>1, 2</zoom> is the only one in the list.
    """
    begins = {}  # {tool name: position in the text where its arguments begin}
    for tag in re.finditer(rf"<(/?)({'|'.join(tools)})>", text):
        name = tag[2]
        if not tag[1]:
            begins[name] = tag.end()
        elif name in begins:
            return [(name, text[begins[name] : tag.start()])]
    parts = text.split("</tool_call>")[:-1] if ended else []
    calls = [part.partition("<tool_call>") for part in parts]
    return [("", inside) for _, tag, inside in calls if tag]


def answer_call(
    tools: dict[str, Callable], name: str, inside: str, processor: Processor, settings: Settings
) -> tuple[list[dict], list[Picture], bool]:
    """Execute one tool call, and return the result as parts of a chat message.

    If a tool call fails or its result is too large, the model reads the text "error: ..." as the result.

    Args:
        name, inside: the call; see Call.
        processor: processor that will encode the images in the result.

    Returns:
        The message parts, the images with their grids, and whether the call succeeded.
    """
    try:
        with time_limit(settings.max_tool_seconds):
            result = call(tools, name, inside)
            results = result if isinstance(result, list) else [result]
            parts = [part(item) for item in results]
        images = [shown["image"] for shown in parts if "image" in shown]
        check_limits(parts, images, settings)
        pictures = [(image, grid_of(image, processor.image_processor)) for image in images]
        return parts, pictures, True
    except FAILURES as error:  # the error message becomes the result, which the model reads
        text = f"error: {without_addresses(str(error)) or type(error).__name__}"
        return [part(text[: settings.max_tool_characters])], [], False


def check_limits(parts: list[dict], images: list[Image], settings: Settings):
    sizes = {
        "characters": sum(len(shown.get("text", "")) for shown in parts),
        "pixels": sum(image.width * image.height for image in images),
    }
    for unit, size in sizes.items():
        limit = getattr(settings, f"max_tool_{unit}")
        require(size <= limit, f"the answer's number of {unit}", size, f"{limit} or less")


def without_addresses(text: str) -> str:
    """Remove memory addresses, so that the model reads the same error message in each run."""
    return ADDRESS.sub("0x", text)


def grid_of(image: Image, image_processor: ImageProcessor) -> tuple[int, int, int]:
    """Compute the size (frames, rows, columns) of an image's patch grid, without cutting the image into patches."""
    width, height = to_rgb(image).size  # raises an exception if the image cannot be decoded
    height, width = smart_resize(
        height, width, image_processor.factor, image_processor.min_pixels, image_processor.max_pixels
    )
    return 1, height // image_processor.patch_size, width // image_processor.patch_size


def begin(make: Callable[[], Environment], columns: dict) -> Environment:
    """Construct a tool environment, and call its method `reset` with the columns of a row."""
    environment = make()
    text = call_method(environment, "reset", **columns)
    if text is not None:
        raise ValueError(
            f"reset returned {truncate(text, 40)}, but it must return None; put text for the model into the row's "
            "prompt"
        )
    return environment


def begin_with_row(name: str, row: Row) -> Environment:
    columns = {"images": [*row.images], "extents": [x.size for x in row.images]}
    with error_context(f"{row.where or 'the first row'}: sampling.environment {name}"):
        return begin(get_environment(name), row.columns | columns | {"prompt": row.messages})


def call_method(environment: Environment, name: str, /, *arguments, **columns):
    """Call an environment method that is not a tool, for example `reset` or `observe`."""
    try:
        with time_limit(settings_of(environment).max_tool_seconds):
            return getattr(environment, name)(*arguments, **columns)
    except Overtime as error:
        raise ValueError(f"{name}: {error}") from error


def call(tools: dict[str, Callable], name: str, inside: str):
    if name:
        arguments = read_values(name, inside, tools)
    else:
        name, arguments = read_call(inside, tools)
    values = vars(build(arguments_of(tools[name]), arguments, name))
    check_values(values, name)
    return tools[name](**values)


def strict_json(text: str):
    return parse_json(text, json.JSONDecoder(parse_constant=refuse_constant).decode)


def refuse_constant(name: str):
    """Raise ValueError for NaN and Infinity in JSON, which Python's JSON parser would accept."""
    raise ValueError(f"{name} is not a JSON number")


def check_values(value, name: str):
    """Raise ValueError if an argument of a tool call has an infinite number or half of a surrogate pair.

    If an environment stored an infinite number, get_reward could fail later and end the run.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_values(key, name)
            check_values(item, f"{name}: {key}")
    elif isinstance(value, list | tuple):
        for item in value:
            check_values(item, name)
    elif isinstance(value, float):
        require(math.isfinite(value), name, value, "finite")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}: {value!a:.60} is not valid Unicode; it contains half of a surrogate pair"
            ) from error


def read_values(name: str, inside: str, tools: dict[str, Callable]) -> dict:
    """Parse the arguments between a tool's tags, for example `1, "cat"`, in the order of the tool's parameters."""
    expected = fields(arguments_of(tools[name]))
    values = [inside.strip()]
    if [field.type for field in expected] != [str]:
        with suppress(ValueError):
            values = strict_json(f"[{inside}]")
    if len(values) > len(expected):
        raise ValueError(f"{name} takes {pluralize(len(expected), 'argument')}, not {len(values)}")
    return {field.name: value for field, value in zip(expected, values, strict=False)}


def read_call(inside: str, tools: dict[str, Callable]) -> tuple[str, dict]:
    """Parse a tool call in Qwen's <tool_call> format, and return the tool's name and arguments."""
    written_call = read_parameters(inside, tools) or strict_json(inside)
    if not isinstance(written_call, dict) or not isinstance(written_call.get("name"), str):
        raise ValueError('a tool call must have the form {"name": ..., "arguments": {...}}')
    if written_call["name"] not in tools:
        raise ValueError(f"there is no tool {written_call['name']!r}; the tools are {', '.join(tools)}")
    return written_call["name"], written_call.get("arguments", {})


def read_parameters(inside: str, tools: dict[str, Callable]) -> dict | None:
    """Parse a tool call in Qwen3.5's <function=...> format, or return None for any other format."""
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
    """Parse one argument of a tool call in Qwen3.5's format, where strings have no quotes and other values are JSON.

    Example: for the type hint int | str, the text 7 is a number, while 7.5, seven and "7" (with its quotes) are
    strings.
    """
    value = text
    with suppress(ValueError):
        value = strict_json(CONSTANTS.get(text, text))
    if isinstance(value, str):
        return text
    for choice in (value, text):
        with suppress(ValueError):
            read_value(hint, choice, "", json=True)
            return choice
    return value  # has the wrong type, which is reported when the call is validated


def part(result) -> dict:
    """Convert a tool's result, such as a PIL image or a message part in TRL's format, to a part of a chat message."""
    kind = part_kind(result)
    shown = result.get("image") if kind == "image" else result
    if isinstance(shown, Image):
        return {"type": "image", "image": shown}
    text = result["text"] if kind == "text" else str(result)
    return {"type": "text", "text": valid_text(text)}


def valid_text(value: Any) -> Any:
    """Replace lone surrogates with "?" in a text or in nested lists and dicts, because UTF-8 cannot encode them."""
    if isinstance(value, list):
        return [valid_text(item) for item in value]
    if isinstance(value, dict):
        return {key: valid_text(item) for key, item in value.items()}
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def turn_opening(processor: Processor) -> list[str]:
    """Return what the chat template writes between the end of a user's turn and the assistant's text."""
    lay = render if processor.template is None else processor.template.render
    pieces = lay([{"role": "user", "content": "?"}])
    last_end = len(pieces) - pieces[::-1].index(END)
    return pieces[last_end:]


def render_answers(answers: list[list[dict]], opening: Sequence[str] = ()) -> list[str]:
    """Render tool results as text pieces.

    Args:
        answers: each result's message parts.
        opening: text pieces that open the next assistant turn; see `turn_opening`. If it is empty, there must be one
            result, which is rendered as <result>...</result> inside the policy's turn. Otherwise the results are
            rendered in a user turn, and `opening` follows it.
    """
    if not opening:
        parts = [p if "image" in p else part(f"<result>{p['text']}</result>") for p in answers[0]]
        return join_text(render_message({"role": "user", "content": parts})[2:-2])
    parts = []
    for answer_parts in answers:
        parts += [part("\n<tool_response>\n"), *answer_parts, part("\n</tool_response>")]
    start, role, first, *inside, _ = render_message({"role": "user", "content": parts})
    return join_text(["\n", start, role, first.removeprefix("\n"), *inside, *opening])
