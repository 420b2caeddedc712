"""What a model is told of a tool: the JSON schema that transformers' get_json_schema makes."""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

from PIL.Image import Image

TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
TYPES |= {list: "array", dict: "object"}
# an argument of a docstring in Google's form: its indentation, its name, and what is said of it
ARGUMENT = re.compile(r"^([ \t]*)(\w+):((?:.|\n(?=\1[ \t]|(?![ \t]*\w+:)))*)", re.MULTILINE)


def json_schema(tool: Callable) -> dict:
    """Describe a tool by its signature and docstring; what the docstring lacks is left out."""
    hints = typing.get_type_hints(tool, include_extras=True)
    parameters = inspect.signature(tool).parameters
    about, *rest = re.split(r"\s*\b(Args|Returns|Raises):", inspect.getdoc(tool) or "")
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    properties = {name: type_schema(hints[name]) for name in parameters}
    for _, name, words in ARGUMENT.findall(re.sub(r"\n\s*\n", "\n", sections.get("Args", ""))):
        words = re.sub(r"\s*\n\s*", " ", words.strip())
        if name not in properties:
            continue
        if choices := re.search(r"\s*\(choices:\s*(.*?)\)\s*$", words, re.IGNORECASE):
            properties[name]["enum"], words = json.loads(choices[1]), words[: choices.start()]
        properties[name]["description"] = words
    described = {"name": tool.__name__, "description": about.strip()}
    described["parameters"] = {"type": "object", "properties": properties}
    if required := [name for name, one in parameters.items() if one.default is one.empty]:
        described["parameters"]["required"] = required
    with suppress(KeyError, ValueError):
        returned = hints["return"]
        described["return"] = {"type": "image"} if returned is Image else type_schema(returned)
        described["return"]["description"] = sections["Returns"].strip()
    return {"type": "function", "function": described}


def type_schema(hint) -> dict:
    """Describe a type (ValueError: JSON has no such values)."""
    origin = typing.get_origin(hint)
    inside = typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is None and hint in TYPES:
        return {"type": TYPES[hint]}
    if origin is Annotated:
        return type_schema(inside[0])
    if origin is Literal and {*map(type, inside)} <= TYPES.keys():
        kinds = list(dict.fromkeys(TYPES[type(value)] for value in inside))
        return {"type": kinds if len(kinds) > 1 else kinds[0], "enum": list(inside)}
    if origin in (typing.Union, types.UnionType):
        some = [type_schema(one) for one in inside if one is not types.NoneType]
        kinds = sorted({str(one.get("type")) for one in some})
        joined = {"type": kinds if len(kinds) > 1 else kinds[0]}
        if any({"type": one.get("type")} != one for one in some):
            joined = {"anyOf": some} if len(some) > 1 else some[0]
        return joined | ({"nullable": True} if types.NoneType in inside else {})
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": type_schema(inside[1])}
    if origin is tuple and ... not in inside:
        return {"type": "array", "prefixItems": [type_schema(one) for one in inside]}
    if origin in (list, tuple):
        return {"type": "array", "items": type_schema(inside[0])}
    raise ValueError(f"{hint!r:.80} is no type of JSON, as int or list[str]")
