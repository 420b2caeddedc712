"""Draw the curves in docs/look.md, and write its table from docs/curves/look.json.

python -m docs.scripts.make_pages    # after benchmarks/look.py
"""

from statistics import mean

import numpy as np

from docs.scripts.it_learns import chart, read, write_tables
from docs.scripts.picture import BLUES, DOCS, ORANGES, Picture
from recipes.look import SIGNS

COLORS = {"grpo": BLUES, "more sft": ORANGES}
BESIDE = {"accuracy": 3, "cpu_seconds": 1, "peak_gib": 1}  # value of a step: digits
KINDS = "sum", "digit", "blank", "exchanged"


def share(bits: str) -> float:
    """Return the share of right answers; bits: a 1 for each right answer, else 0."""
    return bits.count("1") / len(bits)


def accuracy_rows(results: dict) -> list[str]:
    """Return the table rows: one per run."""
    rows = []
    for run in results["runs"]:
        greedy = [f"{run['greedy'][at]:.3f}" for at in (0, -1)]
        cells = [run["run"], str(run["seed"]), *greedy, *(f"{share(run['right'][kind]):.3f}" for kind in KINDS)]
        rows.append(f"| {' | '.join([*cells, str(run['cpu_seconds'])])} |")
    if "most_frequent" in results["runs"][0]:
        rows.append(f"| the most frequent sum | | | | {results['runs'][0]['most_frequent']['sum']:.3f} | | | | |")
    return rows


def runs_of(results: dict, name: str) -> list[dict]:
    return [run for run in results["runs"] if run["run"] == name]


def compare(results: dict, name: str, other: str, kind: str, draws: int = 2000) -> tuple[float, float, float]:
    """Return the mean difference between two arms, and its 95 % interval: bootstrap over both arms' seeds, and rows."""
    rng = np.random.default_rng(0)
    arms = [np.array([[*map(int, run["right"][kind])] for run in runs_of(results, arm)]) for arm in (name, other)]
    found = []
    for _ in range(draws):
        rows = rng.integers(arms[0].shape[1], size=arms[0].shape[1])  # the same rows for both arms
        found.append(np.subtract(*(arm[rng.integers(len(arm), size=len(arm))][:, rows].mean() for arm in arms)))
    low, high = np.quantile(found, (0.025, 0.975))
    return arms[0].mean() - arms[1].mean(), low, high


COMPARED = (
    ("grpo", "sft", "sum"), ("grpo", "more sft", "sum"), ("more sft", "sft", "sum"), ("grpo", "sft", "digit"),
    ("more sft", "sft", "digit"), ("sft on the sums", "grpo", "sum"),
    ("shuffled rewards", "sft", "sum"),
)  # fmt: skip
TRANSFER = (
    ("signs grpo", "signs sft", "difference"), ("aloud grpo", "aloud sft", "difference"),
    ("aloud grpo", "signs grpo", "difference"),
)  # fmt: skip


def difference_rows(results: dict, compared: tuple) -> list[str]:
    """Return the table rows about differences between arms."""
    rows = []
    for name, other, kind in compared:
        counts = [len(runs_of(results, arm)) for arm in (name, other)]
        if all(counts):
            gap, low, high = compare(results, name, other, kind)
            seeds = "{}, {}".format(*counts)
            of = {"larger": "larger of two"}.get(kind, f"{kind}s")
            cells = [f"{name} - {other}", of, seeds, f"{gap:.3f}", f"{low:.3f} to {high:.3f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def beside_rows(results: dict) -> list[str]:
    """Return the table rows about the first steps of both trainers."""
    rows = []
    for run in results["runs"]:
        cells = [", ".join(f"{value:.{digits}f}" for value in run[name]) for name, digits in BESIDE.items()]
        rows.append(f"| {run['side']} | {' | '.join(cells)} |")
    return rows


def sign_rows(results: dict) -> list[str]:
    """Return the table rows about the held-out sign: one per run."""
    rows = []
    for run in results["runs"]:
        cells = [run["arm"], run["run"], str(run["seed"]), *(f"{share(run['right'][kind]):.3f}" for kind in SIGNS)]
        rows.append(f"| {' | '.join([*cells, str(run['cpu_seconds'])])} |")
    return rows


def signs_by_arm() -> dict:
    """Return the results about signs with the arm in the name of a run, such as "aloud grpo"."""
    runs = read("look_signs")["runs"]
    return {"runs": [{**run, "run": f"{run['arm']} {run['run']}"} for run in runs]}


def draw(results: dict) -> str:
    """Draw accuracies of GRPO and more SFT from one start: thin lines are seeds, thick ones means."""
    picture = Picture(760, 320, "Rewards for sums teach a pretrained decoder to see digits, and more SFT does not")
    [begin] = runs_of(results, "sft")
    sums, digits = [], []
    for name, (dark, light, _) in reversed(COLORS.items()):
        runs = runs_of(results, name)
        greedy = [run["greedy"] for run in runs]
        ends = [[share(model["right"]["digit"]) for model in (begin, run)] for run in runs]
        for curves, found, steps in ((sums, greedy, runs[0]["steps"] if runs else []), (digits, ends, [0, 1])):
            xs = [step / steps[-1] for step in steps]
            curves += [(xs, values, light, 2) for values in found]
            curves += [(xs, [*map(mean, zip(*found, strict=True))], dark, 4)] * bool(found)
    for left, title, curves in (
        (60, "96 held-out sums, greedy", sums),
        (420, "128 single digits, never rewarded", digits),
    ):
        picture.text(left, 22, title, 15, anchor="start", bold=True)
        chart(picture, left, 1, "share of the CPU time after SFT", curves)
    for place, (name, (dark, *_)) in enumerate(COLORS.items()):
        count = len(runs_of(results, name))
        picture.text(60 + 180 * place, 44, f"{name} ({count} seed{'s' * (count > 1)})", 14, dark, "start", bold=True)
    return picture.svg()


PICTURES = {"images/look.svg": lambda: draw(read("look"))}
TABLES = {  # {first heading cell: rows}
    "run": lambda: accuracy_rows(read("look")),
    "difference": lambda: difference_rows(read("look"), COMPARED),
    "arm": lambda: sign_rows(read("look_signs")),
    "sign, difference": lambda: difference_rows(signs_by_arm(), TRANSFER),
    "trainer": lambda: beside_rows(read("look_trl")),
}


def page() -> str:
    """Return the page with new tables."""
    return write_tables(DOCS / "look.md", TABLES)
