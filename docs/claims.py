"""The page of benchmarks/claims.py: texts and bars of claims.yaml, verdicts by the runs of claims.json.

python -m docs.claims   # docs/claims.md and docs/claims/*.svg; benchmarks/claims.py does it too
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

from docs.draw import BLUES, FAINT, INK, ORANGES, SOFT, Picture

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "benchmarks"))
from claims import DRAWN, FILE, PICTURES, Result, T  # noqa: E402

RIGHT, PASS32, ENTROPY = "right answers", "pass@32", "entropy, nats a token"
UNSEEN = "right, unseen combinations"
MEASURES: dict[str, Callable[[Result], float]] = {
    RIGHT: lambda run: run.accuracy,
    PASS32: lambda run: run.passed(32),
    ENTROPY: lambda run: run.end_entropy,
    UNSEEN: lambda run: run.passed(1, unseen=True),
}


def values_of(arm: str, measure: str, found: dict) -> dict[str, float]:
    """Of each seed of an arm, or of each policy of an exact one."""
    if arm in found["exact"]:
        return {str(i): value for i, value in enumerate(found["exact"][arm])}
    runs = found["runs"].get(arm, {})
    return {seed: MEASURES[measure](Result(**runs[seed])) for seed in sorted(runs, key=int)}


@dataclass(frozen=True)
class Figure:
    """A difference of two arms, seed by seed, and the bar that decides."""

    measure: str
    arm: str
    than: str
    bar: float
    share: bool = False  # of what `than` has, or plainly the difference
    at_most: bool = False  # a control that must stay below its bar

    def pairs(self, found: dict) -> list[tuple[float, float]]:
        """Both arms' values, of each seed that both have."""
        arm, than = (values_of(name, self.measure, found) for name in (self.arm, self.than))
        return [(arm[seed], than[seed]) for seed in arm if seed in than]

    def values(self, found: dict) -> list[float]:
        """The difference for each seed."""
        return [arm / than - 1 if self.share else arm - than for arm, than in self.pairs(found)]

    def interval(self, found: dict) -> tuple[float, float, float]:
        """Mean, and the ends of its 95 % interval (Student's t)."""
        values = self.values(found)
        mean = statistics.mean(values)
        wide = T[len(values)] * standard_error(values) if len(values) > 1 else 0.0
        return mean, mean - wide, mean + wide

    def above(self, found: dict) -> bool | None:
        """Whether the whole interval is above the bar (True) or below it (False); None: the bar is in it."""
        _, low, high = self.interval(found)
        return True if low > self.bar else False if high < self.bar else None

    def chance(self, found: dict) -> float | None:
        """Of a mean so far from the bar, if it lay on it; None: arithmetic has no chance."""
        values = self.values(found)
        if len(values) == 1:
            return None
        distance = statistics.mean(values) - self.bar
        return two_sided(distance / standard_error(values), len(values) - 1)

    def on_the_floor(self, found: dict) -> bool:
        """Whether no run of either arm reaches the bar, so that no difference could."""
        return not self.share and all(max(pair) < self.bar for pair in self.pairs(found))


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def two_sided(t: float, degrees: int) -> float:
    """Chance that Student's t is at least so far from 0: Abramowitz and Stegun, 26.7.3 and 26.7.4.

    Example: two_sided(2.78, 4) is 0.0498.
    """
    angle = math.atan(abs(t) / math.sqrt(degrees))
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for n in range(2 + is_odd, degrees, 2):
        term *= (n - 1) / n * math.cos(angle) ** 2
        total += term
    inside = math.sin(angle) * total
    if is_odd:
        inside = 2 / math.pi * (angle + inside)
    return 1 - inside


def stay(chances: dict, error: float = 0.05) -> set:
    """Names that Holm's correction leaves decided: the smallest within error / m, the next error / (m - 1)."""
    kept = set()
    for number, name in enumerate(sorted(chances, key=chances.get)):
        if chances[name] > error / (len(chances) - number):
            break
        kept.add(name)
    return kept


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, and what was done here."""

    title: str
    paper: str  # its address
    text: str  # see with_means
    figure: Figure
    control: Figure
    more: list[str] = field(default_factory=list)  # arms that the picture shows too
    when_it_holds: str = "holds here"

    @property
    def arms(self) -> list[str]:
        """The arms of its figures and its picture."""
        named = (self.figure.than, self.figure.arm, self.control.than, self.control.arm, *self.more)
        return list(dict.fromkeys(named))

    def verdict(self, found: dict) -> str:
        """In words; a difference within a tolerated loss is said if it is one."""
        above = self.figure.above(found)
        _, low, high = self.figure.interval(found)
        if low == high:
            return "by arithmetic"
        if self.figure.on_the_floor(found):
            return "cannot tell here"
        if above and high < 0:
            return f"within {shown(-self.figure.bar)}, and less"
        return {True: self.when_it_holds, False: "does not hold here", None: "undecided"}[above]

    def of_control(self, found: dict) -> str:
        """Whether the control is on its side of the bar."""
        return {None: "undecided", self.control.at_most: "**no**"}.get(self.control.above(found), "yes")


def with_means(text: str, found: dict) -> str:
    """Put a mean of right answers in the place of {arm}, and a mean difference in that of {arm - other}."""

    def number(match: re.Match) -> str:
        arm, _, other = match[1].partition(" - ")
        if other:
            return shown(Figure(RIGHT, arm, other, 0.0).interval(found)[0])
        return shown(statistics.mean(values_of(arm, RIGHT, found).values()))

    return re.sub("{(.+?)}", number, text)


TEXTS = yaml.safe_load((DOCS / "claims.yaml").read_text())
CLAIMS = [Claim(**texts | {name: Figure(**texts[name]) for name in ("figure", "control")}) for texts in TEXTS["claims"]]


def chances(found: dict) -> dict[tuple[str, str], float]:
    """(title, "figure" or "control") -> chance, of all intervals on the page."""
    named = {
        (claim.title, kind): getattr(claim, kind).chance(found) for claim in CLAIMS for kind in ("figure", "control")
    }
    return {name: chance for name, chance in named.items() if chance is not None}


def page() -> str:
    """claims.md: the frame around a table of verdicts and a paragraph for each claim."""
    found = json.loads(FILE.read_text())
    intervals = chances(found)
    decided = stay(intervals)
    rows = ["| claim | measured > bar | verdict | control holds |", "|---|---|---|---|"]
    paragraphs = []
    for number, claim in enumerate(CLAIMS, start=1):
        verdict = claim.verdict(found)
        if (claim.title, "figure") in decided and verdict not in ("undecided", "cannot tell here"):
            verdict = f"**{verdict}**"
        measured = interval_shown(claim.figure.interval(found))
        title = f"{number} {claim.title}"
        rows.append(f"| {title} | {measured} > {shown(claim.figure.bar)} | {verdict} | {claim.of_control(found)} |")
        paragraphs.append(f"**{number}** <{claim.paper}> {claim.text}\n\n![arms](claims/{number:02}.svg)")
    runs = [run for arm in found["runs"].values() for run in arm.values()]
    words = {
        "verdicts": "\n".join(rows),
        "claims": "\n\n".join(paragraphs),
        "runs": str(len(runs)),
        "hours": f"{sum(run['cpu_seconds'] for run in runs) / 3600:.1f}",
        "pictures": str(PICTURES),
        "drawn": str(DRAWN),
        "intervals": str(len(intervals)),
        **{name: found[name] for name in ("machine", "commit")},
    }
    text = TEXTS["frame"]
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value)
    return with_means(text, found)


def shown(value: float) -> str:
    """Three decimals at most, without the 0 before the point: .05, -.002, 1.25."""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return re.sub(r"^(-?)0\.", r"\1.", text).replace("-0", "0") or "0"


def interval_shown(interval: tuple[float, float, float]) -> str:
    """Mean and interval of a figure."""
    mean, low, high = map(shown, interval)
    return mean if low == high else f"{mean} [{low}, {high}]"


def picture(number: int, claim: Claim) -> str:
    """A line for each arm: a dot for each seed, a tick at their mean. As wide as a phone, so it is not made smaller."""
    found = json.loads(FILE.read_text())
    measure = claim.figure.measure
    arms = {name: [*values_of(name, measure, found).values()] for name in claim.arms}
    left, wide, step, top = 150, 186, 24, 58
    floor = top + step * len(arms)
    least = min(0.0, *map(min, arms.values()))
    most = 1.0
    if measure not in (RIGHT, PASS32, UNSEEN):
        least = math.floor(least * 20) / 20
        most = math.ceil(max(map(max, arms.values())) * 20) / 20
    drawing = Picture(390, floor + 30, f"{claim.title}: {measure} of each arm")
    drawing.text(14, 24, f"{number} {claim.title}", 12, anchor="start", bold=True)
    drawing.text(14, 42, measure, 12, SOFT, anchor="start")

    def place(value: float) -> float:
        return round(left + wide * (value - least) / (most - least), 1)

    for value in (least, (least + most) / 2, most):
        drawing.line([(place(value), top - 4), (place(value), floor)], FAINT)
        drawing.text(place(value), floor + 18, shown(value), 12, SOFT)
    for row, (name, values) in enumerate(arms.items()):
        y = top + step * row + step / 2
        colour = ORANGES if name == claim.figure.arm else BLUES
        mean = statistics.mean(values)
        drawing.text(left - 10, y + 4, name, 12, INK, "end")
        drawing.line([(left, y), (left + wide, y)], FAINT)
        for value in values:
            drawing.lines.append(f"<circle cx='{place(value)}' cy='{y:g}' r='4' fill='{colour[1]}' fill-opacity='.7'/>")
        drawing.line([(place(mean), y - 8), (place(mean), y + 8)], colour[0], 2.5)
        drawing.text(left + wide + 12, y + 4, shown(mean), 12, colour[0], "start")
    return drawing.svg()


PAGES = {"claims.md": page}
PAGES |= {f"claims/{number:02}.svg": partial(picture, number, claim) for number, claim in enumerate(CLAIMS, start=1)}


def main():
    """Write the page and its pictures."""
    for name, made in PAGES.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    main()
