"""Test how recipes and config files are parsed into dataclasses."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from minivlmrl.config import parsing
from minivlmrl.config.parsing import build, parse_yaml, read_value
from minivlmrl.errors import error_context, require, truncate, truncate_message


@dataclass
class Base:
    steps: Annotated[int, ">= 1"] = 100
    rate: float = 1e-6


@dataclass
class Section(Base):
    share: Annotated[float, "(0, 1]"] = 1.0
    kind: Literal["k1", "k3"] = "k1"
    size: Annotated[int, "> 0"] | None = None
    weights: list[Annotated[float, "[0, inf)"]] | None = None
    losses: list[Literal["a", "b"]] = field(default_factory=lambda: ["a"])
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        require(self.low <= self.high, "high", self.high, f"at least low ({self.low})")


@dataclass
class Whole:
    needed: int
    stop: int | list[int] | None = None
    on: bool = False
    text: str = ""
    names: list[str] = field(default_factory=list)
    table: dict[str, float] = field(default_factory=dict)
    blocks: tuple[int, ...] = ()
    means: tuple[float, float, float] = (0.0, 0.0, 0.0)
    section: Section = field(default_factory=Section)
    level: Literal[1, 2] = 1
    anything: dict = field(default_factory=dict)


VALID = [
    ("stop", 1, 1), ("stop", [1, 2], [1, 2]), ("on", True, True), ("text", "1e-4", "1e-4"),
    ("names", "one", ["one"]), ("table", {"a": 2}, {"a": 2.0}), ("table", {"a": "1e-4"}, {"a": 1e-4}),
    ("blocks", [1, 2], (1, 2)), ("means", [1, 2.5, 3], (1.0, 2.5, 3.0)), ("anything", {"a": [1]}, {"a": [1]}),
    ("section", {"rate": "1e-4"}, Section(rate=1e-4)),
    ("section", {"size": None, "kind": "k3"}, Section(kind="k3")),
    ("section", {"weights": [1, 0]}, Section(weights=[1.0, 0.0])),
    ("section", {"losses": "b"}, Section(losses=["b"])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "expected"), VALID)
def test_valid_values(name, value, expected):
    found = getattr(build(Whole, {"needed": 1, name: value}, "x.yaml"), name)
    assert found == expected
    assert type(found) is type(expected)


WRONG = [
    ({"stop": "one"}, "stop is 'one', but it must be of type int or list[int]"),
    ({"needed": True}, "needed is True, but it must be of type int"),
    ({"names": [1]}, "names is 1, but it must be of type str"),
    ({"table": {"a": "high"}}, "table.a is 'high', but it must be of type float"),
    ({"means": [1, 2]}, "means is [1, 2], but it must be a list of 3 values"),
    ({"section": {"steps": 0}}, "section.steps is 0, but it must be >= 1"),
    ({"section": {"share": float("nan")}}, "section.share is nan, but it must be in (0, 1]"),
    ({"section": {"weights": [float("inf")]}}, "section.weights is inf, but it must be in [0, inf)"),
    ({"section": {"rate": float("inf")}}, "section.rate is inf, but it must be finite"),
    ({"means": [1.0, 2.0, float("nan")]}, "means is nan, but it must be finite"),
    ({"section": {"kind": "k2"}}, "section.kind is 'k2', but it must be 'k1' or 'k3'"),
    ({"level": True}, "level is True, but it must be 1 or 2"),
    ({"section": {"weights": 1.0}}, "section.weights is 1.0, but it must be of type list[float, in [0, inf)]"),
    ({"section": {"low": 2}}, "section.high is 1.0, but it must be at least low (2.0)"),
    ({"section": {"stepz": 1}}, "unknown key section.stepz; did you mean section.steps?"),
    ({"section": {"rate": 10**400}}, "section.rate is 10000"),  # too large for a float
    ({"section": {"rate": "x" * 1000}}, "section.rate is 'xxx"),
    ([1], "the file is [1], but it must be an object with names and values"),
    ({"needed": None}, "needed is missing"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_wrong_values_are_reported(values, message):
    if isinstance(values, dict):
        values = {name: value for name, value in ({"needed": 1} | values).items() if value is not None}
    with pytest.raises(ValueError, match=f"^x.yaml: {re.escape(message)}") as error:
        build(Whole, values, "x.yaml")
    assert len(str(error.value)) < 200


def test_json_files_may_have_more_keys_and_are_not_converted():
    assert build(Base, {"steps": 2, "more": 3}, "x.json", json=True) == Base(2)
    with pytest.raises(ValueError, match=r"^x.json: vision.rate is '1e-4', but it must be of type float$"):
        build(Base, {"rate": "1e-4"}, "x.json", prefix="vision.", json=True)
    with pytest.raises(ValueError, match=r"^x.json: names is 'one', but it must be of type list\[str\]$"):
        build(Whole, {"needed": 1, "names": "one"}, "x.json", json=True)


def test_many_keys_and_values_are_read_in_one_pass(monkeypatch):
    """Parsing must not take quadratic time in the number of keys, or build error texts for valid values."""
    assert len(parse_yaml("\n".join(f"k{i}: 1" for i in range(5_000)))) == 5_000
    texts = []
    monkeypatch.setattr(parsing, "type_text", texts.append)
    assert len(read_value(tuple[Literal["a", "b"], ...], ["a", "b"] * 9, "x", json=True)) == 18 and len(texts) == 1


def test_an_alias_is_refused():
    """Ten lines of YAML with nine aliases each would expand to 9**9 values."""
    lines = ["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
    for text in ("\n".join(lines), "a: &a {b: 1}\nc:\n  <<: *a", "&a [*a]"):
        with pytest.raises(ValueError, match=r"not valid YAML \(.*: the alias \*a0? is not supported; write its value"):
            parse_yaml(text)
    assert parse_yaml("a: &a 1") == {"a": 1}


def test_a_cut_value_ends_with_dots():
    assert truncate("a" * 58, 60) == repr("a" * 58)
    assert truncate("a" * 59, 60) == f"'{'a' * 59}..."
    with pytest.raises(ValueError, match=r"^size is \[0, 1, 2, 3, 4, 5, \.\.\.\], but"):
        require(False, "size", list(range(90)), "short")
    with pytest.raises(ValueError, match=r"^size is '123.*567\.\.\., but it must be short$"):
        require(False, "size", "123456789" * 9, "short")


def test_long_quoted_values_are_shortened():
    """Quoted values are shortened, but not paths and not text between two apostrophes inside words."""
    picture = "A" * 200_000
    assert truncate_message(f"column is {picture!r}; drop it") == f"column is '{'A' * 79}...'; drop it"
    assert len(truncate_message(f"{picture} is no file")) < 120
    assert truncate_message(repr("a word " * 40)).endswith("...'")
    for text in ("it's the reader's word " * 20, "/a/long/path" * 20 + ": no such file", "'short' and \"short\""):
        assert truncate_message(text) == text
    with pytest.raises(ValueError, match=r"^rows.jsonl:3: 'A{79}\.\.\.'$"), error_context("rows.jsonl:3"):
        raise ValueError(repr(picture))


@pytest.mark.parametrize(("error", "message"), [
    (ValueError("cat.jpg is damaged"), "rows:3: cat.jpg is damaged"),
    (ValueError("rows:3: cat.jpg is damaged"), "rows:3: cat.jpg is damaged"),  # the error already names the row
    (ValueError("rows:31 is damaged"), "rows:3: rows:31 is damaged"),
    (KeyError("gone"), "'gone'\nin rows:3"),  # an error of a user's code
])  # fmt: skip
def test_a_place_is_named_once_in_an_error(error, message):
    with pytest.raises(type(error), match=f"^{message}$"), error_context("rows:3"):
        raise error


def test_a_message_has_at_most_600_characters():
    for text in ("x y " * 10**6, "'" + "a" * 10**7, "long'" * 5000):
        message = truncate_message(f"rows.jsonl:1: the value is {text}; correct the row")
        assert len(message) <= 600 and message.startswith("rows.jsonl:1: ") and message.endswith("; correct the row")
