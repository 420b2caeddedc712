"""Test recipes/arrows.py: the answer can be read from the image, and a shortcut does not find the answer."""

import runpy

import pytest
from links import ROOT

ARROWS = runpy.run_path(str(ROOT / "recipes" / "arrows.py"))
NAMES = {color: name for name, color in ARROWS["COLORS"].items()} | {(0, 0, 0): None}  # a shaft
EDGES = [(6, 0), (13, 6), (6, 13), (0, 6)]  # pixels in a cell that an arrow head fills if it points into the cell
CELL, COLUMNS, ROWS = (ARROWS[name] for name in ("CELL", "COLUMNS", "ROWS"))


def read(image) -> dict[str, str]:
    """Cell -> the cell that its arrow points to, by name, from the pixels alone."""
    name = lambda x, y: NAMES[image.getpixel((x, y))]  # noqa: E731
    own = {(x, y): name(x * CELL, y * CELL) for x in range(COLUMNS) for y in range(ROWS)}  # a corner has no head
    heads = {own[x, y]: [name(x * CELL + u, y * CELL + v) for u, v in EDGES] for x, y in own}
    return {source: cell for cell, sources in heads.items() for source in sources if source not in (cell, None)}


@pytest.mark.parametrize("index", range(40))
def test_the_picture_says_the_answer(index):
    row = ARROWS["Arrows"](40, "test")[index]
    following = read(row.images[0])
    thought = [row.columns["problem"].removeprefix("From ")]
    while thought[-1] in following:
        thought.append(following[thought[-1]])
    assert row.completion == f"<think> {' '.join(thought)}</think><answer> {row.columns['solution']}</answer>"
    assert len(thought) == row.columns["moves"] + 1 and row.columns["unseen"] == (row.columns["moves"] > 2)
    starts = set(following) - set(following.values())
    ends = []
    for cell in starts:
        moves = 0
        while cell in following:
            cell, moves = following[cell], moves + 1
        ends.append((cell, moves))
    assert len(ends) > 1 and {moves for _, moves in ends} == {row.columns["moves"]}, "another way is as long"
