"""Draw the picture in docs/your_paper.md, and write its table from docs/curves/methods.json.

python -m docs.scripts.make_pages    # after benchmarks/methods.py
"""

from statistics import mean

from docs.scripts.it_learns import read, write_tables
from docs.scripts.picture import BLUES, DOCS, FAINT, INK, ORANGES, SOFT, Picture

NAMES = {
    "grpo": "GRPO", "vppo": "VPPO", "papo": "PAPO", "noisy_rollout": "NoisyRollout", "pgpo": "PGPO", "nsr": "NSR",
    "aspo": "ASPO",
}  # fmt: skip
ACROSS, DOWN, WIDTH, HEIGHT = 260, 190, 200, 120  # panel and chart sizes in pixels
WINDOW = 10  # steps in the running mean of rewards


def gap(found: dict) -> str:
    """Return a paired difference with its interval, bold if the interval leaves out 0."""
    text = f"{found['difference']:+.3f}±{found['half_width']:.3f}"
    return text if found["verdict"] == "not shown" else f"**{text}**"


def arm_rows(results: dict) -> list[str]:
    """Return the table rows: arm, accuracy, blind accuracy, and differences to GRPO; for GRPO, to the start."""
    rows = []
    for arm, found in results["comparison"].items():
        name = {"sft": "start", "grpo": "GRPO (- start)"}.get(arm, NAMES.get(arm))
        gaps = [gap(found[key]) if arm != "sft" else "" for key in ("accuracy", "sees")]
        rows.append(f"| {name} | {found['accuracy']['mean']:.3f} | {found['blind']['mean']:.3f} | {' | '.join(gaps)} |")
    return rows


def smooth(values: list[float]) -> list[float]:
    """Return running means over WINDOW values."""
    return [mean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]


def draw(results: dict) -> str:
    """Draw training rewards: a panel for each method beside GRPO, thin lines per seed, thick ones for the mean."""
    picture = Picture(3 * ACROSS + 10, 2 * DOWN + 30, "Training reward of six methods, each beside GRPO")
    picture.text(12, 20, "training reward (at most 1.5) over steps:", 14, INK, "start", bold=True)
    picture.text(330, 20, "GRPO", 14, BLUES[0], "start", bold=True)
    picture.text(380, 20, "and the method", 14, ORANGES[0], "start", bold=True)
    curves = {arm: [smooth(run["reward"]) for run in results["runs"] if run["arm"] == arm] for arm in NAMES}
    methods = [arm for arm in NAMES if arm != "grpo"]
    for number, arm in enumerate(methods):
        left, top = 40 + ACROSS * (number % 3), 60 + DOWN * (number // 3)
        steps = len(curves["grpo"][0])

        def place(step: int, reward: float, left=left, top=top, steps=steps) -> tuple[float, float]:
            return round(left + WIDTH * step / steps, 1), round(top + HEIGHT * (1 - reward / 1.5), 1)

        picture.text(left, top - 8, NAMES[arm], 14, INK, "start", bold=True)
        for reward in (0, 0.5, 1, 1.5):
            picture.line([place(0, reward), place(steps, reward)], FAINT, 1)
            picture.text(left - 6, place(0, reward)[1] + 4, f"{reward:g}", 11, SOFT, "end")
        picture.text(left, top + HEIGHT + 15, "0", 11, SOFT)
        picture.text(left + WIDTH, top + HEIGHT + 15, f"{steps}", 11, SOFT)
        for thick in (False, True):
            for name, shades in (("grpo", BLUES), (arm, ORANGES)):
                lines = [[mean(values) for values in zip(*curves[name], strict=True)]] if thick else curves[name]
                for line in lines:
                    points = [place(step, reward) for step, reward in enumerate(line, 1)]
                    picture.line(points, shades[0] if thick else shades[2], 2.5 if thick else 0.8)
    return picture.svg()


PICTURES = {"images/methods.svg": lambda: draw(read("methods"))}


def page() -> str:
    """Return the page with a new table."""
    return write_tables(DOCS / "your_paper.md", {"arm": lambda: arm_rows(read("methods"))})
