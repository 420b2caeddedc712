"""Draw the curves in docs/look.md, and write its table from docs/curves/look.json.

python -m docs.scripts.make_pages    # after benchmarks/look.py
"""

import random
from statistics import mean

from docs.scripts.it_learns import chart, read, write_tables
from docs.scripts.picture import BLUES, DOCS, ORANGES, SOFT, Picture

COLORS = {"late grpo": BLUES[0], "late more sft": ORANGES[0], "late shuffled rewards": SOFT}
KINDS = "sum", "digit", "blank", "exchanged"


def share(bits: str) -> float:
    """Return the share of right answers; bits: a 1 for each right answer, else 0."""
    return bits.count("1") / len(bits)


def accuracy_rows(results: dict) -> list[str]:
    """Return the table rows: one per run."""
    rows = []
    for run in results["runs"]:
        greedy = " -> ".join(f"{value:.3f}" for value in run["greedy"])
        cells = [run["run"], str(run["seed"]), greedy, *(f"{share(run['right'][kind]):.3f}" for kind in KINDS)]
        rows.append(f"| {' | '.join([*cells, str(run['cpu_seconds'])])} |")
    return rows


def interval(pairs: list[tuple[str, str]], draws: int = 2000) -> tuple[float, float, float]:
    """Return the mean difference between two arms, and its 95 % interval (bootstrap over seeds and rows).

    Args:
        pairs: (right answers of one arm, of the other) per seed, as for `share`.
    """
    rng = random.Random(0)
    gaps = [[int(a) - int(b) for a, b in zip(*pair, strict=True)] for pair in pairs]
    count = len(gaps[0])
    found = []
    for _ in range(draws):
        rows = rng.choices(range(count), k=count)
        found.append(mean(mean(seed[row] for row in rows) for seed in rng.choices(gaps, k=len(gaps))))
    found.sort()
    return mean(map(mean, gaps)), found[draws // 40], found[-draws // 40]


def draw(results: dict) -> str:
    """Draw accuracies of GRPO, more SFT and shuffled rewards from one start."""
    picture = Picture(760, 320, "Rewards for sums teach a pretrained decoder to see digits, and more SFT does not")
    begin = next(run for run in results["runs"] if run["run"] == "more sft")
    sums, digits = [], []
    for run in results["runs"]:
        if run["run"] in COLORS:
            color = COLORS[run["run"]]
            sums.append(([step / run["steps"][-1] for step in run["steps"]], run["greedy"], color, 3))
            digits.append(([0, 1], [share(model["right"]["digit"]) for model in (begin, run)], color, 3))
    for left, title, curves in (
        (60, "96 held-out sums, greedy", sums),
        (420, "128 single digits, never rewarded", digits),
    ):
        picture.text(left, 22, title, 15, anchor="start", bold=True)
        chart(picture, left, 1, "share of the CPU time after SFT", curves)
    for place, (name, color) in enumerate(COLORS.items()):
        picture.text(60 + 120 * place, 44, name.removeprefix("late "), 14, color, "start", bold=True)
    return picture.svg()


PICTURES = {"images/look.svg": lambda: draw(read("look"))}


def page() -> str:
    """Return the page with a new table."""
    return write_tables(DOCS / "look.md", {"run": lambda: accuracy_rows(read("look"))})
