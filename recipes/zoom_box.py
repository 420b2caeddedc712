"""Look again, harder: a box anywhere instead of one of four quarters.

The square of stripes may be anywhere on a grid of 4 pixels of what is shown (0, 4, ..., 20); a completion:
    <think>8 20</think><zoom>[4, 16, 20, 32]</zoom>[the crop: forced tokens]<answer>red rows</answer>
The thought is the square's corner. Demonstrations ask for a box drawn at random, and say the label where the crop has
at least two thirds of the square both ways: 36 % of them. Options of recipes/zoom.yaml:
    --data.task=recipes/zoom_box.py:TASK --sampling.environment=recipes/zoom_box.py:Boxes
    --sampling.max_new_tokens=56 "--data.eval_rewards=[accuracy, recipes/zoom_box.py:looks]"
"""

import random
import re
import sys
from itertools import product
from pathlib import Path

import PIL.Image

from minivlmrl.data.conversations import conversation
from minivlmrl.data.rows import Row

sys.path.append(str(Path(__file__).parent))  # zoom.py is beside this file

from zoom import (
    LABELS,
    NOTHING,
    PROBLEM,
    SHOWN,
    Drawn,
    Quarters,
    demonstration,
    paper,
    shown,
    stripes,
    task,
    tokenizer_of,
)

# pixels of what is shown
SQUARE_CORNERS = range(0, 21, 4)
BOX_CORNERS = range(0, 17, 4)
BOX_SIDE = 16


class Boxes(Quarters):
    """The environment: `<zoom>[x1, y1, x2, y2]</zoom>` in pixels of what is shown."""

    def zoom(self, bbox_2d: tuple[int, int, int, int]) -> PIL.Image.Image:
        """Show a box in full; it has at most 16 pixels a side."""
        x1, y1, x2, y2 = bbox_2d
        fits_across = 0 <= x1 < x2 <= x1 + BOX_SIDE <= SHOWN
        fits_down = 0 <= y1 < y2 <= y1 + BOX_SIDE <= SHOWN
        if not (fits_across and fits_down):
            raise ValueError("no such box")
        self.answered += 1
        return self.picture.crop([2 * side for side in bbox_2d])


def sees(box_corner: tuple[int, int], corner: tuple[int, int]) -> bool:
    """Tell whether a box that begins here has at least 8 of a square's 12 pixels, both ways."""
    x, y = box_corner
    left, top = corner
    return left - 8 <= x <= left + 4 and top - 8 <= y <= top + 4


class Anywhere(Drawn):
    """Pictures with a square of stripes at any place of the grid."""

    def __getitem__(self, index):
        rng = random.Random(f"zoom/box/{self.seed}/{index}")
        image = paper(rng)
        label = rng.choice(LABELS)
        left = rng.choice(SQUARE_CORNERS)
        top = rng.choice(SQUARE_CORNERS)
        x = rng.choice(BOX_CORNERS)
        y = rng.choice(BOX_CORNERS)
        stripes(image, label, 2 * left, 2 * top)
        columns = {"problem": PROBLEM, "solution": label, "corner": [left, top], "picture": image}
        environment = Boxes()
        environment.reset(image)
        box = [x, y, x + BOX_SIDE, y + BOX_SIDE]
        read_label = label if sees((x, y), (left, top)) else NOTHING
        thought_and_call = f"<think>{left} {top}</think><zoom>{box}</zoom>"
        completion = demonstration(thought_and_call, environment.zoom(box), label=read_label)
        return Row(conversation(PROBLEM, {"image": 1}), [shown(image)], columns, completion)


def looks(completions, corner, **columns):
    """Reward 1 for a look at the stripes. For evaluation."""
    values = []
    for text, square_corner in zip(completions, corner, strict=True):
        match = re.search(r"<zoom>\[(\d+), (\d+), ", text)
        values.append(float(match is not None and sees(map(int, match.groups()), square_corner)))
    return values


def tokenizer():
    """Train byte-level BPE on everything the task says."""
    texts = [*LABELS, NOTHING]
    for x, y in product(SQUARE_CORNERS, repeat=2):
        texts += [f"{x} {y}", f"[{x}, {y}, {x}, {x + BOX_SIDE}]"]
    return tokenizer_of(texts)


TASK = task(Anywhere, tokenizer)
