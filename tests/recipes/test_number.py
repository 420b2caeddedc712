"""Test the reward `number`: tolerance, units, and agreement with math-verify on the rows of reward_table.yaml."""

import pytest

from recipes.answers import number
from tests.helpers.reward_table import MATH, MISSED, NUMBER, ROWS, TAKEN


@pytest.mark.parametrize("answer, solution, tolerance, earned", [
    ("95", "100", 0.05, 1), ("105", "100", 0.05, 1), ("94.99", "100", 0.05, 0), ("105.01", "100", 0.05, 0),
    ("0", "0", 0.05, 1), ("0.001", "0", 0.05, 0), ("-95", "-100", 0.05, 1), ("0.333", "1/3", 0.001, 1),
    ("0.33", "1/3", 0.001, 0), ("10.2 mm", "1 cm", 0.05, 1), ("48%", "0.5", 0.05, 1), ("0.1", 0.1, 0, 1),
])  # fmt: skip
def test_tolerance(answer, solution, tolerance, earned):
    """The tolerance is a fraction of the solution, as in ChartQA, and an answer at the bound is correct."""
    assert number([answer], [solution], tolerance=tolerance) == [earned]


@pytest.mark.parametrize("solution", ["a cat", "nan", "1e9999", float("inf"), True])
def test_a_solution_that_is_no_number_is_named(solution):
    with pytest.raises(ValueError, match=r"^reward number: the solution must be a number, but it is "):
        number(["3"], [solution])


def test_against_math_verify(math_verify):
    """Where math-verify can parse both texts, its verdict equals the reward, except for the listed rows."""
    taken, missed = {}, {}
    for reward, solution, answer, earned in ROWS:
        slow = "9^9" in answer or "9**9" in answer or "!" in answer or "/0" in answer
        if reward not in (NUMBER, MATH) or slow or len(answer) > 150:
            continue
        given = (solution, answer) if reward == NUMBER else (f"${solution}$", f"${answer.strip('$')}$")
        true, message = map(math_verify.parse, given)
        if true and message and math_verify.verify(true, message) != earned:
            (missed if earned else taken).setdefault(solution, []).append(answer)
    assert (taken, missed) == (TAKEN, MISSED)
