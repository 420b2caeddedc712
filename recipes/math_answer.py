"""A reward to copy: does an expression equal the solution? By math-verify (the extra `math`).

In a recipe, from the folder where the command runs:
    rewards: {recipes/math_answer.py:math: 1.0}
"""

import re
import threading

from minivlmrl.hub.checker import extra
from minivlmrl.reward_functions.judges import judge_rows

LONGEST, SECONDS = 300, 2  # characters; of one comparison, where a signal can end it
# towers of powers, large powers, factorials
HUGE = re.compile(r"(?:\^|\*\*)\W*\d+\W*(?:\^|\*\*)|(?:\^|\*\*)\W*\d{4,}|\d{3,}\s*!|!\s*!")


def math(answer_texts: list, solution: list, **columns) -> list:
    """1.0 for an expression that equals the solution: 0.5, \\frac12, 2^{-1}; sets, equations."""
    kind = "expression that math-verify can read"
    return judge_rows("math", kind, _expressions, answer_texts, solution, _equal)


def _expressions(text: str) -> list | None:
    """Read all of a text as one expression."""
    with extra("math", "reward math needs math-verify"):
        from math_verify import LatexExtractionConfig, parse
    if len(text) > LONGEST or HUGE.search(text):
        return None
    options = {"parsing_timeout": _seconds(), "extraction_mode": "first_match"}
    boxed = LatexExtractionConfig(boxed_match_priority=0)
    return parse(f"\\boxed{{{text}}}", [boxed], **options) or None


def _equal(truth: list, answer: list) -> bool:
    from math_verify import verify

    return bool(verify(truth, answer, timeout_seconds=_seconds()))


def _seconds() -> int | None:
    """math-verify sets an alarm, which only the main thread can."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None
