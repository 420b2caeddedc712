"""Rewards that compare an answer with the solution: a choice, yes or no.

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
LEAD = r"(?:the )?(?:correct |final |best |right )?(?:answer|option|choice)(?:\s*(?:is|:))?\s*:?\s*"
LETTER = r"(?:[(\[]([a-z])[)\]][).:]*|([a-z])(?:[).:]+|(?=\s*$)))"
CHOICE = re.compile(rf"(?:{LEAD})?(?:option\s+)?{LETTER}(?:\s+(.*))?", re.IGNORECASE | re.DOTALL)
OTHER = re.compile(r"\b(?:[A-Z]|[b-hj-z])\b|\b[a-z]\)")  # in the text of a choice: one more letter
YES_NO = re.compile(rf"(?:{LEAD})?(yes|no|true|false)\b([^?]*)", re.IGNORECASE)
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


def choice(answer_texts: list, solution: list, **columns) -> list:
    """1.0 for the letter of the right choice: B, (b), B., B) a dog. Not: B or C, not B, A. B. C."""

    def letter(text: str) -> str | None:
        match = CHOICE.fullmatch(text)
        one = match and not OTHER.search(match[3] or "")
        return (match[1] or match[2]).upper() if one else None

    return judge_rows("choice", "choice such as B, (B) or B. a dog", letter, answer_texts, solution)


def yes_no(answer_texts: list, solution: list, **columns) -> list:
    """1.0 for the right one of yes (true) and no (false), alone or first. Not: yes and no."""

    def read(text: str) -> bool | None:
        match = YES_NO.fullmatch(text)
        yes = match and match[1].lower() in ("yes", "true")
        other = r"\bfalse\b" if yes else r"\b(?:yes|true)\b"
        if not match or re.search(other, match[2], re.IGNORECASE):
            return None
        return None if yes and DENIED.search(match[2]) else yes

    return judge_rows("yes_no", "yes or no", read, answer_texts, solution)
