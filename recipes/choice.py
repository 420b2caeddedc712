"""Rewards to copy: is the answer the letter of the right choice, or the right one of yes and no?

In a recipe, from the folder where the command runs:
    rewards: {recipes/choice.py:choice: 1.0}
"""

import re

from minivlmrl.reward_functions.judges import DENIED, judge_rows

LEAD = r"(?:the )?(?:correct |final |best |right )?(?:answer|option|choice)(?:\s*(?:is|:))?\s*:?\s*"
LETTER = r"(?:[(\[]([a-z])[)\]][).:]*|([a-z])(?:[).:]+|(?=\s*$)))"
CHOICE = re.compile(rf"(?:{LEAD})?(?:option\s+)?{LETTER}(?:\s+(.*))?", re.IGNORECASE | re.DOTALL)
OTHER = re.compile(r"\b(?:[A-Z]|[b-hj-z])\b|\b[a-z]\)")  # in the text of a choice: one more letter
YES_NO = re.compile(rf"(?:{LEAD})?(yes|no|true|false)\b([^?]*)", re.IGNORECASE)


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
