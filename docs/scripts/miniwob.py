"""Record the clicks of runs on web pages in miniwob.json, and draw docs/miniwob.svg and docs/miniwob_words.svg.

    python train.py recipes/miniwob.yaml
    python -m docs.scripts.miniwob click-color runs/miniwob  # record the first and last groups, and the rewards of GRPO
    python -m docs.scripts.make_pages                        # draw them again

The other picture is of click-button. Both pages are in the package miniwob (MIT licence).
"""

import functools
import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from html import escape
from pathlib import Path

import PIL.Image

from docs.scripts.draw import BLUES, FAINT, INK, ORANGES, SOFT, Picture
from docs.scripts.held_out import png

FILE = Path(__file__).with_suffix(".json")
CLICK = re.compile(r"<click>(\d+), (\d+)</click>")
WIDTH, HEIGHT, GAP, LEFT, TOP = 160, 210, 16, 24, 100  # of the pages in the picture, in pixels
BETWEEN = 112  # pixels between both rows of pages, for the texts below each page
LETTERS = 30  # letters in a line of these texts
FLOOR, HIGH, WIDE = 588, 400, 250  # bottom, height and width of the chart in pixels
WINDOW = 2  # steps of GRPO that one point of the curve is the mean of


def read_lines(path: Path) -> list[dict]:
    """Read a file with an object in JSON per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(name: str, run: Path):
    """Write a run to miniwob.json: pages with the clicks of groups, before the first and the last logged GRPO step."""
    logged = [entry for entry in read_lines(run / "completions.jsonl") if entry["stage"] == "grpo"]
    pages = [[group(run, entry) for entry in logged if entry["step"] == logged[end]["step"]] for end in (0, -1)]
    metrics = [entry for entry in read_lines(run / "metrics.jsonl") if entry["stage"] == "grpo"]
    steps = [logged[end]["step"] for end in (0, -1)]
    runs = json.loads(FILE.read_text())
    runs[name] = {"steps": steps, "rewards": [entry["reward"] for entry in metrics], "pages": pages}
    FILE.write_text(json.dumps(runs).replace('{"png"', '\n{"png"') + "\n")


def group(run: Path, entry: dict) -> dict:
    """Return a page with the clicks of its completions as (x, y, reward), and its most frequent completion."""
    texts = [completion["text"] for completion in entry["completions"]]
    clicks = []
    for completion in entry["completions"]:
        found = CLICK.search(completion["text"])
        x, y = map(int, found.groups()) if found else (WIDTH, HEIGHT)
        clicks += [(x, y, completion["reward"])] if x < WIDTH and y < HEIGHT else []  # without those beside the page
    image = PIL.Image.open(run / entry["images"][0]).convert("RGB").resize((WIDTH, HEIGHT))
    return {"png": png(image), "text": Counter(texts).most_common(1)[0][0], "clicks": clicks, "completions": len(texts)}


def page(picture: Picture, x: float, y: float, shown: dict):
    """Draw a page with a dot for each different click, whose area is its number of completions."""
    picture.lines.append(
        f"<image x='{x:g}' y='{y:g}' width='{WIDTH}' height='{HEIGHT}' href='data:image/png;base64,{shown['png']}'/>"
    )
    for (left, top, reward), count in Counter(map(tuple, shown["clicks"])).items():
        colour = BLUES[0] if reward > 0 else ORANGES[1]
        picture.lines.append(
            f"<circle cx='{x + left:g}' cy='{y + top:g}' r='{3 + 2 * count**0.5:.1f}' fill='{colour}' stroke='white' "
            "stroke-width='2'/>"
        )
    solved = sum(reward > 0 for _, _, reward in shown["clicks"])
    picture.text(x, y + HEIGHT + 18, f"{solved} of {shown['completions']} solve the page", 12, INK, "start", True)
    for line, words in enumerate(textwrap.wrap(shown["text"].split("<")[0], LETTERS)):
        picture.text(x, y + HEIGHT + 35 + 15 * line, escape(words), 11, SOFT, "start")


def chart(picture: Picture, left: float, rewards: list[float]):
    """Draw the share of completions that solve their page, over the steps of GRPO."""
    picture.text(left - 34, FLOOR - HIGH - 22, "Completions that solve their page", 14, INK, "start", bold=True)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = FLOOR - HIGH * share
        picture.line([(left, y), (left + WIDE, y)], FAINT)
        picture.text(left - 8, y + 4, f"{share:g}", 12, SOFT, "end")
    means = [statistics.fmean(rewards[i : i + WINDOW]) for i in range(0, len(rewards), WINDOW)]
    # a reward is 1 or -1
    heights = [round(FLOOR - HIGH * (mean + 1) / 2, 1) for mean in means]
    picture.line([(round(left + WIDE * (i + 0.5) / len(means), 1), y) for i, y in enumerate(heights)], BLUES[0], 2.5)
    picture.text(left, FLOOR + 20, "0", 12, SOFT)
    picture.text(left + WIDE, FLOOR + 20, f"{len(rewards)} steps of GRPO", 12, SOFT, "end")


def draw(name: str, title: str) -> str:
    """Return the picture of pages with the clicks of their groups, and of the rewards."""
    data = json.loads(FILE.read_text())[name]
    columns = len(data["pages"][0])
    right = LEFT + columns * (WIDTH + GAP)
    picture = Picture(right + 350, TOP + 2 * HEIGHT + BETWEEN + 88, "Clicks of groups on a web page")
    picture.text(LEFT, 32, title, 18, INK, "start", True)
    words = (
        "the 16 clicks for each page, right in blue and wrong in orange; below, the most frequent text before the click"
    )
    picture.text(LEFT, 54, words, 13, SOFT, "start")
    for row, (step, pages) in enumerate(zip(data["steps"], data["pages"], strict=True)):
        y = TOP + row * (HEIGHT + BETWEEN)
        picture.text(LEFT, y - 10, f"step {step}", 13, INK, "start", True)
        for column, shown in enumerate(pages):
            page(picture, LEFT + column * (WIDTH + GAP), y, shown)
    chart(picture, right + 54, data["rewards"])
    return picture.svg()


TITLES = {
    "miniwob.svg": ("click-color", "A web page is learned: click-color of MiniWoB++"),
    "miniwob_words.svg": ("click-button", "A page with words, whose buttons move: click-button of MiniWoB++"),
}
PICTURES = {file: functools.partial(draw, *names) for file, names in TITLES.items()}

if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
