"""The tool calculator."""

import re


def calculator(expression: str) -> str:
    """Compute numbers with + - * / and brackets, such as "(3 + 4) * 1.5"."""
    if not re.fullmatch(r"[\d.+\-*/() ]{1,200}", expression) or re.search(r"\*\*|//", expression):
        raise ValueError("it must be numbers with + - * / and brackets, at most 200 characters")
    return f"{eval(expression, {}):.12g}"  # there are no names in it
