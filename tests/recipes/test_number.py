"""Test the reward `number`: tolerance, units, and agreement with math-verify on the rows of reward_table.yaml."""

from fractions import Fraction

import pytest

from recipes.answers import number, read_number
from tests.helpers.reward_table import MATH, MISSED, NUMBER, ROWS, TAKEN


@pytest.mark.parametrize("text, value, unit", [
    ("1,234.5 cm", Fraction(2469, 2), "cm"), ("-1 1/2", Fraction(-3, 2), ""), ("seven hours", 7, "h"),
    ("2 dozen", 24, ""), ("9.5%", Fraction(19, 2), "%"), ("three apples", 3, "apples"),
    *[(text, Fraction(3, 2), "") for text in ("1\\frac{1}{2}", "1 \\frac12", "\\cfrac{ 3 } {2}", "1½", "1 1⁄2")],
    ("١.٥", Fraction(3, 2), ""), ("5.50 €", Fraction(11, 2), "euro"), ("½", Fraction(1, 2), ""),
    ("-2½ cm", Fraction(-5, 2), "cm"), ("\\frac{11}{2}", Fraction(11, 2), ""),
])  # fmt: skip
def test_read_number(text, value, unit):
    assert read_number(text) == (value, unit)


@pytest.mark.parametrize("unit, spellings", [
    *[(f"{short}m", f"{short}m {long}meter {long}meters {long}metre {long}metres")
      for short, long in (("m", "milli"), ("c", "centi"), ("", ""), ("k", "kilo"))],
    *[(f"{short}g", f"{short}g {long}gram {long}grams") for short, long in (("m", "milli"), ("", ""), ("k", "kilo"))],
    ("in", "in inch inches"), ("ft", "ft foot feet"), ("s", "s sec secs second seconds"), ("min", "min minute minutes"),
    ("h", "h hr hrs hour hours"), ("%", "% percent"),
])  # fmt: skip
def test_spellings_of_units(unit, spellings):
    assert {word: read_number(f"3 {word}") for word in spellings.split()} == dict.fromkeys(spellings.split(), (3, unit))


@pytest.mark.parametrize("answer, solution", [
    ("2 km", "2000 m"), ("2000 mm", "2 m"), ("200 cm", "2 m"), ("100 in", "2.54 m"), ("10 ft", "3.048 m"),
    ("2 kg", "2000 g"), ("2000 mg", "2 g"), ("2 min", "120 s"), ("2 h", "7200 s"), ("2 dozen", "24"),
    ("2 hundred", "200"), ("2 thousand", "2000"), ("2 million", "2,000,000"), ("2 billion", "2,000,000,000"),
])  # fmt: skip
def test_sizes_of_units_and_words(answer, solution):
    assert number([answer, solution], [solution, answer]) == [1, 1]


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
