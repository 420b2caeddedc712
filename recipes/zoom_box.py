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
import runpy
from pathlib import Path

import PIL.Image

from minivlmrl.data.conversations import conversation
from minivlmrl.rows import Row

BASE = runpy.run_path(str(Path(__file__).with_name("zoom.py")))
# pixels of what is shown: corners of squares, of boxes; a side
GRID = range(0, 21, 4)
BOX = range(0, 17, 4)
LARGE = 16


class Boxes(BASE["Quarters"]):
    """The environment: `<zoom>[x1, y1, x2, y2]</zoom>` in pixels of what is shown."""

    def zoom(self, bbox_2d: tuple[int, int, int, int]) -> PIL.Image.Image:
        """Show a box in full; it has at most 16 pixels a side."""
        x1, y1, x2, y2 = bbox_2d
        if not (0 <= x1 < x2 <= x1 + LARGE <= 32 and 0 <= y1 < y2 <= y1 + LARGE <= 32):
            raise ValueError("no such box")
        self.answered += 1
        return self.picture.crop([2 * side for side in bbox_2d])


def sees(box: tuple[int, int], corner: tuple[int, int]) -> bool:
    """Tell whether a box that begins here has at least 8 of a square's 12 pixels, both ways."""
    return all(at - 8 <= begins <= at + 4 for begins, at in zip(box, corner, strict=True))


class Anywhere(BASE["Drawn"]):
    """Pictures with a square of stripes at any place of the grid."""

    def __getitem__(self, index):
        rng = random.Random(f"zoom/box/{self.seed}/{index}")
        image = BASE["paper"](rng)
        label = rng.choice(BASE["LABELS"])
        corner = [rng.choice(GRID), rng.choice(GRID)]
        (x, y) = [rng.choice(BOX), rng.choice(BOX)]
        BASE["stripes"](image, label, *(2 * at for at in corner))
        columns = {"problem": BASE["PROBLEM"], "solution": label, "corner": corner, "picture": image}
        environment = Boxes()
        environment.reset(image)
        box = [x, y, x + LARGE, y + LARGE]
        said = label if sees((x, y), corner) else BASE["NOTHING"]
        asks = f"<think>{corner[0]} {corner[1]}</think><zoom>{box}</zoom>"
        completion = BASE["demonstration"](asks, environment.zoom(box), said=said)
        return Row(conversation(BASE["PROBLEM"], {"image": 1}), [BASE["shown"](image)], columns, completion)


def looks(completions, corner, **columns):
    """Reward 1 for a look at the stripes. For evaluation."""
    asked = [re.search(r"<zoom>\[(\d+), (\d+), ", text) for text in completions]
    return [float(a is not None and sees(map(int, a.groups()), at)) for a, at in zip(asked, corner, strict=True)]


def tokenizer():
    """Train byte-level BPE on everything the task says."""
    said = [text for x in GRID for y in GRID for text in (f"{x} {y}", f"[{x}, {y}, {x}, {x + LARGE}]")]
    return BASE["tokenizer_of"]([*said, *BASE["LABELS"], BASE["NOTHING"]])


TASK = BASE["task"](Anywhere, tokenizer)
