"""Parse the tool calls that a policy writes, in tags or in Qwen's format, and answer them."""

import json
import re
import signal
import threading
import time
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields

from PIL.Image import Image

from minivlmrl.agents.environment import (
    Environment,
    Settings,
    arguments_of,
    get_environment,
    settings_of,
)
from minivlmrl.config.import_utils import guarded
from minivlmrl.config.parsing import build, naming, read_value, require
from minivlmrl.data.chat_template import END, join_text, layout_turn, render
from minivlmrl.data.image import ImageProcessor, smart_resize, to_rgb
from minivlmrl.data.messages import part_kind
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row

CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # Qwen3.5 writes Python's


Call = tuple[str, str]  # name of a tool, "" in Qwen's format; and the text inside of the call
Picture = tuple[Image, tuple[int, int, int]]  # and the image_grid_thw that it will have


class Overtime(BaseException):
    """A tool takes too long. It is not an Exception, because a tool may catch those."""


REPEATED = 0.01  # seconds after which a block that has caught Overtime is interrupted again
FAILURES = Exception, SystemExit, Overtime  # a tool may raise anything


def find_calls(text: str, tools: Collection[str], ended: bool) -> list[Call]:
    """Find the calls in the text since the last answer.

    A call in tags is found as soon as it is closed, calls in Qwen's format when the turn has ended.
    """
    begins = {}  # tool: where its arguments begin
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
    """Call a tool; return the parts of its answer, its pictures, and whether it succeeded.

    Raises:
        ValueError: the tool raised KeyboardInterrupt, which ends the run.
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
        return parts, [(image, grid_of(image, processor.image_processor)) for image in images], True
    except KeyboardInterrupt as error:
        raise ValueError(f"the tool {name or inside:.80} raised KeyboardInterrupt") from error
    except FAILURES as error:  # the model reads it
        text = f"error: {str(error) or type(error).__name__}"
        return [part(text[: settings.max_tool_characters])], [], False


def grid_of(image: Image, image_processor: ImageProcessor) -> tuple[int, int, int]:
    """Return the image_grid_thw that an image will have, before its patches are computed."""
    width, height = to_rgb(image).size  # raises for an image that cannot be read
    height, width = smart_resize(
        height,
        width,
        image_processor.factor,
        image_processor.min_pixels,
        image_processor.max_pixels,
    )
    return 1, height // image_processor.patch_size, width // image_processor.patch_size


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a block with Overtime after some seconds, repeatedly, because it may catch it.

    A block is not interrupted in threads other than the main one, on Windows, and in C code that
    does not return. An alarm that was set before is restored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_):
        raise Overtime(f"it took over {seconds:g} seconds")

    start = time.monotonic()
    former_handler = signal.signal(signal.SIGALRM, stop)
    former_seconds, former_interval = signal.setitimer(signal.ITIMER_REAL, seconds, REPEATED)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # the alarm may have come between the block and the line above
        signal.setitimer(signal.ITIMER_REAL, 0)
        # None: its handler is not Python's
        signal.signal(signal.SIGALRM, former_handler or signal.SIG_DFL)
        if former_seconds:
            remaining = max(former_seconds - (time.monotonic() - start), 0.001)
            signal.setitimer(signal.ITIMER_REAL, remaining, former_interval)


def begin(make: Callable[[], Environment], columns: dict) -> Environment:
    """Construct an environment and reset it with the columns of a row.

    Raises:
        ValueError: `reset` raised, took over max_tool_seconds or returned something.
    """
    environment = guarded("__init__", make)
    text = call_method(environment, "reset", **columns)
    if text is not None:
        raise ValueError(f"reset returned {text!r:.40}; put it into the row's prompt")
    return environment


def begin_with_row(name: str, row: Row) -> Environment:
    """Construct the environment of this name and reset it with a row (ValueError: see begin)."""
    columns = {"images": [*row.images], "extents": [x.size for x in row.images]}
    with naming(f"{row.where or 'the first row'}: sampling.environment {name}"):
        return begin(get_environment(name), row.columns | columns | {"prompt": row.messages})


def call_method(environment: Environment, name: str, /, *arguments, **columns):
    """Call a method that is no tool (ValueError: it raised, or took over max_tool_seconds)."""
    try:
        with time_limit(settings_of(environment).max_tool_seconds):
            return guarded(name, getattr(environment, name), *arguments, **columns)
    except (Overtime, KeyboardInterrupt) as error:
        raise ValueError(f"{name}: {str(error) or 'KeyboardInterrupt'}") from error


def call(tools: dict[str, Callable], name: str, inside: str):
    """Call a tool, and return its result (ValueError: the arguments do not fit its types)."""
    if name:
        arguments = read_values(name, inside, tools)
    else:
        name, arguments = read_call(inside, tools)
    return tools[name](**vars(build(arguments_of(tools[name]), arguments, name)))


def read_values(name: str, inside: str, tools: dict[str, Callable]) -> dict:
    """Parse the text in a tool's tags: arguments in order, as JSON; bare text is one str."""
    expected = fields(arguments_of(tools[name]))
    values = [inside.strip()]
    if [field.type for field in expected] != [str]:
        with suppress(ValueError):
            values = json.loads(f"[{inside}]")
    if len(values) > len(expected):
        raise ValueError(f"{name} takes {len(expected)} argument(s), not {len(values)}")
    return {field.name: value for field, value in zip(expected, values, strict=False)}


def read_call(inside: str, tools: dict[str, Callable]) -> tuple[str, dict]:
    """Parse a call in Qwen's format into the tool's name and its arguments."""
    written_call = read_parameters(inside, tools) or json.loads(inside)
    if not isinstance(written_call, dict) or "name" not in written_call:
        raise ValueError('a call is {"name": ..., "arguments": {...}}')
    if written_call["name"] not in tools:
        raise ValueError(f"no tool {written_call['name']!r}; there are {', '.join(tools)}")
    return written_call["name"], written_call.get("arguments", {})


def read_parameters(inside: str, tools: dict[str, Callable]) -> dict | None:
    """Parse a call in Qwen3.5's format; return None if the text has another format."""
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
    """Parse a value in Qwen3.5's format, which writes text as it is, and all else as JSON.

    The value is JSON if that is not text and fits the type, and otherwise the text as it is: for
    int | str the value 7 is a number, while 7.5, seven and "7" with its quotes are text.
    """
    value = text
    with suppress(ValueError, RecursionError):
        value = json.loads(CONSTANTS.get(text, text))
    if isinstance(value, str):
        return text
    for choice in (value, text):
        with suppress(ValueError):
            read_value(hint, choice, "", json=True)
            return choice
    return value  # `build` raises the error


def part(result) -> dict:
    """Make a part of a message from the result of a tool: a picture, a part as in TRL, or text.

    The text can be encoded afterwards, because half a surrogate is replaced by "?".
    """
    kind = part_kind(result)
    shown = result.get("image") if kind == "image" else result
    if isinstance(shown, Image):
        return {"type": "image", "image": shown}
    text = result["text"] if kind == "text" else str(result)
    return {"type": "text", "text": text.encode(errors="replace").decode()}


def turn_opening(processor: Processor) -> list[str]:
    """Render the text between the <|im_end|> of a turn and the assistant's next turn."""
    lay = render if processor.template is None else processor.template.render
    pieces = lay([{"role": "user", "content": "?"}])
    last_end = len(pieces) - pieces[::-1].index(END)
    return pieces[last_end:]


def render_answers(answers: list[list[dict]], opening: Sequence[str] = ()) -> list[str]:
    """Render answers: inside the policy's turn, or in a turn of their own before `opening`."""
    if not opening:
        parts = [p if "image" in p else part(f"<result>{p['text']}</result>") for p in answers[0]]
        return join_text(layout_turn({"role": "user", "content": parts})[2:-2])
    parts = []
    for answer_parts in answers:
        parts += [part("\n<tool_response>\n"), *answer_parts, part("\n</tool_response>")]
    start, role, first, *inside, _ = layout_turn({"role": "user", "content": parts})
    return join_text(["\n", start, role, first.removeprefix("\n"), *inside, *opening])
