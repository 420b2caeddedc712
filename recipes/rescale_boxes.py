"""Convert boxes in demonstrations from image file pixels to a model's coordinates.

Option --questions also converts boxes in questions.

    python recipes/rescale_boxes.py rows.jsonl thousandths > rescaled.jsonl
    python recipes/rescale_boxes.py rows.jsonl thousandths --questions > rescaled.jsonl
    python recipes/rescale_boxes.py rows.jsonl resized --min_pixels=3136 --max_pixels=12845056 > rescaled.jsonl

Rows have one `image`, or a list `images` with one path, relative to the data file. Answers in `completion`, `chosen`,
`rejected` or `messages` are converted, with reasoning and tool calls. Boxes: [x1, y1, x2, y2], (x1, y1), (x2, y2) or
data-bbox="..."; points: "point_2d": [x, y]. Rows without a box are counted on stderr. Column `solution` stays in image
file pixels, for rewards.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection
from itertools import cycle
from pathlib import Path

from minivlmrl.data.boxes import NUMBER, PAIR, SPACES
from minivlmrl.data.image import smart_resize
from minivlmrl.data.media import fetch_image
from minivlmrl.data.messages import THOUGHT_KEYS
from minivlmrl.errors import pluralize
from minivlmrl.rewards.columns import box_scale

QUOTE = r"""(?:\\?["']|&quot;)"""  # \" occurs in JSON strings of tool calls
COMMA = r"[\s,;，]+"
FOUR = COMMA.join([f"{QUOTE}?{NUMBER}{QUOTE}?"] * 4)
# points need the key "point_2d": [1, 2] could be anything
BOX = re.compile(
    rf"\[\s*{FOUR}\s*\]|{PAIR}[\s,]*{PAIR}|data-bbox\s*=\s*{QUOTE}\s*{FOUR}\s*{QUOTE}"
    rf"|(?P<key>{QUOTE}point_2d{QUOTE}\s*:\s*)\[\s*{NUMBER}{COMMA}{NUMBER}\s*\]",
    re.IGNORECASE,
)
ANSWERS = ("completion", "chosen", "rejected", "messages")
QUESTIONS = ("problem", "prompt")


def rescale(text: str, size: tuple[int, int], target: tuple[float, float], digits: int | None = None) -> str:
    """Convert boxes and points in a string to other units, rounded to `digits` decimals, None for integers.

    Example: "[10, 10, 20, 20]" in an image with 100 x 50 pixels becomes "[100, 200, 200, 400]" in thousandths.
    """

    def written(match: re.Match) -> str:
        sides = cycle(zip(target, size, strict=True))

        def converted(number: re.Match) -> str:
            new, old = next(sides)
            return str(round(float(number[0]) * new / old, digits))

        key = match["key"] or ""
        return key + re.sub(NUMBER, converted, match[0].removeprefix(key))

    return BOX.sub(written, text)


def rescale_turns(turns, convert: Callable[[str], str], roles: Collection[str]):
    """Apply `convert` to a string, or to turns with one of these roles."""
    if isinstance(turns, str):
        return convert(turns)
    if isinstance(turns, list):
        return [rescale_turns(turn, convert, roles) for turn in turns]
    if not isinstance(turns, dict) or turns.get("role", "assistant") not in roles:
        return turns
    names = ("content", "text", *THOUGHT_KEYS)
    new = {name: rescale_turns(turns[name], convert, roles) for name in names if name in turns}
    if turns.get("tool_calls"):
        new["tool_calls"] = json.loads(convert(json.dumps(turns["tool_calls"])))
    return turns | new


def rescale_row(
    row: dict, folder: Path, space: str, bounds: tuple[int, int], questions: bool = False
) -> tuple[dict, int]:
    """Convert boxes in a row's answers and, if `questions`, in its question; keep rows without images.

    Returns:
        New row, number of boxes and points.
    Raises:
        ValueError: the row has several images.
    """
    images = row.get("images") or row.get("image") or []
    images = images if isinstance(images, list) else [images]
    if not images:
        return row, 0
    if len(images) > 1:
        raise ValueError(f"the row has {len(images)} images, so it is unclear to which one its boxes belong")
    size = fetch_image(images[0], folder).size
    height, width = smart_resize(size[1], size[0], 28, *bounds)
    target = box_scale(space, size, (width, height))
    digits = 4 if space == "unit" else None
    num_boxes = 0

    def convert(text: str) -> str:
        nonlocal num_boxes
        num_boxes += len(BOX.findall(text))
        return rescale(text, size, target, digits)

    columns = ANSWERS + QUESTIONS if questions else ANSWERS
    roles = ("assistant", "user") if questions else ("assistant",)
    return row | {name: rescale_turns(row[name], convert, roles) for name in columns if name in row}, num_boxes


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("space", choices=SPACES)
    parser.add_argument("--questions", action="store_true", help="also convert boxes in questions")
    parser.add_argument("--min_pixels", type=int, default=3136)
    parser.add_argument("--max_pixels", type=int, default=12845056)
    options = parser.parse_args(arguments)
    bounds = options.min_pixels, options.max_pixels
    text = options.file.read_text(encoding="utf-8-sig")
    # splitlines would also split at U+2028 inside text
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    without = []  # line numbers of rows without boxes
    for number, line in lines:
        try:
            row, num_boxes = rescale_row(
                json.loads(line), options.file.parent, options.space, bounds, options.questions
            )
        except ValueError as error:
            raise SystemExit(f"{options.file}:{number}: {error}") from error
        print(json.dumps(row, ensure_ascii=False))
        without += [] if num_boxes else [number]
    if without:
        rows = f"{len(without)} of {pluralize(len(lines), 'row')}"
        print(f"{options.file}: {rows} had no box to convert, the first in line {without[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
