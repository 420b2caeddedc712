"""What teachers of the stage distill are shown: distill.teacher_prompt names these."""

import copy
from dataclasses import replace

from talk import text


def hint(row):
    """The teacher is told the answer."""
    messages = copy.deepcopy(row.messages)
    said = f" It is a {row.columns.get('solution')}."
    content = messages[-1]["content"]
    messages[-1]["content"] = content + said if isinstance(content, str) else [*content, text(said)]
    return replace(row, messages=messages)


def larger(row):
    """The teacher sees the picture as it is, the student data.max_pixels of it."""
    messages = copy.deepcopy(row.messages)
    messages[-1]["content"][0]["max_pixels"] = 56 * 56
    return replace(row, messages=messages)


def breaks(row):
    """It asks for a column that no row has."""
    return row.columns["gone"]


def answers(row):
    """It returns no row."""
    return "a hint"
