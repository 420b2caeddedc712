"""Record answers of the model from parts in from_parts.json, and draw docs/from_parts.svg.

    python benchmarks/from_parts.py vlm work --seeds 0 --runs grpo
    python -m docs.scripts.from_parts work   # record the answers of both models, and the rewards of GRPO
    python -m docs.scripts.make_pages        # draw them again, with the accuracies of docs/from_parts.json

The photographs are the first of each class in the test split of Fashion-MNIST (MIT licence). Both models, the one after
SFT and the one after GRPO, give their likeliest answer.
"""

import json
import statistics
import sys
from html import escape
from pathlib import Path

from benchmarks.from_parts import read
from docs.scripts.draw import BLUES, FAINT, INK, ORANGES, SOFT, Picture
from docs.scripts.held_out import png
from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import SamplingOptions
from minivlmrl.generation.sampler import Sampler
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.run.datasets import load_task

FILE = Path(__file__).with_suffix(".json")
RESULTS = Path(__file__).parents[1] / "from_parts.json"
CLASSES = 10
CHANCE = 1 / CLASSES
WINDOW = 5  # steps of GRPO that one point of a curve is the mean of
RUNS = {  # run -> (its name in the picture, its colour)
    "grpo": ("GRPO, three seeds", BLUES[0]),
    "more sft": ("more SFT instead", SOFT),
    "shuffled rewards": ("GRPO, shuffled rewards", ORANGES[0]),
    "exchanged images": ("GRPO, exchanged photographs", ORANGES[1]),
}
TILE, GAP, LEFT = 72, 10, 24  # side, distance and left of the photographs in pixels
FLOOR, HIGH, MOST = 466, 190, 0.75  # bottom and height of both charts in pixels, and the accuracy at their top


def record(work: Path):
    """Let both models answer a photograph of each class, and write from_parts.json with the rewards of each step."""
    config = load_config(recipes_folder() / "from_parts.yaml", [f"--model.path={work / 'sft_0' / 'checkpoint'}"])
    first = {}  # label -> its first row
    for row in load_task(config, {})["eval"]:
        first.setdefault(row.columns["solution"], row)
    rows = list(first.values())
    assert len(rows) == CLASSES
    answers = {}
    for name in ("sft", "grpo"):
        checkpoint = work / f"{name}_0" / "checkpoint"
        processor = load_processor(checkpoint)
        sample = Sampler(load_model(checkpoint), processor, SamplingOptions(temperature=0, max_new_tokens=6))
        groups = sample([row.prompt(processor) for row in rows], 1, [f"row {i}" for i in range(CLASSES)])
        answers[name] = [processor.decode(group[0].ids).strip() for group in groups]
    photographs = [
        {"solution": row.columns["solution"], "sft": before, "grpo": after, "png": png(row.images[0])}
        for row, before, after in zip(rows, answers["sft"], answers["grpo"], strict=True)
    ]
    kept = {"photographs": photographs, "rewards": read(work / "grpo_0")["rewards"]}
    FILE.write_text(json.dumps(kept).replace('{"solution"', '\n{"solution"').replace('"rewards"', '\n"rewards"') + "\n")


def tile(picture: Picture, number: int, shown: dict):
    """Draw a photograph with its class above, and the answers of both models below."""
    x, y = LEFT + 62 + number * (TILE + GAP), 84
    middle = x + TILE / 2
    picture.text(middle, y - 8, shown["solution"], 12, SOFT)
    picture.lines.append(
        f"<image x='{x}' y='{y}' width='{TILE}' height='{TILE}' href='data:image/png;base64,{shown['png']}'/>"
    )
    for row, name in enumerate(("sft", "grpo")):
        is_right = shown[name] == shown["solution"]
        answer = escape(shown[name] or "no answer")
        picture.text(middle, y + TILE + 20 + 22 * row, answer, 12, BLUES[0] if is_right else ORANGES[0], bold=True)


def smooth(rewards: list[float]) -> list[float]:
    """Return the means of WINDOW rewards that follow each other."""
    return [statistics.fmean(rewards[i : i + WINDOW]) for i in range(0, len(rewards), WINDOW)]


def height(share: float) -> float:
    """Return the y of an accuracy in both charts."""
    return round(FLOOR - HIGH * share / MOST, 1)


def axes(picture: Picture, left: float, wide: float, title: str):
    """Draw the lines of a chart, and its title above."""
    picture.text(left - 34, FLOOR - HIGH - 22, title, 14, INK, "start", bold=True)
    for share in (0, 0.25, 0.5, 0.75):
        picture.line([(left, height(share)), (left + wide, height(share))], FAINT)
        picture.text(left - 8, height(share) + 4, f"{share:g}", 12, SOFT, "end")
    picture.line([(left, height(CHANCE)), (left + wide, height(CHANCE))], "#adb5bd")


def reward_chart(picture: Picture, rewards: list[float]):
    """Draw the mean reward of the rollouts over the steps of GRPO."""
    left, wide = 58, 330
    axes(picture, left, wide, "Reward of the sampled answers, one run")
    means = smooth(rewards)
    points = [(round(left + wide * (i + 0.5) / len(means), 1), height(mean)) for i, mean in enumerate(means)]
    picture.line(points, BLUES[0], 2.5)
    picture.text(left + wide, height(CHANCE) - 5, "chance", 12, SOFT, "end")
    picture.text(left, FLOOR + 20, "0", 12, SOFT)
    picture.text(left + wide, FLOOR + 20, f"{len(rewards)} steps", 12, SOFT, "end")


def accuracy_chart(picture: Picture, results: list[dict]):
    """Draw a line from the held-out accuracy after SFT to that after each run."""
    left, wide = 474, 210
    axes(picture, left, wide, "Sampled accuracy on 256 held-out photographs")
    for result in results:
        if result["run"] in RUNS:
            ends = zip((left + 14, left + wide - 14), map(height, result["sampled"]), strict=True)
            picture.line(list(ends), RUNS[result["run"]][1], 2.5)
    picture.text(left + 14, FLOOR + 20, "after SFT", 12, SOFT)
    picture.text(left + wide - 14, FLOOR + 20, "at the end", 12, SOFT)
    for number, (words, colour) in enumerate(RUNS.values()):
        y = height(0.64) + 17 * number if number < 2 else height(0.15) + 17 * (number - 2)
        picture.text(left + wide + 10, y, words, 12, colour, "start", bold=True)


def draw() -> str:
    """Return the picture of held-out answers before and after GRPO, and of the rewards of all runs."""
    picture = Picture(930, 500, "Answers of a model from parts to held-out photographs, before and after GRPO")
    picture.text(
        LEFT, 32, "A text model learns to see: the first test photograph of each class", 18, INK, "start", True
    )
    picture.text(LEFT, 54, "its likeliest answer, right in blue and wrong in orange", 13, SOFT, "start")
    data = json.loads(FILE.read_text())
    for number, shown in enumerate(data["photographs"]):
        tile(picture, number, shown)
    for row, words in enumerate(("SFT", "GRPO")):
        picture.text(LEFT, 176 + 22 * row, words, 13, INK, "start", bold=True)
    reward_chart(picture, data["rewards"])
    accuracy_chart(picture, json.loads(RESULTS.read_text()))
    return picture.svg()


PICTURES = {"from_parts.svg": draw}

if __name__ == "__main__":
    record(Path(sys.argv[1]))
