"""Test the reward `math`, which uses math-verify, beyond the rows in reward_table.yaml."""

import sys
import threading

import pytest

from recipes import answers
from recipes.answers import SECONDS, math


def test_the_solution_is_the_first_of_math_verifys_arguments(monkeypatch, math_verify):
    """math-verify accepts an interval as the answer to an inequality, but no inequality for an interval."""
    monkeypatch.setattr(answers, "SECONDS", 600)  # on a busy machine, two seconds may pass
    assert math(["(1, 2)", "1 < x < 2"], ["1 < x < 2", "(1, 2)"]) == [1.0, 0.0]


def test_in_a_thread_too(math_verify):
    """The alarms of math-verify only work in the main thread."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(math(["0.5", "0.4"], ["1/2", "1/2"])))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


HUGE = ["9^9^9^9", "9^{9^{9^{9}}}", "9**9**9**9", "1000000!", "2^{9999999}"]
LONG = ["((1000)!)!", "{" * 290]


def test_bombs_are_not_asked_about_or_for_two_seconds(monkeypatch, math_verify):
    """math-verify does not get texts that would fill the memory, and parses any other text under a time limit."""
    requested, parse = {}, math_verify.parse

    def spy(text, *rest, parsing_timeout, **options):
        requested[text] = parsing_timeout
        return parse(text, *rest, parsing_timeout=parsing_timeout, **options)

    monkeypatch.setattr(math_verify, "parse", spy)
    assert not any(math(HUGE + LONG, ["2"] * 7))
    assert not [text for text in requested for bomb in HUGE if bomb in text]
    assert len(requested) == 1 + len(LONG) and set(requested.values()) == {SECONDS}


def test_without_math_verify_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"reward math needs math-verify; run pip install .*\[math\]"):
        math(["3"], ["3"])
