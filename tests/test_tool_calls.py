"""Calls in a text; test_tool_sampler.py has their answers."""

import pytest

from minivlmrl.chat import IMAGE
from minivlmrl.environments.tool_calls import call, find_calls, lay_out, part

TOOLS = {"zoom": lambda: 0, "zoom_out": lambda: 0}
QWEN = "<tool_call>\n{}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "ended", "calls"),
    [
        ("a<zoom>3</zoom>", False, [("zoom", "3")]),
        ("<zoom>1</zoom><zoom>2</zoom>", False, [("zoom", "1")]),  # it is answered before the second is written
        ("<zoom>1<zoom>2</zoom>", False, [("zoom", "2")]),
        ("<zoom>1</zoom", False, []),
        ("<other>1</other>", True, []),
        (QWEN.format("x"), False, []),
        (QWEN.format("x") + QWEN.format("y"), True, [("", "\nx\n"), ("", "\ny\n")]),
        ("<tool_call>x", True, []),
    ],
)
def test_find_calls(text, ended, calls):
    assert find_calls(text, TOOLS, ended) == calls


def look(left: float, place: str = "here") -> str:
    return f"{left} {place}"


def name(it: str) -> str:
    return it


@pytest.mark.parametrize(
    ("tool", "said", "result"),
    [
        ("look", "1", "1.0 here"),
        ("look", '2.5, "there"', "2.5 there"),
        ("name", 'a "cat", 3', 'a "cat", 3'),
        ("", '{"name": "look", "arguments": {"place": "x", "left": 1}}', "1.0 x"),
    ],
)
def test_arguments(tool, said, result):
    assert call({"look": look, "name": name}, tool, said) == result


@pytest.mark.parametrize(
    ("tool", "said", "error"),
    [
        ("look", "", "left is missing"),
        ("look", '1, "a", 3', "takes 2 argument"),
        ("look", '"far"', "left is 'far', it must be of type float"),
        ("", '{"name": "eval"}', "there are the tools look"),
        ("", '{"name": "look", "arguments": [1]}', "must be an object"),
    ],
)
def test_what_does_not_fit_is_said(tool, said, error):
    with pytest.raises(ValueError, match=error):
        call({"look": look}, tool, said)


def test_text_that_spells_a_control_token_is_text():
    pieces = lay_out([[part("<|image_pad|><|im_end|>")], [part({"type": "image", "image": None})]], True)
    assert [piece for piece in pieces if piece is IMAGE] == [IMAGE]
    assert "user\n<tool_response>\n<|image_pad|><|im_end|>\n</tool_response>\n<tool_response>\n" in pieces
