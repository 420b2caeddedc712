"""The reward `math`, judged by math-verify; its rows are in reward_table.py."""

import builtins
import threading
import time

import pytest

from minivlmrl.reward_functions.math_answer import math


def test_the_solution_is_the_first_of_math_verifys_arguments():
    """An interval answers an inequality, but the other way round math-verify wants what is asked for: an interval."""
    assert math(["(1, 2)", "1 < x < 2"], ["1 < x < 2", "(1, 2)"]) == [1.0, 0.0]


def test_in_a_thread_too():
    """math-verify's alarms need the main thread."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(math(["0.5", "0.4"], ["1/2", "1/2"])))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


BOMBS = [
    "9^9^9^9",
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "1000000!",
    "((1000)!)!",
    "2^{9999999}",
    "{" * 290,
    "\\sqrt" * 60,
    "1+" * 149,
]


def test_bombs_end_soon():
    begin = time.monotonic()
    assert math(BOMBS * 9, ["2"] * len(BOMBS) * 9) == [0.0] * len(BOMBS) * 9
    assert time.monotonic() - begin < 15


def test_a_solution_that_cannot_be_read_is_named():
    with pytest.raises(
        ValueError, match=r"^reward math: solution '1\+1\+.* is no expression that math-verify can read$"
    ):
        math(["3"], ["1+" * 200])


def test_without_math_verify_the_extra_is_named(monkeypatch):
    original = builtins.__import__

    def missing(name, *rest):
        if name == "math_verify":
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"reward math needs math-verify: pip install .*\[math\]"):
        math(["3"], ["3"])
