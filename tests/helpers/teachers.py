"""Functions for distill.teacher_prompt: each function returns the row that the distill stage's teacher sees."""

import copy
from dataclasses import replace

from talk import text


def hint(row):
    """Append the solution to the teacher's prompt."""
    messages = copy.deepcopy(row.messages)
    said = f" It is a {row.columns.get('solution')}."
    content = messages[-1]["content"]
    messages[-1]["content"] = content + said if isinstance(content, str) else [*content, text(said)]
    return replace(row, messages=messages)


def larger(row):
    """Show the teacher the image in its original size; the student sees at most data.max_pixels pixels."""
    messages = copy.deepcopy(row.messages)
    messages[-1]["content"][0]["max_pixels"] = 56 * 56
    return replace(row, messages=messages)


def breaks(row):
    """Raise KeyError, because no row has this column."""
    return row.columns["gone"]


def answers(row):
    """Return a string instead of a row, which is a mistake."""
    return "a hint"
