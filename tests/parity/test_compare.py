"""What becomes of a cell, and what is said about a family of cells."""

import math

import pytest
import torch
from parity.compare import Cell, Outcome, Question, Row, ask, digits, judge, loss_cell, summary, table


def cell(ours, theirs, tolerance=1e-10):
    def result(value):
        if isinstance(value, Exception):
            raise value
        return {name: torch.as_tensor(v, dtype=torch.float64) for name, v in value.items()}

    return Cell("fake", "options", lambda: result(ours), lambda: result(theirs), tolerance)


@pytest.mark.parametrize(
    "ours, theirs, kind",
    [
        ({"loss": 1.0}, {"loss": 1.0}, "agrees"),
        ({"loss": 1.0}, {"loss": 1.0 + 1e-12}, "agrees"),
        ({"loss": 1.0}, {"loss": 1.0 + 1e-9}, "differs"),
        ({"loss": 1e9}, {"loss": 1e9 + 1e-3}, "agrees"),  # relative to what is large
        ({"loss": 1.0}, {"loss": [1.0, 1.0]}, "differs"),
        ({"loss": 1.0}, {"loss": math.nan}, "differs"),
        ({"loss": math.nan}, {"loss": math.nan}, "agrees"),
        ({"loss": 1.0}, {"loss": 1.0, "d loss / d x": 0.0}, "differs"),
        ({"loss": 1.0, "metric kl": 1.0}, {"loss": 1.0, "metric kl": 1.0 + 1e-7, "metric other": 3.0}, "agrees"),
        ({"loss": 1.0, "metric kl": 1.0}, {"loss": 1.0, "metric kl": 1.1}, "differs"),
        (ValueError("no"), {"loss": 1.0}, "differs"),
        ({"loss": 1.0}, AttributeError("no attribute y"), "absent"),
    ],
)
def test_what_becomes_of_a_cell(ours, theirs, kind):
    assert ask(cell(ours, theirs)).kind == kind


def outcomes(*kinds):
    return [Outcome(f"cell {i}", kind, error, text) for i, (kind, error, text) in enumerate(kinds)]


@pytest.mark.parametrize(
    "kinds, kind, verdict",
    [
        ([("agrees", 3e-12, ""), ("agrees", 0.0, "")], "agrees", "agrees to 11 digits"),
        ([("agrees", 0.0, ""), ("absent", 0.0, "no option x")], "agrees",
         "agrees to 16 digits (1 of 2 cells had no answer: no option x)"),
        ([("agrees", 0.0, ""), ("differs", 0.25, ""), ("differs", 0.5, "")], "differs",
         "differs by 5.0e-01 in 2 of 3 cells"),
        ([("differs", math.inf, "")], "differs", "differs in shape or NaN in 1 of 1 cells"),
        ([("differs", math.inf, "ours raised ValueError: no")], "differs",
         "differs in shape or NaN (ours raised ValueError: no) in 1 of 1 cells"),
        ([("differs", 0.5, "metric kl")], "differs", "differs by 5.0e-01 (metric kl) in 1 of 1 cells"),
        ([("absent", 0.0, "no option x")], "absent", "not in this version (no option x)"),
    ],
)  # fmt: skip
def test_what_is_said_about_a_family(kinds, kind, verdict):
    row = judge("fake", outcomes(*kinds), "1.16.0")
    assert (row.kind, row.verdict) == (kind, verdict)
    assert row.excused == (kind != "differs")


def test_digits_and_gradients():
    assert [digits(error) for error in (0.0, 1e-17, 3e-12, 0.5)] == [16, 16, 11, 0]
    batch = {"x": torch.tensor(3.0), "y": torch.tensor(1.0)}
    result = loss_cell(
        Question("fake", {}, "plain", 0, {}), batch, lambda given: (given["x"] ** 2, {"m": 2}), None, ("x", "y")
    ).ours()
    assert {name: value.item() for name, value in result.items()} == {
        "loss": 9, "d loss / d x": 6, "d loss / d y": 0, "metric m": 2,
    }  # fmt: skip


def test_the_table():
    good = judge("a", outcomes(("agrees", 0.0, "")), "1.16.0")
    bad = judge("b", outcomes(("differs", 1.0, ""), ("agrees", 0.0, "")), "1.16.0")
    excused = Row("c", 1, "differs", 1.0, "differs", "cell 0", "known to differ")
    absent = judge("d", outcomes(("absent", 0.0, "no option x")), "1.16.0")
    assert [row.excused for row in (good, bad, excused, absent)] == [True, False, True, True]
    lines = [" ".join(line.split()) for line in table([good, bad, excused])]
    assert lines == [
        "a 1 agrees to 16 digits", "b 2 differs by 1.0e+00 in 1 of 2 cells", "most in: cell 0",
        "c 1 differs", "most in: cell 0", "known: known to differ",
    ]  # fmt: skip
    assert summary([good, bad, excused, absent]) == (
        "4 families, 5 cells: 1 agree, 1 not in this version, 2 differ (1 of them as known)"
    )
