"""Rows of reward_table.yaml, plus answers too long for that file."""

from pathlib import Path

import yaml

from tests.helpers.links import ROOT

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TAKEN, MISSED = (TABLE.pop(f"{name} by math-verify") for name in ("taken", "missed"))
CLASSES = ["frilly", "dotted", "polka-dotted", "zig_zag", "square", "green square", "no entry", "t-shirt"]
NAMES = ("number", "choice", "yes_no", "class_name", "math")
NUMBER, CHOICE, YES_NO, CLASS, MATH = (f"{ROOT}/recipes/answers.py:{name}" for name in NAMES)
LONG = {  # (reward, solution): answers with reward 0
    ("number", "3"): ["3" * 2000, "3" + "0" * 5000, "0" * 200 + "3"],
    ("choice", "B"): ["B" * 5000, "(" * 5000],
    ("yes_no", "yes"): ["yes" * 2000],
    ("class", "frilly"): [", ".join(CLASSES), "frilly " * 5000],
    ("math", "1/2"): ["((((" * 50, "1" * 5000, "\\frac{" * 40],
}
for (reward, solution), answers in LONG.items():
    TABLE[reward][solution]["earns nothing"] += answers
TABLE |= {f"{CLASS}(classes={CLASSES!r})": TABLE.pop("class"), MATH: TABLE.pop("math")}
TABLE |= {NUMBER: TABLE.pop("number"), CHOICE: TABLE.pop("choice"), YES_NO: TABLE.pop("yes_no")}
ROWS = [
    (reward, solution, answer, earned)
    for reward, solutions in TABLE.items()
    for solution, columns in solutions.items()
    for earned, answers in zip((1.0, 0.0), columns.values(), strict=True)
    for answer in answers
]
