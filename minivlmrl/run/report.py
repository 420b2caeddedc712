"""The results of a run: a table on the terminal, and report.png with curves and held-out
answers."""

import json
import warnings
from pathlib import Path

from minivlmrl.chat import content_parts
from minivlmrl.data.boxes import Box
from minivlmrl.reward_functions.box_rewards import answered_boxes
from minivlmrl.rows import Dataset

SHOWN = 8  # held-out images in the strip
RIGHT, WRONG, TRUE = "#1a7f37", "#b42318", "black"


def print_table(summary: dict, chance_name: str = "chance", rows: int = 0):
    """Print summary.json as a table: what was measured on so many held-out rows."""
    stages = {name: row for name, row in summary.items() if name not in ("chance", "seconds")}
    columns = list(dict.fromkeys(key for row in stages.values() for key in row)) or [
        "sampled",
        "greedy",
    ]
    widths = {name: max(9, len(name) + 2) for name in columns}
    first = max(12, len(chance_name) + 1, *(len(name) + 1 for name in stages))
    if stages:
        print(
            f"\n{f'held-out {rows}':<{first}}"
            + "".join(f"{name:>{width}}" for name, width in widths.items())
        )
    if summary["chance"] is not None:
        print(f"{chance_name:<{first}}" + f"{summary['chance']:>9.3f}" * 2)
    for name, row in stages.items():
        cells = [
            f"{row[column]:>{width}.3f}" if column in row else ""
            for column, width in widths.items()
        ]
        print(f"{name.replace('_', ' '):<{first}}" + "".join(cells))
    print(
        "training: "
        + ", ".join(f"{name} {value:.1f} s" for name, value in summary["seconds"].items())
    )


def write_report(
    folder: Path, summary: dict, rows: Dataset | None, results: dict, chance_name: str = "chance"
):
    """Draw report.png from metrics.jsonl and the last two evaluations of held-out rows;
    needs the extra `report`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(
            f"{folder / 'report.png'} is not drawn: matplotlib is missing (pip install "
            "'minivlmrl[report]')"
        )
        return
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = list(results)[-2:] if rows is not None else []
    figure = Figure(figsize=(12, 6.6 if evaluations else 3.4))
    above, below = (
        figure.subfigures(2, 1, height_ratios=(1.1, 1)) if evaluations else (figure, None)
    )
    axes = above.subplots(1, 3, gridspec_kw={"bottom": 0.16, "left": 0.05, "right": 0.98})
    _curves(axes, lines, summary, chance_name)
    if evaluations:
        _strip(below, rows, {name: results[name] for name in evaluations})
    with warnings.catch_warnings():
        # they are drawn as boxes
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(folder / "report.png", dpi=110)
    print(f"wrote {folder / 'report.png'}")


def _curves(axes, lines: list[dict], summary: dict, chance_name: str):
    """Draw the last stage's rewards, accuracy by stage, and the policy's entropy and KL."""
    lines = [line for line in lines if line["stage"] == lines[-1]["stage"]]
    steps = [line["step"] for line in lines]
    curves = {name: [line.get(name) for line in lines] for name in (lines[0] if lines else ())}
    pairs = "reward" not in curves  # rewards of pairs, not of sampled answers
    shown = ("rewards/chosen", "rewards/rejected") if pairs else ("reward", "rewards/")
    for name, values in curves.items():
        if name.startswith(shown) and not name.endswith("std"):
            [bold] = axes[0].plot(
                steps, _smooth(values), label=name.removesuffix("/mean"), linewidth=2
            )
            axes[0].plot(steps, values, color=bold.get_color(), linewidth=0.6, alpha=0.4)
    title = "rewards of pairs" if pairs else "training reward"
    axes[0].set(title=f"{title} (bold: mean of 10 steps)", xlabel="step")
    stages = [name for name in summary if name not in ("chance", "seconds")]
    for offset, kind in ((-0.2, "sampled"), (0.2, "greedy")):
        heights = [summary[name].get(kind, 0.0) for name in stages]
        bars = axes[1].bar([i + offset for i in range(len(stages))], heights, 0.4, label=kind)
        axes[1].bar_label(bars, fmt="%.2f", fontsize=8)
    if summary["chance"] is not None:
        axes[1].axhline(summary["chance"], color="grey", linestyle=":", label=chance_name)
    axes[1].set_xticks(
        range(len(stages)), [name.replace("after_", "after\n").replace("_", " ") for name in stages]
    )
    axes[1].set(title="held-out rows", ylim=(0, 1.1))
    for name in (name for name in ("entropy", "kl") if name in curves):
        axes[2].plot(steps, curves[name], label=f"{name} (nats per token)")
    axes[2].set(title="the policy", xlabel="step")
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, loc="best")


def _strip(figure, rows: Dataset, results: dict):
    """Draw held-out images with the true answer, and the model's answers before and after the last
    stage.

    Images with an answer that became right or wrong (for boxes: an IoU of at least 0.5, or no
    longer) come first.
    """
    right = [[answer.score >= 0.5 for answer in result.answers] for result in results.values()]
    changes = [after - before for before, after in zip(right[0], right[-1], strict=True)]
    order = sorted(range(len(changes)), key=lambda i: changes[i] == 0)[:SHOWN]
    margins = {"top": 0.8, "bottom": 0.3, "left": 0.02, "right": 0.98}
    axes = figure.subplots(1, len(order), squeeze=False, gridspec_kw=margins)[0]
    for i, axis in zip(order, axes, strict=True):
        row = rows[i]
        if row.images or row.videos:
            axis.imshow(row.images[0] if row.images else row.videos[0].frames[0])
        title = solution = row.columns.get("solution")
        text = solution if isinstance(solution, str) else json.dumps(solution)
        boxes = answered_boxes(text, row.images[0].size) if row.images else []
        if boxes or solution is None:
            last = "".join(part.get("text", "") for part in content_parts(row.messages[-1]))
            title = row.columns.get("problem") or last
        axis.set(xticks=[], yticks=[])
        axis.set_title(_short(_inside(title)), fontsize=9)
        for box in boxes:
            _outline(axis, box, TRUE, "-")
        for line, (name, result) in enumerate(results.items()):
            answer, color = result.answers[i], RIGHT if right[line][i] else WRONG
            text, middle = (
                f"{name.replace('_', ' ')}\n{_short(_inside(answer.text))}",
                {"ha": "center", "va": "top"},
            )
            axis.text(
                0.5,
                -0.06 - 0.3 * line,
                text,
                fontsize=8,
                color=color,
                transform=axis.transAxes,
                **middle,
            )
            for box in (
                answered_boxes(answer.text, answer.extent) if boxes and answer.extent else ()
            ):
                _outline(axis, box.to(row.images[0].size), color, (":", "--")[line])
    legend = "above: the true answer"
    if any(axis.lines for axis in axes):
        legend = "above: the question; black: the true box, dotted: before, dashed: after"
    became = (
        f"{changes.count(1)} became right, {changes.count(-1)} wrong (these come first; {legend})"
    )
    figure.suptitle(f"greedy answers to {len(changes)} held-out images: {became}", fontsize=10)


def _inside(text) -> str:
    """What is inside the last answer tags, or all of a text without any;
    some files have their truth in tags too."""
    return str(text).rpartition("<answer>")[2].partition("</answer>")[0]


def _outline(axis, box: Box, color: str, style: str):
    x, y = (box.x1, box.x2, box.x2, box.x1, box.x1), (box.y1, box.y1, box.y2, box.y2, box.y1)
    axis.plot(
        [v - 0.5 for v in x], [v - 0.5 for v in y], color=color, linestyle=style, linewidth=1.8
    )


def _smooth(values: list[float | None], window: int = 10) -> list[float]:
    """Mean of each value and up to window - 1 before it, without None (no reward)."""
    known = [
        [v for v in values[max(0, i - window + 1) : i + 1] if v is not None]
        for i in range(len(values))
    ]
    return [sum(v) / len(v) if v else float("nan") for v in known]


def _short(text: str, limit: int = 24) -> str:
    """One line of printable characters; $ would start a formula."""
    printable = "".join(c if c.isprintable() else " " for c in str(text))
    line = " ".join(printable.split()).replace("$", r"\$") or "(no answer)"
    return line if len(line) <= limit else line[: limit - 1] + "…"
