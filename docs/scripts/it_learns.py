"""Draw the curves in docs/it_learns.md, and write its tables from the JSON files in docs/curves.

python -m docs.scripts.make_pages    # after benchmarks/same_curve.py, sums.py or two_steps.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from docs.scripts.picture import BLUES, DOCS, FAINT, INK, ORANGES, SOFT, Picture
from recipes.sums import TRAINED

PAGE = DOCS / "it_learns.md"
COLORS = {"minivlmrl": BLUES, "TRL": ORANGES}
EVERY = 40  # steps between rows of the table beside TRL
TOP, BOTTOM, WIDTH = 60, 260, 290  # chart edges in pixels


def read(name: str) -> dict:
    return json.loads((DOCS / "curves" / f"{name}.json").read_text(encoding="utf-8"))


def chart(picture: Picture, left: float, last: float, label: str, curves: list[tuple[list, list, str, float]]):
    """Draw curves (x values, shares, color, line width), with x from 0 to `last`."""

    def place(x: float, share: float) -> tuple[float, float]:
        return round(left + WIDTH * x / last, 1), round(BOTTOM - (BOTTOM - TOP) * share, 1)

    for share in (0, 0.25, 0.5, 0.75, 1):
        picture.line([place(0, share), place(last, share)], FAINT, 1)
        picture.text(left - 8, place(0, share)[1] + 5, f"{share:g}", 14, SOFT, "end")
    for x in (0, last / 2, last):
        picture.text(place(x, 0)[0], BOTTOM + 20, f"{x:g}", 14, SOFT)
    picture.text(left + WIDTH / 2, BOTTOM + 42, label, 15, INK)
    for xs, shares, color, thick in curves:
        picture.line([place(*point) for point in zip(xs, shares, strict=True)], color, thick)


def draw_both(results: dict, title: str, subject: str) -> str:
    """Draw the accuracy of all runs of both trainers, over steps and over CPU seconds."""
    runs = results["runs"]
    picture = Picture(760, 320, title)
    for number, (side, colors) in enumerate(COLORS.items()):
        picture.text(60 + 150 * number, 32, side, 18, colors[0], "start", bold=True)
    picture.text(700, 32, f"accuracy on {subject}", 15, INK, "end")
    shades = [(run, COLORS[run["side"]][1]) for run in runs]
    by_step = [(run["steps"], run["accuracy"], shade, 1.5) for run, shade in shades]
    for side, colors in COLORS.items():
        mine = [run for run in runs if run["side"] == side]
        means = [mean(values) for values in zip(*(run["accuracy"] for run in mine), strict=True)]
        by_step.append((mine[0]["steps"], means, colors[0], 4))
    chart(picture, 60, runs[0]["steps"][-1], "GRPO steps", by_step)
    timed = [(run, shade) for run, shade in shades if run["cpu_seconds"]]
    by_time = [(run["cpu_seconds"], run["accuracy"], shade, 2) for run, shade in timed]
    longest = max(run["cpu_seconds"][-1] for run, _ in timed)
    chart(picture, 420, 50 * -(-longest // 50), "CPU seconds", by_time)
    return picture.svg()


def draw_same_curve(results: dict) -> str:
    title = "TRL and minivlmrl learn the same curve over steps, and minivlmrl sooner over seconds"
    return draw_both(results, title, "256 held-out pictures")


def draw_sums(results: dict) -> str:
    """Draw the held-out accuracy, sampled and greedy, for all runs of recipes/sums.yaml."""
    picture = Picture(760, 320, "A pretrained model learns arithmetic from rewards, but not from shuffled rewards")
    last = max(run["steps"][-1] for run in results["runs"])
    for left, way in ((60, "sampled"), (420, "greedy")):
        picture.text(left, 32, f"accuracy on 256 held-out rows, {way}", 15, INK, "start", bold=True)
        curves = [(run["steps"], run[way], BLUES[0] if run["run"] == "grpo" else SOFT, 3) for run in results["runs"]]
        chart(picture, left, last, "GRPO steps; gray: shuffled rewards", curves)
    return picture.svg()


def spread(values: list[float], digits: int = 3) -> str:
    """Format mean and range, such as 0.90 (0.85 to 0.93)."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def same_curve_rows(results: dict) -> list[str]:
    """Return the table rows that compare both trainers."""
    rows = []
    for number, step in enumerate(results["runs"][0]["steps"]):
        if step % EVERY:
            continue
        cells = [str(step)]
        for value, digits in (("accuracy", 3), ("cpu_seconds", 0)):
            for side in COLORS:
                runs = [run for run in results["runs"] if run["side"] == side and run[value]]
                cells.append(spread([run[value][number] for run in runs], digits))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def criterion_rows(results: dict) -> list[str]:
    """Return the table rows about the criterion in benchmarks/same_curve.py."""
    rows = []
    for name, found in results["test"].items():
        low, high = found["interval"]
        lead = f"{round(found['lead'], 3) + 0.0:.3f} ({low:.3f} to {high:.3f})"
        leads = f"{found['seeds that TRL leads']} of {found['seeds']}"
        rows.append(f"| {name} | {found['minivlmrl']:.3f} | {found['TRL']:.3f} | {lead} | {found['p']:.3f} | {leads} |")
    return rows


def sums_rows(results: dict) -> list[str]:
    """Return the table rows about runs of recipes/sums.yaml."""
    rows = []
    for run in results["runs"]:
        accuracies = [f"{run[way][i]:.3f}" for i in (0, -1) for way in ("sampled", "greedy")]
        cells = [f"{run['run']}, seed {run['seed']}", str(run["steps"][-1]), *accuracies, f"{run['cpu_seconds'] or ''}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def kind_rows(results: dict) -> list[str]:
    """Return the table rows about kinds of problems in the first run, and about other questions."""
    before, after = results["before"], results["runs"][0]
    rows = []
    for kind, value in before["kinds"].items():
        name = kind if kind in TRAINED else f"{kind}, never trained"
        rows.append(f"| {name} | {value:.3f} | {after['kinds'][kind]:.3f} |")
    right = [f"{mean(x['right'] for x in model['questions'].values()):.3f}" for model in (before, after)]
    return [*rows, f"| ten questions about other things | {' | '.join(right)} |"]


def two_steps_rows(results: dict) -> list[str]:
    """Return the table rows about recipes/two_steps.yaml: one per run and evaluation."""
    rows = []
    for run in results["runs"]:
        for at, sampled, greedy in zip(run["at"], run["sampled"], run["greedy"], strict=True):
            rows.append(f"| {run['run']} | {at} | {sampled:.3f} | {greedy:.3f} |")
    return rows


TABLES = {  # {first heading cell: rows}
    "after steps": lambda: same_curve_rows(read("same_curve")),
    "criterion": lambda: criterion_rows(read("same_curve")),
    "run": lambda: sums_rows(read("sums")),
    "kind": lambda: kind_rows(read("sums")),
    "two steps": lambda: two_steps_rows(read("two_steps")),
}
PICTURES = {
    "images/same_curve.svg": lambda: draw_same_curve(read("same_curve")),
    "images/sums.svg": lambda: draw_sums(read("sums")),
}


def write_tables(page: Path, tables: dict[str, Callable[[], list[str]]]) -> str:
    """Return a page with new rows in the tables that start with a heading cell."""
    text = page.read_text(encoding="utf-8")
    for heading, rows in tables.items():
        table = rf"(?m)(^\| {heading} \|.*\n\|[-|]+\n)(?:\|.*\n)+"
        written = "\n".join(rows()) + "\n"
        text, count = re.subn(table, lambda match, written=written: match[1] + written, text)
        assert count == 1, heading
    return text


def page() -> str:
    """Return the page with new tables."""
    return write_tables(PAGE, TABLES)
