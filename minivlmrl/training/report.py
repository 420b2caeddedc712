"""What a run looks like: a small table on the terminal and report.png, curves above a strip of held-out answers."""

import json
from pathlib import Path

from minivlmrl.data.sources import Dataset
from minivlmrl.rollout.rewards import accuracy
from minivlmrl.rollout.rollout import Evaluation

SHOWN = 8  # held-out images in the strip
RIGHT, WRONG = "#1a7f37", "#b42318"


def print_table(summary: dict):
    """Print summary.json as a table."""
    stages = [name for name in summary if name not in ("chance", "seconds")]
    print(f"\n{'held-out':<12}{'sampled':>9}{'greedy':>9}{'format':>9}")
    if summary["chance"] is not None:
        print(f"{'chance':<12}{summary['chance']:>9.3f}{summary['chance']:>9.3f}")
    for name in stages:
        row = summary[name]
        print(f"{name.replace('_', ' '):<12}{row['sampled']:>9.3f}{row['greedy']:>9.3f}{row['format']:>9.3f}")
    print("training: " + ", ".join(f"{name} {value:.1f} s" for name, value in summary["seconds"].items()))


def write_report(folder: Path, summary: dict, rows: Dataset | None, results: dict[str, Evaluation]):
    """Draw report.png from metrics.jsonl and the evaluations.

    Needs matplotlib (the extra `report`); without it says so and leaves the picture out.
    """
    try:
        import matplotlib
    except ImportError:
        print(f"{folder / 'report.png'} is not drawn: matplotlib is missing (pip install 'minivlmrl[report]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = list(results)[-2:] if rows is not None else []
    figure = plt.figure(figsize=(12, 6.4 if evaluations else 3.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.1, 1)) if evaluations else (figure, None)
    _curves(above.subplots(1, 3), lines, summary)
    if evaluations:
        _strip(below, rows, {name: results[name] for name in evaluations})
    figure.savefig(folder / "report.png", dpi=110)
    plt.close(figure)
    print(f"wrote {folder / 'report.png'}")


def _curves(axes, lines: list[dict], summary: dict):
    """Rewards, accuracy by stage, and what the policy does to itself (entropy, KL)."""
    online = [line for line in lines if "reward" in line]
    steps = [line["step"] for line in online]
    for name in (key for key in (online[0] if online else {}) if key == "reward" or key.startswith("rewards/")):
        axes[0].plot(steps, [line[name] for line in online], label=name, linewidth=2 if name == "reward" else 1)
    axes[0].set(title="training reward", xlabel="step")
    stages = [name for name in summary if name not in ("chance", "seconds")]
    for offset, kind in ((-0.2, "sampled"), (0.2, "greedy")):
        heights = [summary[name][kind] for name in stages]
        bars = axes[1].bar([i + offset for i in range(len(stages))], heights, 0.4, label=kind)
        axes[1].bar_label(bars, fmt="%.2f", fontsize=8)
    if summary["chance"] is not None:
        axes[1].axhline(summary["chance"], color="grey", linestyle=":", label="chance")
    axes[1].set_xticks(range(len(stages)), [name.replace("_", " ") for name in stages])
    axes[1].set(title="held-out accuracy", ylim=(0, 1.1))
    for name in ("entropy", "kl"):
        if online and name in online[0]:
            axes[2].plot(steps, [line[name] for line in online], label=f"{name} (nats per token)")
    axes[2].set(title="the policy", xlabel="step")
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)


def _strip(figure, rows: Dataset, results: dict[str, Evaluation]):
    """The first held-out images, what is true, and what the model answers before and after the last stage."""
    count = min([SHOWN, len(rows), *(len(result.greedy_texts) for result in results.values())])
    for i, axis in enumerate(figure.subplots(1, count, squeeze=False)[0]):
        row = rows[i]
        solution = row.columns["solution"]
        if row.images:
            axis.imshow(row.images[0])
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_title(_short(solution), fontsize=9)
        for line, (name, result) in enumerate(results.items()):
            text = result.greedy_texts[i]
            color = RIGHT if accuracy([text], [solution]) == [1.0] else WRONG
            label = f"{name.replace('_', ' ')}:\n{_short(text.rpartition('<answer>')[2].partition('</answer>')[0])}"
            axis.text(0.5, -0.08 - 0.34 * line, label, color=color, fontsize=8, ha="center", va="top",
                      transform=axis.transAxes)  # fmt: skip
    figure.suptitle("held-out images: the truth above, greedy answers below", fontsize=10)


def _short(text: str, limit: int = 24) -> str:
    """One line of plain text; $ would start a formula."""
    line = " ".join(text.split()).replace("$", r"\$") or "(no answer)"
    return line if len(line) <= limit else line[: limit - 1] + "…"
