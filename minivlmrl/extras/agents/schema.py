"""Generate JSON schemas from Python functions, like get_json_schema in transformers."""

import inspect
import re
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

from PIL.Image import Image

from minivlmrl.errors import UserError, truncate

TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    types.NoneType: "null",
    list: "array",
    dict: "object",
}
# an argument in a Google-style Args section; groups: indentation, name, description
ARGUMENT = re.compile(r"^([ \t]*)(\w+):((?:.|\n(?=\1[ \t]|(?![ \t]*\w+:)))*)", re.MULTILINE)


def json_schema(tool: Callable) -> dict:
    """Build a JSON schema from the signature, type hints and Google-style docstring of a function."""
    hints = typing.get_type_hints(tool, include_extras=True)
    parameters = inspect.signature(tool).parameters
    description, *rest = re.split(r"\s*\b(Args|Returns|Raises):", inspect.getdoc(tool) or "")
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    properties = {name: type_schema(hints[name]) for name in parameters}
    # add descriptions from the Args section
    without_blank_lines = re.sub(r"\n\s*\n", "\n", sections.get("Args", ""))
    for _, name, text in ARGUMENT.findall(without_blank_lines):
        if name in properties:
            properties[name]["description"] = re.sub(r"\s*\n\s*", " ", text.strip())
    arguments = {"type": "object", "properties": properties}
    required = [name for name, p in parameters.items() if p.default is p.empty]
    if required:
        arguments["required"] = required
    function = {"name": tool.__name__, "description": description.strip(), "parameters": arguments}
    with suppress(KeyError, ValueError):
        returned = hints["return"]
        function["return"] = {"type": "image"} if returned is Image else type_schema(returned)
        function["return"]["description"] = sections["Returns"].strip()
    return {"type": "function", "function": function}


def type_schema(hint) -> dict:
    """Return the JSON schema for a type hint, such as {"type": "integer"} for int."""
    origin = typing.get_origin(hint)
    inside = typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is None and hint in TYPES:
        return {"type": TYPES[hint]}
    if origin is Annotated:
        return type_schema(inside[0])
    if origin is Literal and {*map(type, inside)} <= TYPES.keys():
        kinds = dict.fromkeys(TYPES[type(value)] for value in inside)
        return {"type": one_or_all(list(kinds)), "enum": list(inside)}
    if origin in (typing.Union, types.UnionType):
        return union_schema(inside)
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": type_schema(inside[1])}
    if origin is tuple and ... not in inside:
        return {"type": "array", "prefixItems": [type_schema(part) for part in inside]}
    if origin in (list, tuple):
        return {"type": "array", "items": type_schema(inside[0])}
    raise UserError(f"JSON cannot represent the type hint {truncate(hint, 80)}; use a type such as int or list[str]")


def one_or_all(kinds: list[str]) -> str | list[str]:
    """Return "type" for a JSON schema: one string, or a list if there are several."""
    return kinds[0] if len(kinds) == 1 else kinds


def union_schema(hints: tuple) -> dict:
    """Return the JSON schema for a union, such as {"type": ["integer", "string"]} for int | str."""
    schemas = [type_schema(hint) for hint in hints if hint is not types.NoneType]
    union: dict[str, Any] = {"anyOf": schemas}
    if len(schemas) == 1:
        union = schemas[0]
    elif all(schema.keys() == {"type"} for schema in schemas):
        kinds = sorted({schema["type"] for schema in schemas})
        union = {"type": one_or_all(kinds)}
    if types.NoneType in hints:
        union["nullable"] = True
    return union
