"""Convert the boxes in demonstrated answers from pixels of the image file to the coordinates that a model uses.

The option --questions also converts the boxes in questions.

    python recipes/rescale_boxes.py rows.jsonl thousandths > rescaled.jsonl
    python recipes/rescale_boxes.py rows.jsonl thousandths --questions > rescaled.jsonl
    python recipes/rescale_boxes.py rows.jsonl resized --min_pixels=3136 --max_pixels=12845056 > rescaled.jsonl

Each row must have one `image`, or a list `images` with one path, relative to the file. The columns with answers are
`completion`, `chosen`, `rejected` or `messages`. Boxes are written as [x1, y1, x2, y2], data-bbox="..." or
<|box_start|>...<|box_end|>, points as "point_2d": [x, y]. The column `solution` stays in pixels of the image file,
because rewards expect pixels.
"""

import argparse
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path

from minivlmrl.data.boxes import NUMBER, SPACES, Box
from minivlmrl.data.image import smart_resize
from minivlmrl.data.media import fetch_image
from minivlmrl.rewards.columns import extent

BETWEEN = r"\)?[\s,]+\(?"
CORNERS = BETWEEN.join([f"({NUMBER})"] * 4)
BOX = re.compile(rf'(\[\s*|data-bbox="\s*|<\|box_start\|>\s*\(\s*){CORNERS}(\s*\)\s*<\|box_end\|>|\s*\]|\s*")')
# A point is recognized only after its key "point_2d", because [1, 2] in a text could be anything.
POINT = re.compile(rf'("point_2d"\s*:\s*\[\s*)({NUMBER}){BETWEEN}({NUMBER})(\s*\])')
ANSWERS = ("completion", "chosen", "rejected", "messages")
QUESTIONS = ("problem", "prompt")


def rescale(text: str, size: tuple[int, int], target: tuple[float, float], digits: int | None = None) -> str:
    """Convert the boxes and points in a text to other units, rounded to integers or to `digits` digits.

    Example: "[10, 10, 20, 20]" in an image with 100 x 50 pixels becomes "[100, 200, 200, 400]" in thousandths.
    """

    def written(match: re.Match) -> str:
        before, *corners, after = match.groups()
        four = corners[:2] + corners[-2:]  # a point is repeated
        box = Box(*map(float, four), tuple(map(float, size))).to(target)
        numbers = iter(box.numbers)

        def next_number(_: re.Match) -> str:
            return str(round(next(numbers), digits))

        between = match[0][len(before) : len(match[0]) - len(after)]
        return before + re.sub(NUMBER, next_number, between) + after

    return POINT.sub(written, BOX.sub(written, text))


def rescale_turns(turns, convert: Callable[[str], str], roles: Collection[str]):
    """Apply `convert` to a text, or to all texts of the given roles in a list of turns."""
    if isinstance(turns, str):
        return convert(turns)
    if isinstance(turns, list):
        return [rescale_turns(turn, convert, roles) for turn in turns]
    if not isinstance(turns, dict) or turns.get("role", "assistant") not in roles:
        return turns
    names = ("content", "text")
    return turns | {name: rescale_turns(turns[name], convert, roles) for name in names if name in turns}


def rescale_row(row: dict, folder: Path, space: str, bounds: tuple[int, int], questions: bool = False) -> dict:
    """Convert the boxes in the answers of a row and, with `questions`, in its questions.

    A row without images is not changed.

    Raises:
        ValueError: if the row has several images.
    """
    images = row.get("images") or row.get("image") or []
    images = images if isinstance(images, list) else [images]
    if not images:
        return row
    if len(images) > 1:
        raise ValueError(f"the row has {len(images)} images, so it is unclear to which one its boxes belong")
    size = fetch_image(images[0], folder).size
    height, width = smart_resize(size[1], size[0], 28, *bounds)
    target = extent(space, size, (width, height))
    digits = 4 if space == "unit" else None

    def convert(text: str) -> str:
        return rescale(text, size, target, digits)

    columns = ANSWERS + QUESTIONS if questions else ANSWERS
    roles = ("assistant", "user") if questions else ("assistant",)
    return row | {name: rescale_turns(row[name], convert, roles) for name in columns if name in row}


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("space", choices=SPACES)
    parser.add_argument("--questions", action="store_true", help="also convert boxes in questions")
    parser.add_argument("--min_pixels", type=int, default=3136)
    parser.add_argument("--max_pixels", type=int, default=12845056)
    options = parser.parse_args(arguments)
    bounds = options.min_pixels, options.max_pixels
    try:
        lines = options.file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        parser.error(f"{options.file}: {error.strerror}")
    for number, line in enumerate(lines, start=1):
        try:
            row = rescale_row(json.loads(line), options.file.parent, options.space, bounds, options.questions)
        except ValueError as error:
            raise SystemExit(f"{options.file}:{number}: {error}") from error
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
