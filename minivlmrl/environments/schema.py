"""What a model is told of a tool: the JSON schema that transformers' get_json_schema makes."""

import types
import typing
from typing import Annotated, Any, Literal

TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
TYPES |= {list: "array", dict: "object"}


def type_schema(hint) -> dict:
    """Describe a type (ValueError: JSON has no such values)."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
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
        if len(some) > 1 and any({"type": one.get("type")} != one for one in some):
            joined = {"anyOf": some}
        nullable = {"nullable": True} if types.NoneType in inside else {}
        return (some[0] if len(some) == 1 else joined) | nullable
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": type_schema(inside[1])}
    if origin is tuple and ... not in inside:
        return {"type": "array", "prefixItems": [type_schema(one) for one in inside]}
    if origin in (list, tuple):
        return {"type": "array", "items": type_schema(inside[0])}
    raise ValueError(
        f"{hint!r:.80} is no type of JSON: take int, float, str, bool, list[...], dict"
    )
