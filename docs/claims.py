"""The page of benchmarks/claims.py: texts and bars of claims.yaml, verdicts by the runs of claims.json.

python -m docs.claims   # docs/claims.md and docs/claims/*.svg; benchmarks/claims.py does it too
"""

import json
import math
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


@dataclass(frozen=True)
class Figure:
    """A difference of two arms, seed by seed, and the bar that decides; without arms an exact one of claims.json."""

    words: str
    measure: str
    arm: str = ""
    than: str = ""
    bar: float = 0.0
    share: bool = False  # of what `than` has, or plainly the difference
    at_most: bool = False  # a control that must stay below its bar

    def values(self, found: dict) -> list[float]:
        """Of each seed that both arms have."""
        if not self.arm:
            return found["exact"][self.measure]
        runs, measure = found["runs"], MEASURES[self.measure]
        seeds = sorted(runs.get(self.arm, {}).keys() & runs.get(self.than, {}).keys(), key=int)
        pairs = [[measure(Result(**runs[name][seed])) for name in (self.arm, self.than)] for seed in seeds]
        return [arm / than - 1 if self.share else arm - than for arm, than in pairs]

    def interval(self, found: dict) -> tuple[float, float, float]:
        """Mean, and the ends of its 95 % interval (Student's t)."""
        values = self.values(found)
        mean, wide = statistics.mean(values), 0.0
        if len(set(values)) > 1:
            wide = T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
        return mean, mean - wide, mean + wide

    def above(self, found: dict) -> bool | None:
        """Whether the whole interval is above the bar (True) or below it (False); None: the bar is in it."""
        _, low, high = self.interval(found)
        return True if low > self.bar else False if high < self.bar else None


VERDICTS = {True: "holds here", False: "does not hold here", None: "undecided"}


@dataclass(frozen=True)
class Claim:
    """One claim; `says` is ours, the paper's numbers are its."""

    title: str
    paper: str
    says: str
    why: str
    figure: Figure
    control: Figure
    note: str = ""
    more: list[str] = field(default_factory=list)  # arms that the picture shows too

    @property
    def arms(self) -> list[str]:
        """The arms of its figures and its picture."""
        named = (self.figure.than, self.figure.arm, self.control.than, self.control.arm, *self.more)
        return [name for name in dict.fromkeys(named) if name]


TEXTS = yaml.safe_load((DOCS / "claims.yaml").read_text())
CLAIMS = [Claim(**texts | {name: Figure(**texts[name]) for name in ("figure", "control")}) for texts in TEXTS["claims"]]


def page() -> str:
    """claims.md: the frame around a table of verdicts and a section for each claim."""
    found = json.loads(FILE.read_text())
    rows = [
        f"| [{claim.title}](#{anchor(number, claim)}) | {shown(claim.figure, found)} | over {claim.figure.bar:g} | "
        f"{VERDICTS[claim.figure.above(found)]} | {held(claim.control, found)} |"
        for number, claim in enumerate(CLAIMS, start=1)
    ]
    runs = [run for arm in found["runs"].values() for run in arm.values()]
    words = {
        "verdicts": "\n".join(["| claim | measured | bar | verdict | its control |", "|---|---|---|---|---|", *rows]),
        "claims": "\n\n".join(section(number, claim, found) for number, claim in enumerate(CLAIMS, start=1)),
        "runs": str(len(runs)),
        "hours": f"{sum(run['cpu_seconds'] for run in runs) / 3600:.1f}",
        "pictures": str(PICTURES),
        "drawn": str(DRAWN),
        **{name: found[name] for name in ("machine", "commit")},
    }
    text = TEXTS["frame"]
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def anchor(number: int, claim: Claim) -> str:
    """Where GitHub puts a heading."""
    kept = "".join(c for c in f"{number} {claim.title}".lower() if c.isalnum() or c in " -")
    return kept.replace(" ", "-")


def shown(figure: Figure, found: dict) -> str:
    """Mean and interval of a figure."""
    mean, low, high = figure.interval(found)
    if low == high:
        return f"{mean:+.3f}"
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def held(control: Figure, found: dict) -> str:
    """Whether a control is on its side of the bar."""
    return {None: "undecided", control.at_most: "**not as it must**"}.get(control.above(found), "as it must")


def section(number: int, claim: Claim, found: dict) -> str:
    """A claim's part of the page."""
    figure, control = claim.figure, claim.control
    values = figure.values(found)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    side, share = "below" if control.at_most else "over", ", as a share" if figure.share else ""
    of = f", standard error {error:.3f}, {len(values)} {'seeds' if claim.arms else 'policies'}" if error else ", exact"
    lines = [
        f"### {number} {claim.title}\n",
        f"{claim.paper}: {claim.says} {claim.why}\n",
        f"- {figure.words}{share} (over {figure.bar:g}): {shown(figure, found)}{of}: "
        f"**{VERDICTS[figure.above(found)]}**.",
        f"- Control: {control.words} ({side} {control.bar:g}): {shown(control, found)}, {held(control, found)}.",
    ]
    lines += [f"\n{claim.note}"] if claim.note else []
    lines += [f"\n![{claim.title}: each arm, a dot a seed](claims/{number:02}.svg)"] if claim.arms else []
    return "\n".join(lines)


def picture(claim: Claim) -> str:
    """A line for each arm: a dot for each seed, a tick at their mean."""
    measure, runs = MEASURES[claim.figure.measure], json.loads(FILE.read_text())["runs"]
    arms = {name: [measure(Result(**run)) for run in runs[name].values()] for name in claim.arms}
    left, wide, step, top = 190, 330, 26, 46
    height = top + step * len(arms) + 34
    most = 1.0
    if claim.figure.measure == ENTROPY:
        most = math.ceil(max(map(max, arms.values())) * 20) / 20
    drawing = Picture(left + wide + 70, height, f"{claim.title}: {claim.figure.measure} of each arm")
    drawing.text(16, 26, claim.figure.measure, 14, anchor="start", bold=True)
    floor = top + step * len(arms)
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = left + wide * share
        drawing.line([(x, top - 6), (x, floor)], FAINT)
        drawing.text(x, floor + 18, f"{most * share:.3g}", 12, SOFT)
    for row, (name, values) in enumerate(arms.items()):
        y = top + step * row + step / 2
        colour = ORANGES if name == claim.figure.arm else BLUES
        drawing.text(left - 12, y + 4, name, 12, INK, "end")
        drawing.line([(left, y), (left + wide, y)], FAINT)
        for value in values:
            drawing.lines.append(
                f"<circle cx='{left + wide * value / most:.1f}' cy='{y:g}' r='4' fill='{colour[1]}' fill-opacity='.7'/>"
            )
        x = left + wide * statistics.mean(values) / most
        drawing.line([(x, y - 9), (x, y + 9)], colour[0], 2.5)
        drawing.text(left + wide + 14, y + 4, f"{statistics.mean(values):.3f}".lstrip("0"), 12, colour[0], "start")
    return drawing.svg()


PAGES = {"claims.md": page}
PAGES |= {
    f"claims/{number:02}.svg": partial(picture, claim) for number, claim in enumerate(CLAIMS, start=1) if claim.arms
}


def main():
    """Write the page and its pictures."""
    for name, made in PAGES.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    main()
