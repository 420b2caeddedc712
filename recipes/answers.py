"""Reward functions that you can copy: number, choice, yes_no, class_name and math compare answers with solutions.

In a recipe, name the file of a reward, relative to the folder in which you run the command, and the function:
    rewards: {recipes/answers.py:number(tolerance=0.05): 1.0}

The option data.answer_format selects the answer from a completion. An answer that contains two answers, denies the
correct answer or lists all choices gets reward 0. Rows without a solution (None or "") get no reward.
"""

import functools
import operator
import re
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from minivlmrl.errors import optional_dependency, truncate
from minivlmrl.rewards.text import NO_ANSWER, NO_SOLUTION, LogExtra, find_answer, normalize, solution_text

LONGEST = 2000  # maximum characters in an answer; a longer answer gets reward 0
WRAPPED = r"\$+(.*?)\$+|\\\((.*)\\\)|\\\[(.*)\\\]|\\(?:boxed|text|mathrm)\{(.*)\}|\*\*(.*)\*\*|\"(.*)\""
DENIED = re.compile(r"\b(?:not?|never|neither|nor|except|without|unlike|instead|rather than|\w+n['’]t)\b", re.I)


def judge_rows(
    name: str, kind: str, read: Callable, answer_texts: list, solution: list, same=operator.eq,
    log_extra: LogExtra | None = None,
) -> list:  # fmt: skip
    """Parse n answers and n solutions, and compare each answer with the solution of the same row.

    Args:
        name: the reward's name, for error messages.
        kind: description of a valid solution, for error messages, for example "a number".
        read: function that parses a text, and returns None if the text is not valid.
        answer_texts: the n answers.
        solution: the n solutions.
        same: function that compares the parsed solution with the parsed answer.
        log_extra: function that logs the reasons for rewards below 1.
    Returns:
        A list with 1.0 for a correct answer, 0.0 for a wrong answer, and None for a row without a solution.
    Raises:
        ValueError: if a solution cannot be parsed.
    """
    scored = []  # (reward, reason) for each answer
    for answer, truth in zip(answer_texts, solution, strict=True):
        truth_text = find_answer(solution_text(truth)) or solution_text(truth)
        if not truth_text.strip():
            scored.append((None, NO_SOLUTION))
            continue
        right_value = read(unwrap(truth_text))
        if right_value is None:
            raise ValueError(
                f"reward {name}: the solution must be {kind}, but it is {truncate(truth_text, 80)}; correct the row"
            )
        value = read(unwrap(answer)) if answer and len(answer) <= LONGEST else None
        if value is None:
            scored.append((0.0, f"the answer {truncate(answer, 200)} is not {kind}" if answer else NO_ANSWER))
        elif not same(right_value, value):
            scored.append((0.0, f"the answer is {truncate(answer, 200)}, not {truncate(truth_text, 200)}"))
        else:
            scored.append((1.0, None))
    if log_extra is not None:
        log_extra("why", [reason for _, reason in scored])
    return [value for value, _ in scored]


def unwrap(text: str) -> str:
    """Remove markup around an answer: "$\\boxed{3}$." becomes "3"."""
    for _ in range(4):
        text = text.strip().removesuffix(".").strip()
        inside = re.fullmatch(WRAPPED, text, re.DOTALL)
        if not inside:
            break
        text = next(group for group in inside.groups() if group is not None)
    return text


LEAD = r"(?:the )?(?:correct |final |best |right )?(?:answer|option|choice)(?:\s*(?:is|:))?\s*:?\s*"
LETTER = r"(?:[(\[]([a-z])[)\]][).:]*|([a-z])(?:[).:]+|\s+[-–—](?=\s)|(?=\s*$)))"
CHOICE = re.compile(rf"(?:{LEAD})?(?:option\s+)?{LETTER}(?:\s+(.*))?", re.IGNORECASE | re.DOTALL)
# This pattern finds a second letter in the answer to a multiple-choice question, as in "B or C".
OTHER_LETTER = re.compile(r"\b(?:[A-Z]|[b-hj-z])\b|\b[a-z]\)")
NOT_YES = re.compile(rf"\bfalse\b|{DENIED.pattern}", re.IGNORECASE)
NOT_NO = re.compile(r"\b(?:yes|true)\b", re.IGNORECASE)
YES_NO = re.compile(rf"(?:{LEAD})?(yes|no|true|false)\b([^?]*)", re.IGNORECASE)


def choice(answer_texts: list, solution: list, log_extra=None, **columns) -> list:
    """Return 1.0 if the answer is the letter of the correct choice, such as B, (b), B. or "B - a dog".

    Answers such as "B or C", "not B" and "A, B, C" get reward 0.
    """

    def letter(text: str) -> str | None:
        match = CHOICE.fullmatch(text)
        if not match or OTHER_LETTER.search(match[3] or ""):
            return None
        return (match[1] or match[2]).upper()

    return judge_rows(
        "choice", "a choice such as B, (B) or B. a dog", letter, answer_texts, solution, log_extra=log_extra
    )


def yes_no(answer_texts: list, solution: list, log_extra=None, **columns) -> list:
    """Return 1.0 if the answer is, or begins with, the correct word: yes (or true), or no (or false).

    The answer "yes and no" gets reward 0.
    """

    def read(text: str) -> bool | None:
        match = YES_NO.fullmatch(text)
        if not match:
            return None
        word, rest = match.groups()
        is_yes = word.lower() in ("yes", "true")
        contradiction = NOT_YES if is_yes else NOT_NO
        return None if contradiction.search(rest) else is_yes

    return judge_rows("yes_no", "yes or no", read, answer_texts, solution, log_extra=log_extra)


def class_name(
    answer_texts: list, solution: list, classes: list | str | None = None, log_extra=None, **columns
) -> list:
    """Return 1.0 if the answer is the correct class name. Case, spaces, - and _ are ignored.

    Args:
        classes: list of all class names, or a text file with one name per line. If it is given, an answer may be a
            sentence that contains exactly one class name and no negation. Otherwise the answer must be only the name.
    """
    if isinstance(classes, str):
        classes = Path(classes).read_text(encoding="utf-8").splitlines()
    names = frozenset(_words(name) for name in classes or () if name.strip())

    def named(text: str) -> str | None:
        mentioned = set(_pattern(names).findall(_words(text)))
        denied = DENIED.search(_pattern(names).sub("", _words(text)))
        return mentioned.pop() if len(mentioned) == 1 and not denied else None

    kind = f"the name of one of the {len(names)} classes"
    return judge_rows("class_name", kind, named if names else _words, answer_texts, solution, log_extra=log_extra)


def _words(text: str) -> str:
    return normalize(re.sub(r"[-_\s]+", " ", text))


@functools.cache
def _pattern(names: frozenset[str]) -> re.Pattern:
    """Compile a pattern for whole names, longest first, so that "green square" is not matched as "square"."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


LONGEST_NUMBER = 100  # maximum characters in a number
NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
WORDS = "|".join(NUMBER_WORDS)
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
# Units with their sizes, grouped by kind, such as lengths; any other word after a number is ignored.
UNITS = [
    {"%": "1/100"},
    {"mm": "1/1000", "cm": "1/100", "m": "1", "km": "1000", "in": "254/10000", "ft": "3048/10000"},
    {"mg": "1/1000", "g": "1", "kg": "1000"},
    {"s": "1", "min": "60", "h": "3600"},
]
SPELLINGS = {
    "percent": "%", "inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "meter": "m", "metre": "m",
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "kilometer": "km",
    "kilometre": "km", "gram": "g", "kilogram": "kg", "milligram": "mg",
    "sec": "s", "second": "s", "minute": "min", "hr": "h", "hour": "h",
}  # fmt: skip
# Words after a number that change its value or make it ambiguous, as in "3 or 4"
OTHER_NUMBER = re.compile(
    rf"or|and|to|not|plus|minus|times|more|less|fewer|ish|pi|hal(?:f|ves)|thirds?|quarters?|{WORDS}|(?![ghms])[a-zµ]"
)

DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
NUMBER = re.compile(
    r"(?:(?:the )?(?:final )?answer(?: is|:) ?|[a-z] ?= ?|[=≈~] ?|about |approximately )?"
    r"(?P<sign>[+-]?) ?[$€£]?(?:(?P<whole>\d+) (?=\d+ ?/))?"
    rf"(?:(?P<digits>{DIGITS})(?:(?:e| ?[x×*] ?10\^)\{{?(?P<power>[+-]?\d{{1,3}})\}}?| ?/ ?(?P<below>{DIGITS}))?"
    rf"|(?P<word>{WORDS})\b) ?(?P<unit>%|°[cf]?|[a-zµ]+(?:/[a-z]+|\^\{{?[23]\}}?|[²³])?)?",
    re.ASCII,
)
LATEX = [
    (r"\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))", r"\1\2/\3\4"),
    (r"\\(?:times|cdot)", "×"),
    ("−", "-"),
    (r"\{,\}|\\[!,;]", ""),
    (r"\\%", "%"),
    (r"\\(?:text|mathrm)\{([^{}]*)\}", r" \1"),
    (r"\^?\\circ", "°"),
]


def number(answer_texts: list, solution: list, tolerance: float = 0.0, log_extra=None, **columns) -> list:
    """Return 1.0 if the answer is the number of the solution, written as 3, 3.0, three, 6/2, "3 apples" or x = 3.

    Answers such as "3 or 4" and 3-5 get reward 0. Units of the same kind are converted (50 mm is 5 cm), and a
    unit may be omitted. 50% equals both 0.5 and 50.

    Args:
        tolerance: largest accepted relative error. For example, with 0.05 and the solution 100, answers from 95 to
            105 are correct.
    """
    same = functools.partial(_same, tolerance=Fraction(str(tolerance)))
    return judge_rows("number", "a number", read_number, answer_texts, solution, same, log_extra=log_extra)


def read_number(text: str) -> tuple[Fraction, str] | None:
    """Parse one number with a unit: "1,234.5 cm" becomes (2469/2, "cm"). Return None for any other text."""
    if len(text) > LONGEST_NUMBER:
        return None
    for pattern, replacement in LATEX:
        text = re.sub(pattern, replacement, text)
    match = NUMBER.fullmatch(" ".join(text.lower().split()))
    if not match:
        return None
    word = match["unit"] or ""
    below = _fraction(match["below"] or "1")
    if OTHER_NUMBER.fullmatch(word) or below == 0:
        return None
    if match["word"]:
        value = Fraction(NUMBER_WORDS.index(match["word"]))
    else:
        value = _fraction(f"{match['digits']}e{match['power'] or 0}")
    value = value / below + int(match["whole"] or 0)
    if match["sign"] == "-":
        value = -value
    if word in SCALES:
        return value * SCALES[word], ""
    return value, _unit(word)


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _unit(word: str) -> str:
    """Return the symbol of a unit, for example "in" for "inches". Any other word is returned unchanged."""
    return SPELLINGS.get(word) or SPELLINGS.get(word.removesuffix("s"), word)


def _sizes(unit: str | None) -> dict[str, str] | None:
    """Return the sizes of all units of the same kind, such as lengths, or None if the unit is unknown."""
    for sizes in UNITS:
        if unit in sizes:
            return sizes
    return None


def _same(truth: tuple[Fraction, str], answer: tuple[Fraction, str], tolerance: Fraction) -> bool:
    """Return whether two numbers with units are equal up to the relative tolerance."""

    def near(a: Fraction, b: Fraction) -> bool:
        return abs(a - b) <= tolerance * abs(a)

    a, unit = truth
    b, other_unit = answer
    sizes = _sizes(unit)
    other_sizes = _sizes(other_unit)
    if sizes and other_sizes:
        same_kind = sizes is other_sizes
        return same_kind and near(a * Fraction(sizes[unit]), b * Fraction(sizes[other_unit]))
    a_share = a / 100 if unit == "%" else a
    b_share = b / 100 if other_unit == "%" else b
    return near(a, b) or near(a_share, b_share)


LONGEST_MATH = 300  # maximum characters in a formula
SECONDS = 2  # time limit for one comparison
# Formulas with nested powers, large powers or large factorials would take too long to compute.
HUGE = re.compile(r"(?:\^|\*\*)\W*\d+\W*(?:\^|\*\*)|(?:\^|\*\*)\W*\d{4,}|\d{3,}\s*!|!\s*!")


def math(answer_texts: list, solution: list, log_extra=None, **columns) -> list:
    """Return 1.0 if the answer is an expression, set or equation that equals the solution.

    For example, 0.5, \\frac12 and 2^{-1} are equal."""
    kind = "an expression that math-verify can read"
    return judge_rows("math", kind, _expressions, answer_texts, solution, _equal, log_extra=log_extra)


def _expressions(text: str) -> list | None:
    """Parse a whole text as one expression."""
    with optional_dependency("math", "reward math needs math-verify"):
        from math_verify import LatexExtractionConfig, parse
    if len(text) > LONGEST_MATH or HUGE.search(text):
        return None
    boxed = LatexExtractionConfig(boxed_match_priority=0)
    return parse(f"\\boxed{{{text}}}", [boxed], parsing_timeout=_seconds(), extraction_mode="first_match") or None


def _equal(truth: list, answer: list) -> bool:
    from math_verify import verify

    return bool(verify(truth, answer, timeout_seconds=_seconds()))


def _seconds() -> int | None:
    """Return the time limit, or None outside the main thread, where the timeouts of math-verify do not work."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None
