"""Calls of tools in what a policy writes, in tags or as Qwen writes them, and their answers."""

import json
import re
import signal
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields

from PIL.Image import Image

from minivlmrl.agents.environment import Settings, arguments_of, get_environment, settings_of
from minivlmrl.config.parsing import build, naming, read_value, require
from minivlmrl.data.chat_template import END, join_text, layout_turn, part_kind, render
from minivlmrl.data.image import ImageProcessor, smart_resize, to_rgb
from minivlmrl.data.rows import Processor, Row
from minivlmrl.rewards.registry import guarded

CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # Qwen3.5 writes Python's


class Overtime(BaseException):
    """A tool takes too long. No Exception: a tool may catch those."""


REPEATED = 0.01  # seconds after which a block that has caught Overtime is interrupted again
FAILURES = Exception, SystemExit, Overtime  # a tool may raise anything


def find_calls(text: str, tools: dict, ended: bool) -> list[tuple[str, str]]:
    """Find calls in what was written since the last answer: a tool's name, and its arguments.

    A call in tags is answered at once. Qwen's are when the turn has ended; their name is "" here.
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


def answer(
    tools: dict[str, Callable], name: str, inside: str, processor, settings: Settings
) -> tuple[list, list, bool]:
    """Call a tool; return parts of a message, its pictures (image, grid), and success.

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
    """Return the image_grid_thw that an image will have: its patches may be many, so they wait."""
    width, height = to_rgb(image).size  # one that cannot be read or shown is an error here
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
    """Interrupt a block (Overtime), and again as long as it goes on: it may catch everything.

    Nothing can in other threads than the main one, on Windows, and in C code that does not return.
    The alarm that somebody else has set is put back.
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


def begin(make: Callable[[], object], columns: dict) -> object:
    """Make an environment and tell it its row.

    Raises:
        ValueError: `reset` raised, took over max_tool_seconds or returned something.
    """
    environment = guarded("__init__", make)
    text = ask(environment, "reset", **columns)
    if text is not None:
        raise ValueError(f"reset returned {text!r:.40}; put it into the row's prompt")
    return environment


def begin_with_row(name: str, row: Row) -> object:
    """Make the environment of this name and tell it a row (ValueError: see begin)."""
    columns = {"images": [*row.images], "extents": [x.size for x in row.images]}
    with naming(f"{row.where or 'the first row'}: sampling.environment {name}"):
        return begin(get_environment(name), row.columns | columns | {"prompt": row.messages})


def ask(environment: object, name: str, /, *arguments, **columns) -> object:
    """Call a method that is no tool (ValueError: it raised, or took over max_tool_seconds)."""
    try:
        with time_limit(settings_of(environment).max_tool_seconds):
            return guarded(name, getattr(environment, name), *arguments, **columns)
    except (Overtime, KeyboardInterrupt) as error:
        raise ValueError(f"{name}: {str(error) or 'KeyboardInterrupt'}") from error


def call(tools: dict[str, Callable], name: str, inside: str) -> object:
    """Call a tool with arguments that fit its types (ValueError: they do not)."""
    if name:
        arguments = read_values(name, inside, tools)
    else:
        name, arguments = read_call(inside, tools)
    return tools[name](**vars(build(arguments_of(tools[name]), arguments, name)))


def read_values(name: str, inside: str, tools: dict[str, Callable]) -> dict:
    """Read what is in the tags of a tool: its arguments in order, as JSON; bare text is a str."""
    expected = fields(arguments_of(tools[name]))
    values = [inside.strip()]
    if [field.type for field in expected] != [str]:
        with suppress(ValueError):
            values = json.loads(f"[{inside}]")
    if len(values) > len(expected):
        raise ValueError(f"{name} takes {len(expected)} argument(s), not {len(values)}")
    return {field.name: value for field, value in zip(expected, values, strict=False)}


def read_call(inside: str, tools: dict[str, Callable]) -> tuple[str, dict]:
    """Read a call as Qwen writes it: the tool's name, and its arguments."""
    written_call = read_parameters(inside, tools) or json.loads(inside)
    if not isinstance(written_call, dict) or "name" not in written_call:
        raise ValueError('a call is {"name": ..., "arguments": {...}}')
    if written_call["name"] not in tools:
        raise ValueError(f"no tool {written_call['name']!r}; there are {', '.join(tools)}")
    return written_call["name"], written_call.get("arguments", {})


def read_parameters(inside: str, tools: dict[str, Callable]) -> dict | None:
    """Read a call as Qwen3.5 writes it: one parameter after the other; None: it is another."""
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


def read_parameter(hint, text: str) -> object:
    """Read a value that Qwen3.5's templates write: text as it is, and all else as JSON.

    So it is JSON where that is no text and fits the type, and otherwise the text as it is written:
    for int | str 7 is a number, and 7.5, seven and "7" with its quotes are text.
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
    return value  # whoever builds the arguments says what is wrong


def part(result: object) -> dict:
    """Make a part of a message of what a tool returned: a picture, a part (TRL's), or text.

    All that a tool says comes through here, and can be encoded: half a surrogate is "?".
    """
    kind = part_kind(result)
    shown = result.get("image") if kind == "image" else result
    if isinstance(shown, Image):
        return {"type": "image", "image": shown}
    text = result["text"] if kind == "text" else str(result)
    return {"type": "text", "text": text.encode(errors="replace").decode()}


def turn_opening(processor: Processor) -> list[str]:
    """Lay out what leads from the <|im_end|> of a turn into the assistant's next one."""
    lay = render if processor.template is None else processor.template.render
    pieces = lay([{"role": "user", "content": "?"}])
    last_end = len(pieces) - pieces[::-1].index(END)
    return pieces[last_end:]


def lay_out(answers: list[list[dict]], opening: Sequence[str] = ()) -> list[str]:
    """Lay out answers: inside the policy's turn, or with what opens another one in their own."""
    if not opening:
        parts = [p if "image" in p else part(f"<result>{p['text']}</result>") for p in answers[0]]
        return join_text(layout_turn({"role": "user", "content": parts})[2:-2])
    parts = []
    for answer_parts in answers:
        parts += [part("\n<tool_response>\n"), *answer_parts, part("\n</tool_response>")]
    start, role, first, *inside, _ = layout_turn({"role": "user", "content": parts})
    return join_text(["\n", start, role, first.removeprefix("\n"), *inside, *opening])
