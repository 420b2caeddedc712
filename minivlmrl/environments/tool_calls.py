"""Calls of tools in what a policy writes, in tags or as Qwen writes them, and their answers."""

import json
import re
import signal
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields

from PIL.Image import Image

from minivlmrl.chat import END, join_text, layout_turn, part_kind, render
from minivlmrl.environments.environment import Settings, arguments_of
from minivlmrl.environments.schema import type_schema
from minivlmrl.hub.recipe_values import build, require
from minivlmrl.rows import Processor

CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # Qwen3.5 writes Python's


class Overtime(BaseException):
    """A tool takes too long. No Exception: a tool may catch those."""


FAILURES = Exception, SystemExit, Overtime  # a tool may raise anything


def find_calls(text: str, tools: dict, ended: bool) -> list[tuple[str, str]]:
    """Find calls in what was written since the last answer: a tool's name, and its arguments.

    A call in tags is answered at once. Qwen's are when the turn has ended; their name is "" here.
    """
    opened = {}  # tool: where its arguments begin
    for tag in re.finditer(rf"<(/?)({'|'.join(tools)})>", text):
        if not tag[1]:
            opened[tag[2]] = tag.end()
        elif tag[2] in opened:
            return [(tag[2], text[opened[tag[2]] : tag.start()])]
    calls = [part.partition("<tool_call>") for part in text.split("</tool_call>")[:-1] if ended]
    return [("", inside) for _, tag, inside in calls if tag]


def answer(
    tools: dict[str, Callable], name: str, inside: str, processor, settings: Settings
) -> tuple[list, list, bool]:
    """Call a tool; return parts of a message, its pictures (image, patches, grid), and success."""
    try:
        with time_limit(settings.max_tool_seconds):
            result = call(tools, name, inside)
            parts = [part(one) for one in (result if isinstance(result, list) else [result])]
        images = [one["image"] for one in parts if "image" in one]
        sizes = {"characters": sum(len(one.get("text", "")) for one in parts)}
        sizes["pixels"] = sum(image.width * image.height for image in images)
        for unit, size in sizes.items():
            most = getattr(settings, f"max_tool_{unit}")
            require(size <= most, f"the answer's number of {unit}", size, f"{most} or less")
        return parts, [(image, *processor.image_processor(image)) for image in images], True
    except FAILURES as error:  # the model reads it
        text = f"error: {str(error) or type(error).__name__}"
        return [part(text[: settings.max_tool_characters])], [], False


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a block (Overtime); in other threads than the main one, on Windows, nothing can."""

    def stop(*_):
        raise Overtime(f"it took over {seconds:g} seconds")

    main = threading.current_thread() is threading.main_thread()
    can = main and hasattr(signal, "SIGALRM")
    if can:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if can:
            signal.setitimer(signal.ITIMER_REAL, 0)


def call(tools: dict[str, Callable], name: str, inside: str) -> object:
    """Call a tool with arguments that fit its types (ValueError: they do not)."""
    if name:
        known = fields(arguments_of(tools[name]))
        values = [inside.strip()]  # bare text is a str
        if [one.type for one in known] != [str]:
            with suppress(ValueError):
                values = json.loads(f"[{inside}]")
        arguments = {one.name: value for one, value in zip(known, values, strict=False)}
        if len(values) > len(known):
            raise ValueError(f"{name} takes {len(known)} argument(s), not {len(values)}")
    else:
        asked = read_parameters(inside, tools) or json.loads(inside)
        if not isinstance(asked, dict) or "name" not in asked:
            raise ValueError('a call is {"name": ..., "arguments": {...}}')
        if asked["name"] not in tools:
            raise ValueError(f"no tool {asked['name']!r}; there are {', '.join(tools)}")
        name = asked["name"]
        arguments = asked.get("arguments", {})
    return tools[name](**vars(build(arguments_of(tools[name]), arguments, name)))


def read_parameters(inside: str, tools: dict[str, Callable]) -> dict | None:
    """Read a call as Qwen3.5 writes it, values that are no text as JSON; None: it is another."""
    before, is_so, call = inside.partition("<function=")
    name, _, body = call.partition(">")
    if before.strip() or not is_so:
        return None
    hints = typing.get_type_hints(tools[name]) if name in tools else {}
    arguments = {}
    for one in body.split("</parameter>")[:-1]:
        key, _, value = one.partition("<parameter=")[2].partition(">")
        arguments[key] = value = value.removeprefix("\n").removesuffix("\n")
        if type_schema(hints.get(key, str)).get("type") != "string":
            with suppress(ValueError):
                arguments[key] = json.loads(CONSTANTS.get(value, value))
    return {"name": name, "arguments": arguments}


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
    template = processor.template
    pieces = (render if template is None else template.render)([{"role": "user", "content": "?"}])
    return pieces[len(pieces) - pieces[::-1].index(END) :]


def lay_out(answers: list[list[dict]], opening: Sequence[str] = ()) -> list[str]:
    """Lay out answers: inside the policy's turn, or with what opens another one in their own."""
    if not opening:
        parts = [p if "image" in p else part(f"<result>{p['text']}</result>") for p in answers[0]]
        return join_text(layout_turn({"role": "user", "content": parts})[2:-2])
    tags = part("\n<tool_response>\n"), part("\n</tool_response>")
    parts = [p for some in answers for p in (tags[0], *some, tags[1])]
    start, role, _, *inside, _ = layout_turn({"role": "user", "content": parts})
    return join_text(["\n", start, role, tags[0]["text"][1:], *inside, *opening])
