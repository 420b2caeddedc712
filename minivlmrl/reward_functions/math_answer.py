"""The reward `math`: an expression that equals the solution, judged by math-verify (the extra `math`)."""

import re
import threading

from minivlmrl.reward_functions.judges import judge_rows

LONGEST, DEEPEST, SECONDS = 300, 40, 2  # characters and brackets; of one comparison, where a signal can end it
HUGE = re.compile(
    r"(?:\^|\*\*)\W*\d+\W*(?:\^|\*\*)|(?:\^|\*\*)\W*\d{4,}|\d{3,}\s*!|!\s*!"
)  # towers of powers, factorials
SEVERAL = re.compile(r"\b(?:or|not|either|neither|maybe)\b|[≠?]|\\(?:neq?|lor|vee)\b", re.IGNORECASE)


def math(answer_texts: list, solution: list, **columns) -> list:
    """1.0 for an expression that equals the solution: 1/2, 0.5, \\frac12, 2^{-1}; sets, intervals and equations too."""
    return judge_rows("math", "expression that math-verify can read", _expressions, answer_texts, solution, _equal)


def _expressions(text: str) -> list | None:
    """Read all of a text as one expression, in LaTeX, else as plain text."""
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    except ImportError as error:
        cure = "pip install -c constraints.txt -e '.[math]'"
        raise ValueError(f"reward math needs math-verify: {cure}") from error
    if len(text) > LONGEST or len(re.findall(r"[(\[{]", text)) > DEEPEST or HUGE.search(text) or SEVERAL.search(text):
        return None
    options = {"parsing_timeout": _seconds(), "extraction_mode": "first_match"}
    found = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(boxed_match_priority=0)], **options)
    if re.fullmatch(r"[\s\d.,+*/()^%-]+", text):
        found = found or parse(text, [ExprExtractionConfig()], **options)
    return found or None


def _equal(truth: list, said: list) -> bool:
    from math_verify import verify

    return bool(verify(truth, said, timeout_seconds=_seconds()))


def _seconds() -> int | None:
    """math-verify sets an alarm, which only the main thread can."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None
