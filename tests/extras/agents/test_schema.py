"""Compare the JSON schemas of tools with transformers' get_json_schema."""

import json
from typing import Annotated, Any, Literal

import PIL.Image
import pytest

from minivlmrl.extras.agents.schema import json_schema, type_schema
from recipes.tools import Zoom, calculator

HINTS = [int, str | None, int | float | None, list, list[str], list[int] | None, int | list[float], dict]
HINTS += [dict[str, bool], tuple[int, str], Literal["left", "right"], Literal[1, "a", None], Any, dict[str, list[int]]]


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_type_schemas_match_transformers(hint):
    from transformers.utils.chat_template_utils import _parse_type_hint

    assert type_schema(hint) == _parse_type_hint(hint)


def test_other_types():
    assert type_schema(Annotated[int, ">= 1"]) == {"type": "integer"}
    assert type_schema(tuple[float, ...]) == {"type": "array", "items": {"type": "number"}}
    for hint in (object, dict[int, str], Literal[b"a"]):
        with pytest.raises(ValueError, match=r"use a type such as int"):
            type_schema(hint)


def several(box: tuple[float, float], label: str | None = None, kind: str = "a", *, marks: list[int] = ()) -> str:
    """Mark a box.

    It may have a label; Zürich & <b> too.

    Args:
        box: x and y: two numbers,
            in pixels

        label: its name
          note: deeper lines go on
        kind: of mark
        marks: numbers
    Returns:
        what was marked,
        in words

    Raises:
        ValueError: never
    """


def turned(way: Literal["left", "right"]) -> PIL.Image.Image:
    """Turn the picture

    Args:
        way: where to"""


def nothing() -> dict[str, Any]:
    """Do nothing."""


def unknown(at: dict[str, int | None]) -> object:
    """Look at.

    Args:
      at: where
      other: not there

    Returns:
        a thing
    """


@pytest.mark.parametrize("tool", [several, turned, nothing, unknown, calculator, Zoom().zoom])
def test_tool_schemas_match_transformers(tool):
    from transformers.utils import get_json_schema

    assert json.dumps(json_schema(tool)) == json.dumps(get_json_schema(tool))
