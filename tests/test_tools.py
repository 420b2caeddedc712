"""The tool calculator: arithmetic, and nothing else of Python."""

import pytest

from minivlmrl.environments.built_in import calculator


@pytest.mark.parametrize(
    ("expression", "value"), [("(3 + 4) * 1.5", "10.5"), ("-2*-3", "6"), ("1/3", "0.333333333333"), ("10 - 4 - 3", "3")]
)
def test_it_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["2**9999999", "9//2", "abs(3)", "__import__('os')", "1" * 201, "", "0x10", "1e9"]
)
def test_it_is_no_python(expression):
    with pytest.raises(ValueError, match="numbers with"):
        calculator(expression)
