"""Draw visited.svg, what a policy saw and wrote in its longest logged trajectory: python docs/visited.py runs/site

Of a run of recipes/site.yaml: a screen a turn, over it what is left of the goal, below what was written.
"""

import base64
import io
import re
import sys
from pathlib import Path

import PIL.Image
from draw import INK, SOFT, Picture

from minivlmrl.files import read_lines
from minivlmrl.run.rollout_log import COMPLETIONS, Logged

COLUMN = 138  # pixels wide
SIDE = 112  # of a screen
HEIGHT = 196


def longest(folder: Path) -> tuple[dict, dict]:
    """Find the last logged trajectory with the most turns, and its line of completions.jsonl."""
    found = []
    for line in read_lines(folder / COMPLETIONS, Logged):
        for completion in line["completions"]:
            if completion["reward"] == 1:
                found.append((len(completion["turns"]), len(found), line, completion))
    *_, line, completion = max(found)
    return line, completion


def as_png(path: Path) -> str:
    """Read a picture as base64 of PNG."""
    data = io.BytesIO()
    PIL.Image.open(path).convert("RGB").save(data, "png", optimize=True)
    return base64.b64encode(data.getvalue()).decode()


def main(folder: Path):
    line, completion = longest(folder)
    screens = [line["images"][0], *completion["pictures"]]
    goal = line["solution"].split()
    drawing = Picture(COLUMN * len(screens), HEIGHT, "the screens of a trajectory, and what was written under each")
    for number, (screen, turn) in enumerate(zip(screens, completion["turns"], strict=True)):
        left = COLUMN * number + (COLUMN - SIDE) // 2
        color, *shapes, pressed = re.findall(r"\w+", re.sub(r"</?(think|click)>", " ", turn["text"]))
        drawing.text(left, 16, " ".join(goal[number:][::-1]), 10, SOFT, "start")
        drawing.text(left, 153, color, 10, SOFT, "start")
        drawing.text(left, 168, " ".join(shapes), 10, SOFT, "start")
        drawing.text(left, 184, pressed, 11, INK, "start", bold=True)
        drawing.lines.append(
            f"<image x='{left}' y='24' width='{SIDE}' height='{SIDE}' style='image-rendering: pixelated' "
            f"href='data:image/png;base64,{as_png(folder / screen)}'/>"
        )
    Path(__file__).with_name("visited.svg").write_text(drawing.svg())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
