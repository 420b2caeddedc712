"""What rewards do that compare an answer with the solution, as those of recipes/.

An answer is what rewards.find_answer finds in a completion; data.answer says where. All of it has
to be the answer: two answers, a denial of the right one, or a list of all earn 0. A row without a
solution (None, "") is not judged.
"""

import operator
import re
from collections.abc import Callable

from minivlmrl.rewards import find_answer

LONGEST = 2000  # characters of an answer; one that is longer earns 0
WRAPPED = (
    r"\$+(.*?)\$+|\\\((.*)\\\)|\\\[(.*)\\\]|\\(?:boxed|text|mathrm)\{(.*)\}|\*\*(.*)\*\*|\"(.*)\""
)
DENIED = re.compile(
    r"\b(?:not?|never|neither|nor|except|without|unlike|instead|rather than|\w+n['’]t)\b", re.I
)


def judge_rows(
    name: str, kind: str, read: Callable, answer_texts: list, solution: list, same=operator.eq
) -> list:
    """Compare n answers with their solutions: 1.0 where `same` holds for what `read` finds in both.

    Raises:
        ValueError: `read` finds nothing in a solution, which is no `kind` then.
    """
    values = []
    for answer, truth in zip(answer_texts, solution, strict=True):
        truth = "" if truth is None else find_answer(str(truth)) or str(truth)
        right = read(unwrap(truth)) if truth.strip() else None
        if truth.strip() and right is None:
            raise ValueError(f"reward {name}: solution {truth!r:.80} is no {kind}")
        answer = read(unwrap(answer)) if answer and len(answer) <= LONGEST else None
        equal = right is not None and answer is not None and same(right, answer)
        values.append(None if right is None else float(equal))
    return values


def unwrap(text: str) -> str:
    """Take an answer out of what it is set in: "$\\boxed{3}$." gives "3"."""
    for _ in range(4):
        text = text.strip().removesuffix(".").strip()
        inside = re.fullmatch(WRAPPED, text, re.DOTALL)
        if not inside:
            break
        text = next(group for group in inside.groups() if group is not None)
    return text
