"""Test how tool calls are parsed, and how the results of tools become text."""

import json
import random
import signal
import sys
import time
from types import SimpleNamespace
from typing import Literal

import PIL.Image
import pytest

from minivlmrl.extras.agents.environment import Settings
from minivlmrl.extras.agents.tool_calls import answer_call, begin, call, find_calls, part, render_answers, turn_opening
from tests.helpers import tiny

TOOLS = {"zoom": lambda: 0, "zoom_out": lambda: 0}
PROCESSOR = tiny.processor()
OPENING = turn_opening(PROCESSOR)
PARAMETERS = "\n<function={}>\n<parameter={}>\n{}\n</parameter>\n<parameter={}>\n{}\n</parameter>\n</function>\n"
QWEN = "<tool_call>\n{}\n</tool_call>"


@pytest.mark.parametrize(("text", "ended", "calls"), [
    ("a<zoom>3</zoom>", False, [("zoom", "3")]),
    # the first call is answered before the second call is generated
    ("<zoom>1</zoom><zoom>2</zoom>", False, [("zoom", "1")]),
    ("<zoom>1<zoom>2</zoom>", False, [("zoom", "2")]),
    ("<zoom>1</zoom", False, []),
    ("<other>1</other>", True, []),
    (QWEN.format("x"), False, []),
    (QWEN.format("x") + QWEN.format("y"), True, [("", "\nx\n"), ("", "\ny\n")]),
    ("<tool_call>x", True, []),
    ("<tool_call>" * 2**18, True, []),  # one pass, because each further pass would take 0.1 s
])  # fmt: skip
def test_find_calls(text, ended, calls):
    assert find_calls(text, TOOLS, ended) == calls


def look(left: float, place: str = "here") -> str:
    return f"{left} {place}"


def turn(way: Literal["left", "right"], times: int = 1) -> str:
    return f"{way} {times}"


def weigh(at: list[int], sure: bool = False) -> str:
    return f"{at} {sure}"


def name(it: str) -> str:
    return it


@pytest.mark.parametrize(("tool", "message", "result"), [
    ("look", "1", "1.0 here"),
    ("look", '2.5, "there"', "2.5 there"),
    ("name", '\na "cat", 3 ', 'a "cat", 3'),
    ("turn", "left", "left 1"),
    ("turn", '"right", 2', "right 2"),
    ("", '{"name": "look", "arguments": {"place": "x", "left": 1}}', "1.0 x"),
    ("", PARAMETERS.format("look", "left", 1, "place", 2), "1.0 2"),
    ("", PARAMETERS.format("weigh", "at", "[1, 2]", "sure", "True"), "[1, 2] True"),
])  # fmt: skip
def test_arguments(tool, message, result):
    assert call({"look": look, "name": name, "turn": turn, "weigh": weigh}, tool, message) == result


# (type hint, text in the call, argument of the tool)
WRITTEN = [
    (int | str, "7", 7), (int | str, '"7"', '"7"'), (int | str, "true", "true"), (float | str, "007", "007"),
    (float | str, "1e3", 1000.0), (str, "7", "7"), (str | None, "null", None), (int | None, "None", None),
    (list[int] | str, "[1]", [1]), (list[int] | str, '["a"]', '["a"]'), (list[str], "a", ["a"]),
    (Literal["1", 2], "1", "1"), (Literal["1", 2], "2", 2), (dict | str, '{"a": 1}', {"a": 1}),
    (str, "[" * 9999, "[" * 9999),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "text", "value"), WRITTEN)
def test_a_parameter_without_quotes_is_json_that_fits_or_else_text(hint, text, value):
    """Qwen3.5 writes strings in tool calls without quotes, and other values as JSON."""

    def tool(it):
        return [it]

    tool.__annotations__ = {"it": hint}
    written = f"<function=tool>\n<parameter=it>\n{text}\n</parameter>\n</function>"
    assert call({"tool": tool}, "", written) == [value]
    arguments = {"name": "tool", "arguments": {"it": value}}
    assert call({"tool": tool}, "", json.dumps(arguments)) == [value]
    assert type(call({"tool": tool}, "", json.dumps(arguments))[0]) is type(value)


@pytest.mark.parametrize(("tool", "message", "error"), [
    ("look", "", "left is missing"),
    ("look", '1, "a", 3', "takes 2 argument"),
    ("look", '"far"', "left is 'far', but it must be of type float"),
    ("", '{"name": "eval"}', "there is no tool 'eval'; the tools are look, name"),
    ("", '{"name": "look", "arguments": [1]}', "must be an object"),
    ("", PARAMETERS.format("look", "left", "[1]", "place", 2), r"left is \[1\], but it must be of type float"),
    # Python's JSON parser accepts the following calls, but tools could not compute with the arguments.
    ("", '{"name": "look", "arguments": {"left": NaN}}', "look: left is nan, but it must be finite"),
    ("", '{"name": "look", "arguments": {"left": 1e999}}', "look: left is inf, but it must be finite"),
    ("", PARAMETERS.format("look", "left", "-Infinity", "place", 2), "left is -inf, but it must be finite"),
    ("", r'{"name": "name", "arguments": {"it": "a\ud800"}}', "name: 'utf-8' codec can't encode character"),
    ("", '{"name": ["look"]}', "a tool call must have the form"),
    ("", "[" * 99999, "maximum recursion depth exceeded"),
])  # fmt: skip
def test_invalid_calls_are_reported(tool, message, error):
    with pytest.raises(ValueError, match=error):
        call({"look": look, "name": name}, tool, message)


def endless() -> str:
    while True:
        try:
            while True:
                pass
        except Exception:
            continue


def with_addresses() -> str:
    raise ValueError("stale <object at 0x7f3a91c04d90>\n#0 0x55d0c8a1b2f3 <unknown>, but code 0xff")


def stubborn() -> str:
    for _ in range(3):  # bounded, so that a broken timeout fails this test
        try:
            time.sleep(2)
        except:  # noqa: E722
            time.sleep(0.05)


TOO_MUCH = "error: the answer's number of {} is {}, but it must be {} or less"
SAID = {
    "a dict": (lambda: {"count": 2}, "{'count': 2}"),
    "TRL's part": (lambda: [{"type": "text", "text": "a"}], "a"),
    "half a surrogate": (lambda: "a\ud800", "a?"),
    "an exit": (lambda: sys.exit(3), "error: 3"),
    "an error without words": (lambda: next(iter(())), "error: StopIteration"),
    "addresses": (with_addresses, "error: stale <object at 0x>\n#0 0x <unknown>, but code 0xff"),
    "no end": (endless, "error: the call took more than 0.05 seconds"),
    "no end, whatever is raised": (stubborn, "error: the call took more than 0.05 seconds"),
    "much": (lambda: ["a" * 60, "b" * 50], TOO_MUCH.format("characters", 110, 99)),
    "a picture": (lambda: PIL.Image.new("L", (20, 21)), TOO_MUCH.format("pixels", 420, 400)),
}


@pytest.mark.parametrize("name", SAID)
def test_any_result_of_a_tool_becomes_text(name):
    tool, text = SAID[name]
    limits = Settings(max_tool_seconds=0.05, max_tool_characters=99, max_tool_pixels=400)
    [message], pictures, done = answer_call({"f": tool}, "f", "", PROCESSOR, limits)
    assert message["text"] == text and pictures == []
    assert done is not text.startswith("error")


def test_a_slow_reset_ends_the_run():
    with pytest.raises(ValueError, match=r"^reset: the call took more than 0\.3 seconds$"):
        begin(lambda: SimpleNamespace(reset=lambda: time.sleep(60), max_tool_seconds=0.3), {})


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_in_a_tool_ends_a_command():
    def pressed():
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        answer_call({"f": pressed}, "f", "", PROCESSOR, Settings())
    with pytest.raises(KeyboardInterrupt):
        begin(lambda: SimpleNamespace(reset=pressed), {})


def test_random_calls_do_not_raise():
    rng, tools, drawn = random.Random(0), {"look": look, "name": name}, 0
    pieces = [*"{}[]:,-\\\n", *(f"<{slash}{tag}>" for tag in ("tool_call", "look", "name") for slash in ("", "/"))]
    pieces += ['"left": 1', r'"\ud800": 2', r'"\ud800"', "[" * 3000, "9" * 5000, "null", "1e999", "NaN", '"name"']
    pieces += ["<function=look>", "<parameter=left>", "</parameter>", "</function>", "<|im_end|>"]
    while drawn < 300:
        inside = "".join(rng.choices(pieces, k=rng.choice((1, 1, 2, 9))))
        inside = rng.choice((inside, f'{{"name": "look", "arguments": {{{inside}}}}}'))
        tag = rng.choice(("tool_call", "look", "name"))
        calls = find_calls(f"<{tag}>{inside}</{tag}>", tools, True)
        drawn += len(calls)
        told = [answer_call(tools, *one, PROCESSOR, Settings())[0] for one in calls]
        assert PROCESSOR.encode(render_answers(told or [[part("")]], rng.choice([(), OPENING])), [])
