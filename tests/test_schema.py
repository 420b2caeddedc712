"""Schemas of tools, against transformers' get_json_schema."""

from typing import Annotated, Any, Literal

import pytest

from minivlmrl.environments.schema import type_schema

HINTS = [
    int,
    str | None,
    int | float | None,
    list,
    list[str],
    list[int] | None,
    int | list[float],
    dict,
    dict[str, bool],
]
HINTS += [tuple[int, str], Literal["left", "right"], Literal[1, "a", None], Any, list[dict[str, list[int]]]]


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_a_type_is_described_as_by_transformers(hint):
    from transformers.utils.chat_template_utils import _parse_type_hint

    assert type_schema(hint) == _parse_type_hint(hint)


def test_what_a_recipe_could_say_too():
    assert type_schema(Annotated[int, ">= 1"]) == {"type": "integer"}
    assert type_schema(tuple[float, ...]) == {"type": "array", "items": {"type": "number"}}
    for hint in (object, dict[int, str], Literal[b"a"]):
        with pytest.raises(ValueError, match=r"is no type of JSON: take int, float"):
            type_schema(hint)
