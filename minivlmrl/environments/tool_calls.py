"""Calls of tools in what a policy writes, in tags or as Qwen writes them, and their answers."""

import json
import re
from collections.abc import Callable
from dataclasses import fields

from PIL.Image import Image

from minivlmrl.chat import START, join_text, layout_turn
from minivlmrl.environments.environment import arguments_of
from minivlmrl.hub.checker import build

QWEN = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def find_calls(text: str, tools: dict, ended: bool) -> list[tuple[str, str]]:
    """Find calls in what was written since the last answer: a tool's name, and its arguments.

    A call in tags is answered at once. Qwen's are when the turn has ended; their name is "" here.
    """
    tagged = re.search(rf"<({'|'.join(tools)})>((?:(?!<\1>).)*?)</\1>", text, re.DOTALL)
    if tagged:
        return [tagged.groups()]
    return [("", inside) for inside in QWEN.findall(text)] if ended else []


def answer(tools: dict[str, Callable], name: str, inside: str, processor) -> tuple[list, list]:
    """Call a tool; return parts of a message, and its pictures (image, patches, grid)."""
    try:
        result = call(tools, name, inside)
        parts = [part(one) for one in (result if isinstance(result, list) else [result])]
        images = [one["image"] for one in parts if "image" in one]
        return parts, [(image, *processor.image_processor(image)) for image in images]
    except Exception as error:  # a tool may raise anything: the model reads it
        return [part(f"error: {error}")], []


def call(tools: dict[str, Callable], name: str, inside: str) -> object:
    """Call a tool with arguments that fit its types (ValueError: they do not)."""
    if name:
        known = fields(arguments_of(tools[name]))
        values = [inside] if [one.type for one in known] == [str] else json.loads(f"[{inside}]")
        arguments = {one.name: value for one, value in zip(known, values, strict=False)}
        if len(values) > len(known):
            raise ValueError(f"{name} takes {len(known)} argument(s), not {len(values)}")
    else:
        asked = json.loads(inside)
        if not isinstance(asked, dict) or asked.get("name") not in tools:
            form = 'a call is {"name": ..., "arguments": {...}}'
            raise ValueError(f"{form}; there are the tools {', '.join(tools)}")
        name, arguments = asked["name"], asked.get("arguments", {})
    return tools[name](**vars(build(arguments_of(tools[name]), arguments, name)))


def part(result: object) -> dict:
    """Make a part of a message of what a tool returned: a picture, a part (TRL's), or text."""
    if isinstance(result, Image):
        return {"type": "image", "image": result}
    return result if isinstance(result, dict) else {"type": "text", "text": str(result)}


def lay_out(answers: list[list[dict]], ended: bool) -> list[str]:
    """Lay out answers: inside the policy's turn, or after its end in a turn of their own."""
    if not ended:
        parts = [p if "image" in p else part(f"<result>{p['text']}</result>") for p in answers[0]]
        return join_text(layout_turn({"role": "user", "content": parts})[2:-2])
    tags = part("\n<tool_response>\n"), part("\n</tool_response>")
    parts = [p for some in answers for p in (tags[0], *some, tags[1])]
    start, role, _, *inside = layout_turn({"role": "user", "content": parts})
    return join_text(["\n", start, role, tags[0]["text"][1:], *inside, START, "assistant\n"])
