"""Draw the picture in docs/claims.md, and write its table from docs/curves/claims.json.

python -m docs.scripts.make_pages    # after benchmarks/claims.py
"""

import re

from docs.scripts.it_learns import read, write_tables
from docs.scripts.picture import BLUES, DOCS, FAINT, INK, ORANGES, SOFT, Picture

SHADES = BLUES[0], ORANGES[0], SOFT, BLUES[2]
# {claim: (what is drawn, numbers -> {arm: value per seed})}
PANELS = {
    "deviation": ("weight by success, 0.01 to 0.99", lambda n: {"divided": [*n["weight by success"].values()]}),
    "gspo": (
        "variance, 1 to 64 tokens (at most 3)",
        lambda n: {arm: [min(x["variance"], 3) for x in values.values()] for arm, values in n.items()},
    ),
    "two": ("success", lambda n: {arm: values for arm, values in n.items() if isinstance(values, list)}),
    "negatives": ("pass@256", lambda n: {arm: [last for _, last in values] for arm, values in n.items()}),
    "clip": ("entropy in nats", lambda n: n),
    "pass_at_k": ("pass@256", lambda n: {arm: [curve[-1] for curve in curves] for arm, curves in n.items()}),
    "dpo": ("change of chosen, in nats", lambda n: {arm: [chosen for chosen, _ in xs] for arm, xs in n.items()}),
    "entropy_tokens": ("success", lambda n: n),
    "forgetting": ("forgotten", lambda n: {arm: [run["forgotten"] for run in runs] for arm, runs in n.items()}),
}
ACROSS, DOWN = 250, 200  # panel size in pixels


def claim_rows(results: dict) -> list[str]:
    """Return the table rows: claim, papers, verdict and CPU seconds."""
    rows = []
    for run in results["runs"]:
        paper = re.sub(r"(\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", run["paper"])
        rows.append(f"| {run['claim']} | {paper} | {run['verdict']} | {run['cpu_seconds']:.0f} |")
    return rows


def draw(results: dict) -> str:
    """Draw a panel for each claim: one dot per seed and arm."""
    numbers = {run["name"]: run["numbers"] for run in results["runs"]}
    picture = Picture(3 * ACROSS, 3 * DOWN, "Numbers behind the verdicts, one dot per seed")
    for place, (name, (label, arms_of)) in enumerate(PANELS.items()):
        left, top = ACROSS * (place % 3), DOWN * (place // 3)
        arms = arms_of(numbers[name])
        values = [value for arm in arms.values() for value in arm]
        low, high = min(0, *values), max(0, *values)
        picture.text(left + 12, top + 20, f"{name.replace('_', ' ')}: {label}", 12, INK, "start", bold=True)
        for share in (0, 1):
            y = top + 150 - 115 * share
            picture.line([(left + 45, y), (left + 240, y)], FAINT, 1)
            picture.text(left + 40, y + 4, f"{low + share * (high - low):.2g}", 11, SOFT, "end")
        for column, (arm, dots) in enumerate(arms.items()):
            x = left + 45 + 195 * (column + 0.5) / len(arms)
            for shift, value in enumerate(dots):
                y = top + 150 - 115 * (value - low) / (high - low)
                middle = x + 7 * (shift - (len(dots) - 1) / 2)
                picture.box(middle - 2.5, y - 2.5, 5, 5, SHADES[column % 4])
            picture.text(x, top + 172 + 13 * (column % 2), arm, 11, SHADES[column % 4])
    return picture.svg()


PICTURES = {"images/claims.svg": lambda: draw(read("claims"))}


def page() -> str:
    """Return the page with a new table."""
    return write_tables(DOCS / "claims.md", {"claim": lambda: claim_rows(read("claims"))})
