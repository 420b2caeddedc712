"""Parse tool calls, run the tools, and render results as text.

Formats: tags with the tool name, such as <zoom>1, 2</zoom>, and Qwen's <tool_call>.
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
from minivlmrl.errors import UserError, error_context, pluralize, require, truncate
from minivlmrl.extras.agents.environment import Environment, Settings, arguments_of, get_environment, settings_of
from minivlmrl.json_files import parse_json

# Python constants in Qwen3.5's tool calls -> JSON
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{8,}")  # memory address, such as 0x7f3a91c0


# (tool name, text between the tags); Qwen's <tool_call> has an empty name
Call = tuple[str, str]
# image from a tool, patch grid (frames, rows, columns)
Picture = tuple[Image, tuple[int, int, int]]


# exceptions that do not end the run: the model reads the message as the result
FAILURES = Exception, SystemExit, Overtime


def find_calls(text: str, tools: Collection[str], ended: bool) -> list[Call]:
    """Find tool calls in the policy's text since the last result.

    <zoom>1, 2</zoom> is found as soon as its tag is closed. In Qwen's format, a turn may have several calls, found when
    it has ended.

    Returns:
        calls in text order; a call such as <zoom>1, 2</zoom> is always the only one
    """
    begins = {}  # {tool name: start of its arguments in the text}
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
    """Run one tool call, and return its result as parts of a chat message.

    If it fails or the result is too large, the model reads "error: ...".

    Args:
        name, inside: see Call.
        processor: encodes images in the result.

    Returns:
        message parts, images with their grids, whether the call succeeded
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
    except FAILURES as error:  # the model reads the message as the result
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
    """Remove memory addresses, so error messages are the same in every run."""
    return ADDRESS.sub("0x", text)


def grid_of(image: Image, image_processor: ImageProcessor) -> tuple[int, int, int]:
    """Compute an image's patch grid (frames, rows, columns), without cutting patches."""
    width, height = to_rgb(image).size  # raises if the image cannot be decoded
    height, width = smart_resize(
        height, width, image_processor.factor, image_processor.min_pixels, image_processor.max_pixels
    )
    return 1, height // image_processor.patch_size, width // image_processor.patch_size


def begin(make: Callable[[], Environment], columns: dict) -> Environment:
    """Construct an environment, and call `reset` with the columns of a row."""
    environment = make()
    text = call_method(environment, "reset", **columns)
    if text is not None:
        raise UserError(
            f"reset returned {truncate(text, 40)}, but it must return None; put text for the model into the row's "
            "prompt"
        )
    return environment


def begin_with_row(name: str, row: Row) -> Environment:
    columns = {"images": [*row.images], "extents": [x.size for x in row.images]}
    with error_context(f"{row.where or 'the first row'}: sampling.environment {name}"):
        return begin(get_environment(name), row.columns | columns | {"prompt": row.messages})


def call_method(environment: Environment, name: str, /, *arguments, **columns):
    """Call an environment method that is no tool, such as `reset` or `observe`."""
    try:
        with time_limit(settings_of(environment).max_tool_seconds):
            return getattr(environment, name)(*arguments, **columns)
    except Overtime as error:
        raise UserError(f"{name}: {error}") from error


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
    """Raise ValueError for NaN and Infinity, which Python's JSON parser accepts."""
    raise UserError(f"{name} is not a JSON number")


def check_values(value, name: str):
    """Raise ValueError if an argument has an infinite number or half of a surrogate pair.

    An infinite number in an environment could make get_reward fail later and end the run.
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
            raise UserError(
                f"{name}: {value!a:.60} is not valid Unicode; it contains half of a surrogate pair"
            ) from error


def read_values(name: str, inside: str, tools: dict[str, Callable]) -> dict:
    """Parse arguments between tags, such as `1, "cat"`, in parameter order."""
    expected = fields(arguments_of(tools[name]))
    values = [inside.strip()]
    if [field.type for field in expected] != [str]:
        with suppress(ValueError):
            values = strict_json(f"[{inside}]")
    if len(values) > len(expected):
        raise UserError(f"{name} takes {pluralize(len(expected), 'argument')}, not {len(values)}")
    return {field.name: value for field, value in zip(expected, values, strict=False)}


def read_call(inside: str, tools: dict[str, Callable]) -> tuple[str, dict]:
    """Parse a call in Qwen's <tool_call> format; return tool name and arguments."""
    written_call = read_parameters(inside, tools) or strict_json(inside)
    if not isinstance(written_call, dict) or not isinstance(written_call.get("name"), str):
        raise UserError('a tool call must have the form {"name": ..., "arguments": {...}}')
    if written_call["name"] not in tools:
        raise UserError(f"there is no tool {written_call['name']!r}; the tools are {', '.join(tools)}")
    return written_call["name"], written_call.get("arguments", {})


def read_parameters(inside: str, tools: dict[str, Callable]) -> dict | None:
    """Parse a call in Qwen3.5's <function=...> format; None for any other."""
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
    """Parse an argument in Qwen3.5's format: strings without quotes, other values as JSON.

    Example: for int | str, the text 7 is a number; 7.5, seven and "7" (with its quotes) are strings.
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
    return value  # wrong type: reported by validation


def part(result) -> dict:
    """Convert a tool result, such as a PIL image or a message part in TRL's format, to a chat message part."""
    kind = part_kind(result)
    shown = result.get("image") if kind == "image" else result
    if isinstance(shown, Image):
        return {"type": "image", "image": shown}
    text = result["text"] if kind == "text" else str(result)
    return {"type": "text", "text": valid_text(text)}


def valid_text(value: Any) -> Any:
    """Replace lone surrogates with "?", also in nested lists and dicts: UTF-8 cannot encode them."""
    if isinstance(value, list):
        return [valid_text(item) for item in value]
    if isinstance(value, dict):
        return {key: valid_text(item) for key, item in value.items()}
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def turn_opening(processor: Processor) -> list[str]:
    """Return what the chat template writes between the end of a user turn and the assistant text."""
    lay = render if processor.template is None else processor.template.render
    pieces = lay([{"role": "user", "content": "?"}])
    last_end = len(pieces) - pieces[::-1].index(END)
    return pieces[last_end:]


def render_answers(answers: list[list[dict]], opening: Sequence[str] = ()) -> list[str]:
    """Render tool results as text pieces.

    Args:
        answers: message parts per result.
        opening: text before the next assistant turn, after the results in a user turn; see `turn_opening`. If empty,
            there must be one result: <result>...</result> inside the policy's turn.
    """
    if not opening:
        parts = [p if "image" in p else part(f"<result>{p['text']}</result>") for p in answers[0]]
        return join_text(render_message({"role": "user", "content": parts})[2:-2])
    parts = []
    for answer_parts in answers:
        parts += [part("\n<tool_response>\n"), *answer_parts, part("\n</tool_response>")]
    start, role, first, *inside, _ = render_message({"role": "user", "content": parts})
    return join_text(["\n", start, role, first.removeprefix("\n"), *inside, *opening])
