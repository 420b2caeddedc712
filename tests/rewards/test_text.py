"""Test the rewards for text on good and bad completions, and on completions that try to exploit the rewards."""

import pytest

from minivlmrl.rewards import text as rewards_file
from minivlmrl.rewards.registry import get_reward
from minivlmrl.rewards.text import accuracy, find_answer, tag_format
from tests.helpers.score_texts import logged_reasons, score_texts

GOOD = "<think>I see green</think><answer>green square</answer>"


REASONS = {  # why a completion lacks the format; None if it has the format
    GOOD: None,
    "<think>a\nb\n</think>\n\n<answer>\nc\n</answer>": None,
    f"\n {GOOD} \n": None,  # surrounding whitespace is ignored
    "<think>1 < 2 > 0 <b></think><answer><i></answer>": None,
    "": "no <think>",
    "<THINK>a</THINK><ANSWER>b</ANSWER>": "no <think>",
    "<think>a": "no </think>",
    "<think>a</think>b": "no <answer>",
    "<think>a</think><answer>b": "no </answer>",
    "<think>a</think><answer>b</answer><answer>c</answer>": "<answer> occurs 2 times",
    "<think>a<answer>b</answer></think>": "the tags are not in the order <think> </think> <answer> </answer>",
    "<answer>b</answer><think>a</think>": "the tags are not in the order <think> </think> <answer> </answer>",
    f"Sure! {GOOD} Done.": "text outside of the tags: 'Sure!  Done.'",
    f"{GOOD}\x00": r"text outside of the tags: '\x00'",
    "<think>a</think>so<answer>b</answer>": "text outside of the tags: 'so'",
    "<think> \n</think><answer>b</answer>": "no text between <think> and </think>",
    "<think>a</think><answer>\n</answer>": "no text between <answer> and </answer>",
}


def test_format_gives_a_reason():
    rewards, reasons = logged_reasons(tag_format, completions=list(REASONS))
    assert dict(zip(REASONS, reasons, strict=True)) == REASONS
    assert rewards == tag_format(list(REASONS)) == [float(reason is None) for reason in reasons]


def test_accuracy_gives_a_reason():
    rewards, reasons = logged_reasons(
        accuracy,
        answer_texts=["Green square.", " Red  square", None, "red"],
        solution=["green square", "green square", "red", None],
    )
    assert rewards == [1, 0, 0, None]
    wrong = "the answer is 'red square', not 'green square'"
    assert reasons == [None, wrong, "no answer, see data.answer_format", "the row has no solution"]


@pytest.mark.parametrize(("solution", "right", "wrong"), [
    ("cat", ["cat", "Cat."], ["a cat"]),
    ("green square", [" Green \n SQUARE. "], ["green"]),
    ("straße", ["STRASSE"], []),
    ("cafe\u0301", ["caf\u00e9", "CAFE\u0301"], ["cafe"]),
    # signs of other keyboards
    ("红色", ["红色。"], []), ("猫", ["猫．"], []), ("ＡＢ１", ["ab1"], []), ("a，b", ["a,b"], []),
    ("（B）", ["(B)"], []), ("x²", [], ["x2"]), ("ｍ²", [], ["m"]),
    (3, ["3", "3."], ["3.0", "three"]),
    (2.0, ["2"], ["2.0"]),
    ("2.0", ["2.0"], ["2"]),
    (0.5, ["0.5"], ["1/2", ".5"]),
    (0.00001, ["0.00001"], ["1e-05"]),
    (True, ["true", "True"], ["yes", "1"]),
    ("\\boxed{cat}", ["\\boxed{cat}"], ["cat"]),
    ("(B)", ["(B)", "(b)"], ["B"]),
    ("50%", ["50%"], ["50", "0.5"]),
    ("<answer>cat</answer>", ["cat"], ["<answer>dog</answer>"]),
    ([1, 2.5], ["[1, 2.5]"], ["1, 2.5", "1"]),
    ('{"a": 1, "b": "X"}', ['{"b": "x",  "a":1}', "{'a': 1, 'b': 'X'}"], ['{"a": 1}', '{"a": 1, "b": "Y"}', "a"]),
    ('["a", "b"]', ['["a","b"]'], ['["b", "a"]', "a, b"]), ("-3", ["−3", "－３"], ["3"]), ("it's", ["it’s"], []),
    ('{"a": [true, 1.0]}', ['{"a": [True, 1]}'], ['{"a": [1, 1]}', '{"a": [true, true]}', '{"a": [true]}', '{"a": 1}']),
    ([[1, 2]], ["[1, 2]", "[1,2]"], ["[[1, 2]]"]), ((1, 2), ["[1, 2]"], ["(1, 2)"]), ("[[1, 2]]", ["[[1, 2]]"], []),
], ids=str)  # fmt: skip
def test_what_a_solution_means(solution, right, wrong):
    answers, earned = right + wrong, [1.0] * len(right) + [0.0] * len(wrong)
    assert accuracy(answers, [solution] * len(answers)) == earned
    if isinstance(solution, str):
        assert accuracy([solution] * len(answers), answers) == earned


@pytest.mark.parametrize("solution", [
    ["cat"], ["cat", 1], [None], [["cat"]], {"label": "cat"}, {}, [{"role": "assistant", "content": "cat"}],
    [14], [[14]], [3.0], ["14"], b"cat", {"cat"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["accuracy", "recipes/answers.py:number", "recipes/answers.py:class_name"])
def test_a_solution_that_no_answer_equals_is_refused(name, solution):
    message = r"solution .* is an object or a list, which no answer can equal; write one text or number"
    for answer in ("cat", "14"):
        with pytest.raises(ValueError, match=message):
            get_reward(name).function(answer_texts=[answer], solution=[solution])


def test_accuracy_is_none_without_a_solution():
    assert accuracy(["green square"] * 4, [None, "  ", ".", "<answer></answer>"]) == [None] * 4


# completions of a policy that does not look at the image, for the solution "green square", with their rewards
# (format, accuracy)
HACKS = {
    "<think>a</think><answer>green</answer>": (1.0, 0.0),
    "<think>a</think><answer>green square or red square</answer>": (1.0, 0.0),
    "<think>a</think><answer>.*</answer>": (1.0, 0.0),
    "<think>a</think><answer>ɡreen square</answer>": (1.0, 0.0),  # a different letter that looks like g
    "<think>a</think><answer>green\u200b square</answer>": (1.0, 0.0),  # a zero-width space
    "<think>green square</think><answer>red square</answer>": (1.0, 0.0),
    "<think>a</think><answer>green square": (0.0, 0.0),
    "<answer>red<answer>green square</answer>": (0.0, 0.0),
    "<ANSWER>green square</ANSWER>": (0.0, 0.0),
    "<answer>green square</answer><answer>red square</answer>": (0.0, 0.0),  # the last answer counts
    "<answer>red square</answer><answer>green square</answer>": (0.0, 1.0),  # this is also one guess
    GOOD: (1.0, 1.0),
}


def test_red_team():
    earned = score_texts(["format", "accuracy"], list(HACKS), {"solution": ["green square"] * len(HACKS)})
    assert dict(zip(HACKS, map(tuple, earned.tolist()), strict=True)) == HACKS


@pytest.mark.parametrize(("unit", "expected"), [("<answer>", None), ("<answer>a</answer>", "a"), ("a", None)])
def test_an_answer_is_found_in_one_pass(unit, expected, monkeypatch):
    """A regular expression that rescanned the remaining text from each <answer> took days for 10 MB."""
    assert find_answer(unit * (10**6 // len(unit))) == expected
    monkeypatch.setattr(rewards_file, "ANY_TAG", None)  # a regular expression would also be slow
    assert rewards_file.tag_format([f"<think>a</think><answer>b</answer>{unit}</answer>"]) == [0.0]


# completions with the answers that each mode extracts: (tags, whole, last_line)
BOTH = "<answer>dotted</answer> or\n<answer> frilly</answer>"
ANSWERS = {
    "frilly": (None, "frilly", "frilly"),
    "It has frills.\n\nfrilly\n": (None, "It has frills.\n\nfrilly", "frilly"),
    "<think>dotted\n</think>\nfrilly": (None, "frilly", "frilly"),
    "<think>dotted</think><answer>frilly</answer>": ("frilly", *["<answer>frilly</answer>"] * 2),
    "<think>a</think>frilly<think>dotted": (None, None, None),
    BOTH: (" frilly", BOTH, "<answer> frilly</answer>"),
    "<answer>dotted<answer>frilly</answer>": ("dotted<answer>frilly", *["<answer>dotted<answer>frilly</answer>"] * 2),
}


def test_where_an_answer_is():
    places = ("tags", "whole", "last_line")
    assert {message: tuple(find_answer(message, where) for where in places) for message in ANSWERS} == ANSWERS
