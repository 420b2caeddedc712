"""Reward functions that compare answers with solutions: number, choice, yes_no, one_of, class_name and math.

A recipe names a file, relative to the folder in which you run the command, and a function in it:
    rewards: {recipes/answers.py:number(tolerance=0.05): 1.0}

data.answer_format says where completions have their answers. Several answers, a negated correct answer, or a list of
all choices get reward 0. Rows without a solution (None or "") get no reward.
"""

import functools
import operator
import re
import threading
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from minivlmrl.data.markup import PLAIN_SIGNS, literal_list, unwrap
from minivlmrl.errors import UserError, optional_dependency, truncate
from minivlmrl.rewards.text import NO_ANSWER, NO_SOLUTION, LogExtra, accuracy, find_answer, normalize, solution_text

LONGEST = 2000  # characters per answer; longer ones get reward 0
DENIED = re.compile(r"\b(?:not?|never|neither|nor|except|without|unlike|instead|rather than|\w+n['’]t)\b", re.I)


def judge_rows(
    name: str, kind: str, read: Callable, answer_texts: list, solution: list, same=operator.eq,
    log_extra: LogExtra | None = None,
) -> list:  # fmt: skip
    """Parse and compare n answers and n solutions.

    Args:
        name: reward name, for error messages.
        kind: valid solutions, for error messages, such as "a number".
        read: parses a string, returns None if invalid.
        answer_texts: n answers.
        solution: n solutions.
        same: compares a parsed solution with a parsed answer.
        log_extra: logs reasons for rewards below 1.
    Returns:
        1.0 for correct answers, 0.0 for wrong ones, None without a solution
    Raises:
        UserError: a solution cannot be parsed.
    """
    scored = []  # (reward, reason) per answer
    for answer, truth in zip(answer_texts, solution, strict=True):
        truth_text = find_answer(solution_text(truth)) or solution_text(truth)
        if not truth_text.strip():
            scored.append((None, NO_SOLUTION))
            continue
        right_value = read(unwrap(truth_text.translate(PLAIN_SIGNS)))
        if right_value is None:
            raise UserError(
                f"reward {name}: the solution must be {kind}, but it is {truncate(truth_text, 80)}; correct the row"
            )
        value = read(unwrap(answer.translate(PLAIN_SIGNS))) if answer and len(answer) <= LONGEST else None
        if value is None:
            scored.append((0.0, f"the answer {truncate(answer, 200)} is not {kind}" if answer else NO_ANSWER))
        elif not same(right_value, value):
            scored.append((0.0, f"the answer is {truncate(answer, 200)}, not {truncate(truth_text, 200)}"))
        else:
            scored.append((1.0, None))
    if log_extra is not None:
        log_extra("why", [reason for _, reason in scored])
    return [value for value, _ in scored]


MARKUP = [  # (Markdown or LaTeX inside an answer, plain text)
    (r"(?<!\w)(\*\*|__)([^*_]+)\1(?!\w)", r"\2"),
    (r"\\(?:text|math)(?:bf|it|rm|sf|tt)?\{([^{}]*)\}", r" \1"),
    (r"\\ |~|\\quad", " "),
    (r"\{,\}|\\[!,;]", ""),
    (r"\\([%$])", r"\1"),
]


def replace(patterns: list[tuple[str, str | Callable]], text: str) -> str:
    for pattern, replacement in patterns:
        text = re.sub(pattern, replacement, text)
    return text.strip()


LETTER = r"(?:[(\[{<【]([a-z])[)\]}>】][).:,]*|([a-z])(?:[).:,]+|\s+[-—](?=\s)|(?=\s*$)))"
CHOICE = re.compile(
    rf"(?:(?:the )?(?:(?:correct|final|best|right) )*(?:answer|option|choice)\s+)*{LETTER}\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
# second letter of a choice, such as C in "B or C", not the article in "B. A dog"
OTHER_LETTER = re.compile(r"\b(?:A(?! (?!and|is|or|was)[a-z])|[B-Z]|[b-hj-z])\b|\b[a-z]\)")
NOT_YES = re.compile(rf"\bfalse\b|{DENIED.pattern}", re.IGNORECASE)
NOT_NO = re.compile(r"\b(?:yes|true)\b", re.IGNORECASE)
YES_NO = re.compile(r"(yes|no|true|false)\b([^?]*)", re.IGNORECASE)


def choice(answer_texts: list, solution: list, log_extra=None, **columns) -> list:
    """Return 1.0 if the answer is the correct letter, such as B, (b), B. or "B - a dog".

    Answers such as "B or C", "not B" and "A, B, C" get reward 0.
    """

    def letter(text: str) -> str | None:
        match = CHOICE.fullmatch(replace(MARKUP, text))
        if not match or OTHER_LETTER.search(match[3] or ""):
            return None
        return (match[1] or match[2]).upper()

    return judge_rows(
        "choice", "a choice such as B, (B) or B. a dog", letter, answer_texts, solution, log_extra=log_extra
    )


def yes_no(answer_texts: list, solution: list, log_extra=None, **columns) -> list:
    """Return 1.0 if the answer begins with the correct word, yes (true) or no (false).

    The answer "yes and no" gets reward 0.
    """

    def read(text: str) -> bool | None:
        match = YES_NO.fullmatch(replace(MARKUP, text))
        if not match:
            return None
        word, rest = match.groups()
        is_yes = word.lower() in ("yes", "true")
        contradiction = NOT_YES if is_yes else NOT_NO
        return None if contradiction.search(rest) else is_yes

    return judge_rows("yes_no", "yes or no", read, answer_texts, solution, log_extra=log_extra)


def one_of(answer_texts: list, solution: list, log_extra=None, **columns) -> list:
    """Return 1.0 if the answer equals one of the accepted answers, by the rule of `accuracy`.

    A solution is a list of texts (DocVQA, TextVQA), of {"answer": text} (VQAv2), such a list as text, or one text.
    """
    values, reasons = [], []
    for answer, accepted in zip(answer_texts, solution, strict=True):
        if isinstance(accepted, str):
            accepted = literal_list(accepted) or accepted
        texts = [item["answer"] if isinstance(item, dict) else item for item in _as_list(accepted)]
        scores = [score for score in accuracy([answer] * len(texts), texts) if score is not None]
        values.append(max(scores, default=None))
        reasons.append(
            None if values[-1] else f"the answer is {truncate(answer, 200)}, not one of {truncate(texts, 200)}"
        )
    if log_extra is not None:
        log_extra("why", reasons)
    return values


def _as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def class_name(
    answer_texts: list, solution: list, classes: list | str | None = None, log_extra=None, **columns
) -> list:
    """Return 1.0 if the answer is the correct class name, ignoring case, spaces, - and _.

    Args:
        classes: all class names, or a text file with one per line; then the answer may also be a sentence with exactly
            one class name and no negation.
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
    """Compile a pattern for whole names, longest first: no match of "square" in "green square"."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


LONGEST_NUMBER = 100  # characters per number
NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
WORDS = "|".join(NUMBER_WORDS)
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
UNITS = {  # {kind: {unit: size}}
    "%": {"%": "1/100"},
    "m": {
        "nm": "1e-9", "µm": "1e-6", "mm": "1e-3", "cm": "1e-2", "m": "1", "km": "1e3",
        "in": "0.0254", "ft": "0.3048", "yd": "0.9144", "mi": "1609.344",
    },
    "m^3": {"ml": "1e-6", "cl": "1e-5", "l": "1e-3"},
    "g": {"mg": "1e-3", "g": "1", "kg": "1e3", "oz": "28.349523125", "lb": "453.59237"},
    "s": {"ms": "1e-3", "s": "1", "min": "60", "h": "3600", "day": "86400", "week": "604800"},
}  # fmt: skip
SPELLINGS = {
    "percent": "%", "inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi",
    "meter": "m", "metre": "m", "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm",
    "kilometer": "km", "kilometre": "km", "gram": "g", "kilogram": "kg", "kilo": "kg", "milligram": "mg",
    "ounce": "oz", "pound": "lb", "£": "lb", "$": "dollar", "€": "euro",  # £ and pound must have the same unit
    "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml", "kph": "km/h", "kmh": "km/h", "mph": "mi/h",
    "sec": "s", "second": "s", "minute": "min", "hr": "h", "hour": "h", "degree": "°",
}  # fmt: skip
# words around an ambiguous number, as in "3 or 4"
OTHER_NUMBER = re.compile(
    r"or|and|to|not|plus|minus|times|more|less|fewer|ish|pi|hal(?:f|ves)|thirds?|quarters?|st|[nr]d|th"
    rf"|{WORDS}|(?![ghlms])[a-zµ]"
)

DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
NUMBER = re.compile(
    r"(?:[a-z] ?= ?|[=≈~] ?|about |approximately )?"
    r"(?P<sign>[+-]?) ?(?P<currency>[$€£])?(?:(?P<whole>\d+) (?=\d+ ?/))?"
    rf"(?:(?P<digits>{DIGITS})(?:(?:e| ?[x×*] ?10\^)\{{?(?P<power>[+-]?\d{{1,3}})\}}?| ?/ ?(?P<below>{DIGITS}))?"
    rf"|(?P<word>{WORDS})\b) ?(?P<unit>[%$€£]|°[cf]?|(?P<base>[a-zµ]+)(?:\^?[23])?(?:/[a-z]+(?:\^?[23])?)?)?"
)
LATEX = [
    *MARKUP,
    (r"(\d)(?=\\[cdt]?frac|[¼-¾⅐-⅞])", r"\1 "),  # 1\frac{1}{2} is 1 1/2, not 11/2
    (r"\\[cdt]?frac\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*([\d.,]+)\s*\}|(\d))", r"\1\2/\3\4"),
    ("[¼-¾⅐-⅞]", lambda match: unicodedata.normalize("NFKC", match[0])),
    ("⁄", "/"),  # the slash in a normalized ½
    (r"\\(?:times|cdot)", "×"),
    (r"\^?\\circ|\^\{\\circ\}", "°"),
    (r"(?:degrees?|°) ?([cf])(?:elsius|ahrenheit)?\b", r"°\1"),
    (r"\^\{([23])\}", r"^\1"),
    ("²", "^2"),
    ("³", "^3"),
    (r"\bsquare (\w+)", r"\1^2"),
    (r"\bcubic (\w+)", r"\1^3"),
    (" per ", "/"),
]


def number(answer_texts: list, solution: list, tolerance: float = 0.0, log_extra=None, **columns) -> list:
    """Return 1.0 for the correct number, as 3, 3.0, three, 6/2, "3 apples" or x = 3.

    "3 or 4", 3-5 and wrong units get reward 0. Units are converted (50 mm = 5 cm), and may be missing. 50% equals 0.5
    and 50.

    Args:
        tolerance: maximum relative error; with 0.05 and solution 100, answers from 95 to 105 are correct.
    """
    same = functools.partial(_same, tolerance=Fraction(str(tolerance)))
    return judge_rows("number", "a number", read_number, answer_texts, solution, same, log_extra=log_extra)


def read_number(text: str) -> tuple[Fraction, str] | None:
    """Parse one number with a unit: "1,234.5 cm" becomes (2469/2, "cm"); return None for other strings."""
    if len(text) > LONGEST_NUMBER:
        return None
    match = NUMBER.fullmatch(" ".join(replace(LATEX, text.lower()).split()))
    if not match:
        return None
    word = match["unit"] or ""
    below = _fraction(match["below"] or "1")
    if OTHER_NUMBER.fullmatch(match["base"] or "") or below == 0:
        return None
    if match["word"]:
        value = Fraction(NUMBER_WORDS.index(match["word"]))
    else:
        value = _fraction(f"{match['digits']}e{match['power'] or 0}")
    value = value / below + int(match["whole"] or 0)
    if match["sign"] == "-":
        value = -value
    if word in SCALES:
        value, word = value * SCALES[word], ""
    return value, _unit(match["currency"] or word)


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _unit(word: str) -> str:
    """Return a unit's symbol, such as "in" for "inches"; keep other words."""
    return SPELLINGS.get(word) or SPELLINGS.get(word.removesuffix("s"), word)


def _measure(unit: str) -> tuple[str, Fraction]:
    """Return a unit's kind and size: "cm^2" becomes ("m^2", 1/10000), "apples" becomes ("apple", 1)."""
    if "/" in unit:
        (kind, size), (below, divisor) = map(_measure, unit.split("/"))
        return f"{kind}/{below}", size / divisor
    name = unit.rstrip("^23")
    power = "" if name == unit else f"^{unit[-1]}"
    base = _unit(name)
    for kind, sizes in UNITS.items():
        if base in sizes:
            return kind + power, Fraction(sizes[base]) ** int(power[1:] or 1)
    return re.sub(r"(?:(?<=[sxz])e|(?<=[cs]h)e)?s$", "", base) + power, Fraction(1)


def _same(truth: tuple[Fraction, str], answer: tuple[Fraction, str], tolerance: Fraction) -> bool:
    """Return whether two numbers with units are equal, up to the relative tolerance."""

    def near(a: Fraction, b: Fraction) -> bool:
        return abs(a - b) <= tolerance * abs(a)

    a, unit = truth
    b, other_unit = answer
    if unit and other_unit:
        (kind, size), (other_kind, other_size) = _measure(unit), _measure(other_unit)
        is_degree = "°" in (kind, other_kind) and kind[:1] == other_kind[:1]  # temperatures or angles in degrees
        return (kind == other_kind or is_degree) and near(a * size, b * other_size)
    a_share = a / 100 if unit == "%" else a
    b_share = b / 100 if other_unit == "%" else b
    return near(a, b) or near(a_share, b_share)


ROOT = re.compile(r"√\s*(?:\{([^{}]*)\}|(\([^()]*\)|\d+(?:\.\d+)?|\w))")
LONGEST_MATH = 300  # characters per formula
SECONDS = 2  # time limit per comparison
# too slow to compute: nested powers, large powers, large factorials
HUGE = re.compile(r"(?:\^|\*\*)\W*\d+\W*(?:\^|\*\*)|(?:\^|\*\*)\W*\d{4,}|\d{3,}\s*!|!\s*!")


def math(answer_texts: list, solution: list, log_extra=None, **columns) -> list:
    """Return 1.0 if the answer is an expression, set or equation equal to the solution: 0.5, \\frac12 and 2^{-1}."""
    kind = "an expression that math-verify can read"
    return judge_rows("math", kind, _expressions, answer_texts, solution, _equal, log_extra=log_extra)


def _expressions(text: str) -> list | None:
    """Parse a whole string as one expression."""
    with optional_dependency("math", "reward math needs math-verify"):
        from math_verify import LatexExtractionConfig, parse
    if len(text) > LONGEST_MATH or HUGE.search(text):
        return None
    text = ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text).replace("°", r"^\circ")
    boxed = LatexExtractionConfig(boxed_match_priority=0)
    return parse(f"\\boxed{{{text}}}", [boxed], parsing_timeout=_seconds(), extraction_mode="first_match") or None


def _equal(truth: list, answer: list) -> bool:
    from math_verify import verify

    return bool(verify(truth, answer, timeout_seconds=_seconds()))


def _seconds() -> int | None:
    """Return the time limit, None outside the main thread: no math-verify timeouts there."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None
