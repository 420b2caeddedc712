"""A reward to copy: is the answer the number of the solution, in any way in which people write it?

In a recipe, from the folder where the command runs:
    rewards: {recipes/number.py:number(tolerance=0.05): 1.0}
"""

import functools
import re
from fractions import Fraction

from minivlmrl.reward_functions.judges import judge_rows

LONGEST = 100  # characters
WORDS = "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen"
WORDS += "|seventeen|eighteen|nineteen|twenty"
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
# units by what they measure, with their sizes; any other word after a number is not looked at
KINDS = {
    "": "%=1/100",
    "m": "mm=1/1000 cm=1/100 m=1 km=1000 in=254/10000 ft=3048/10000",
    "g": "mg=1/1000 g=1 kg=1000",
    "s": "s=1 min=60 h=3600",
}
SIZES = [(kind, size.split("=")) for kind, sizes in KINDS.items() for size in sizes.split()]
UNITS = {unit: (kind, size) for kind, (unit, size) in SIZES}
SPELLINGS = "percent=% inch=in inches=in foot=ft feet=ft meter=m metre=m millimeter=mm"
SPELLINGS += " millimetre=mm centimeter=cm centimetre=cm kilometer=km kilometre=km gram=g"
SPELLINGS += " kilogram=kg milligram=mg sec=s second=s minute=min hr=h hour=h"
SPELLINGS = dict(pair.split("=") for pair in SPELLINGS.split())
# after a number they make another one of it, or leave room for more
OTHER = re.compile(
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


def number(answer_texts: list, solution: list, tolerance: float = 0.0, **columns) -> list:
    """1.0 for the number of the solution: 3, 3.0, three, 6/2, 3 apples, x = 3. Not: 3 or 4, 3-5.

    Units of one kind are converted (50 mm is 5 cm), 50% is 0.5 as well as 50, and may be left out.

    Args:
        tolerance: by what share of the solution it may be off: 0.05 takes 95 to 105 for 100.
    """
    same = functools.partial(_same, tolerance=Fraction(str(tolerance)))
    return judge_rows("number", "number", read_number, answer_texts, solution, same)


def read_number(text: str) -> tuple[Fraction, str] | None:
    """Read "1,234.5 cm" as (2469/2, "cm"); None: it is not one number."""
    if len(text) > LONGEST:
        return None
    for pattern, simple in LATEX:
        text = re.sub(pattern, simple, text)
    match = NUMBER.fullmatch(" ".join(text.lower().split()))
    if not match:
        return None
    word, below = match["unit"] or "", Fraction((match["below"] or "1").replace(",", ""))
    if OTHER.fullmatch(word) or below == 0:
        return None
    names = word, SPELLINGS.get(word), SPELLINGS.get(word.removesuffix("s"))
    unit = next(filter(UNITS.__contains__, names), word)
    digits = (match["digits"] or str(WORDS.split("|").index(match["word"]))).replace(",", "")
    value = Fraction(f"{digits}e{match['power'] or 0}") / below + int(match["whole"] or 0)
    value *= SCALES.get(word, 1) * (-1 if match["sign"] == "-" else 1)
    return value, "" if word in SCALES else unit


def _same(truth: tuple[Fraction, str], answer: tuple[Fraction, str], tolerance: Fraction) -> bool:
    def near(a: Fraction, b: Fraction) -> bool:
        return abs(a - b) <= tolerance * abs(a)

    (a, unit), (b, other) = truth, answer
    if unit in UNITS and other in UNITS:
        (kind, size), (other_kind, other_size) = UNITS[unit], UNITS[other]
        return kind == other_kind and near(a * Fraction(size), b * Fraction(other_size))
    return near(a, b) or near(a / 100 if unit == "%" else a, b / 100 if other == "%" else b)
