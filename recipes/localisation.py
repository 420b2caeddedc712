"""Where in a small picture is the object that the prompt names? The task of recipes/localisation.yaml.

A prompt shows one picture and asks "box the purple circle"; the answer is a thought and a box:
    <think>purple circle</think><answer>1 2 5 6</answer>
A box is left, top, right, bottom in units of 7 pixels, one digit each: 1 2 5 6 are the pixels from 7 to 35 across and
from 14 to 42 down. Demonstrations are often wrong. Some boxes are held out, see `is_unseen`: only pictures of the seeds
"validation" and "test" have objects there, and say so in their column `unseen`.
"""

import random
import zlib
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import PIL.Image

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.data.tokenizer import Tokenizer, train_tokenizer
from minivlmrl.tasks.registry import FRESH_ROWS, Task
from minivlmrl.tasks.shapes import COLORS, SIZE, fill

Box = tuple[int, int, int, int]  # left, top, right, bottom in units; right and bottom are the first ones outside

SHAPES = ("circle", "square", "triangle")
NAMES = tuple(f"{color} {shape}" for color in COLORS for shape in SHAPES)
PROBLEM = "box the {}"
UNIT = 7  # pixels
GRID = SIZE // UNIT  # units a side of a picture: 8
EVALUATION_SEEDS = ("validation", "test")
VERTICAL = ("top", "middle", "bottom")
HORIZONTAL = ("left", "center", "right")


@dataclass
class Localisation:
    """Pictures drawn on demand: row i of a seed is always the same picture.

    The columns of a row are `problem`; `solution`, the true box in pixels; `answer_extent`, width and height of the
    picture in the units of an answer, (8, 8); and `unseen`.

    Alone, an object is 14, 21, 28 or 35 pixels wide and as high; else width and height are each 14, 21 or 28.
    """

    size: int
    seed: int | str
    objects: tuple[int, int] = (1, 1)  # fewest and most in a picture, of different colours, which do not overlap
    jitter: int = 0  # units by which each coordinate of a demonstrated box may be moved, see `jittered`
    wrong_boxes: float = 0.0  # share of rows that demonstrate, before jitter, a box drawn at random
    thinking: str = "name"  # of a demonstration: "name" or "position", see `answer`
    thousandths: bool = False  # demonstrate [125 250 625 750], as Qwen3-VL writes boxes, not units
    prompt_template: str = "{problem}"
    system_prompt: str | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        rng = random.Random(f"localisation/{self.seed}/{index}")
        objects = self._objects(rng)
        image = draw(objects, rng)
        name, box = objects[0]
        # its own generator: pictures and true boxes are those of a row without noise
        noise = random.Random(f"localisation/{self.seed}/{index}/noise")
        shown_box = placed(self._size(noise), noise) if noise.random() < self.wrong_boxes else box
        shown_box = jittered(shown_box, self.jitter, noise)
        problem = PROBLEM.format(name)
        messages = conversation(problem, {"image": 1}, self.prompt_template, self.system_prompt)
        columns = {"problem": problem, "solution": pixels(box)}
        if not self.thousandths:
            columns["answer_extent"] = (GRID, GRID)
        columns["unseen"] = is_unseen(box)
        return Row(messages, [image], columns, answer(name, shown_box, self.thinking, self.thousandths))

    def _objects(self, rng: random.Random) -> list[tuple[str, Box]]:
        """Draw names and boxes; the prompt names the first."""
        count = rng.randint(*self.objects)
        rng.sample(NAMES, count)  # unused, but the pictures of published runs were drawn after it
        names = [f"{color} {rng.choice(SHAPES)}" for color in rng.sample(list(COLORS), count)]
        sizes = [self._size(rng) for _ in range(count)]  # first: how well they fit must not choose them
        while True:
            boxes = [placed(size, rng) for size in sizes]
            held_out = self.seed not in EVALUATION_SEEDS and any(map(is_unseen, boxes))
            if not held_out and not any(overlap(a, b) for a, b in combinations(boxes, 2)):
                return list(zip(names, boxes, strict=True))

    def _size(self, rng: random.Random) -> tuple[int, int]:
        """Draw width and height in units."""
        if self.objects[1] == 1:
            side = rng.randint(2, 5)
            return side, side
        return rng.randint(2, 4), rng.randint(2, 4)


def answer(name: str, box: Box, thinking: str = "name", thousandths: bool = False) -> str:
    """Write a box in the demonstrated form, with its object's name or its position as the thought.

    Example: <think>purple top purple right</think><answer>4 0 8 3</answer>. That repeats the colour right before each
    word, where a small decoder can look up its place.
    """
    thought = name
    if thinking == "position":
        color = name.split()[0]
        thought = " ".join(f"{color} {word}" for word in position(box))
    corners = " ".join(map(str, box))
    if thousandths:
        corners = f"[{' '.join(str(number * 1000 // GRID) for number in box)}]"
    return f"<think>{thought}</think><answer>{corners}</answer>"


def position(box: Box) -> tuple[str, str]:
    """Name the third of the picture, down and across, where a box has its centre: "top", "right" of (4, 0, 8, 3)."""
    left, top, right, bottom = box
    third_down = (top + bottom) * 3 // (2 * GRID)
    third_across = (left + right) * 3 // (2 * GRID)
    return VERTICAL[third_down], HORIZONTAL[third_across]


def placed(size: tuple[int, int], rng: random.Random) -> Box:
    """Draw where in the picture a box of this width and height is."""
    width, height = size
    left = rng.randint(0, GRID - width)
    top = rng.randint(0, GRID - height)
    return left, top, left + width, top + height


def pixels(box: Box) -> list[int]:
    """Convert a box to pixels: (1, 2, 5, 6) to [7, 14, 35, 42]."""
    return [UNIT * number for number in box]


def is_unseen(box: Box) -> bool:
    """Whether a box is held out, as (0, 0, 2, 2) is: 15 of the 126 that an object alone can have, some of each size."""
    return zlib.crc32(" ".join(map(str, box)).encode()) % 10 == 0


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes share some area; (0, 0, 2, 2) and (2, 0, 4, 2) only touch."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def jittered(box: Box, units: int, rng: random.Random) -> Box:
    """Move each coordinate by -units, 0 or +units within the picture; two sides that would meet or cross stay."""
    moved = []
    for number in box:
        shifted = number + rng.choice((-units, 0, units))
        moved.append(min(max(shifted, 0), GRID))
    for low, high in ((0, 2), (1, 3)):  # left and right, top and bottom
        if moved[low] >= moved[high]:
            moved[low] = box[low]
            moved[high] = box[high]
    return tuple(moved)


def draw(objects: list[tuple[str, Box]], rng: random.Random) -> PIL.Image.Image:
    """Draw objects that fill their boxes, on a light background of random colour."""
    image = PIL.Image.new("RGB", (SIZE, SIZE), tuple(rng.randint(200, 255) for _ in range(3)))
    for name, box in objects:
        fill(image, *name.split(), pixels(box))
    return image


def constant_box(rows: Dataset) -> tuple[Box, float]:
    """Find the best blind answer: the box, in units, of the greatest mean IoU with the true ones; and that mean."""
    solutions = [rows[i].columns["solution"] for i in range(len(rows))]
    true_boxes, counts = np.unique(np.array(solutions) / UNIT, axis=0, return_counts=True)  # (m, 4)
    sides = list(combinations(range(GRID + 1), 2))
    candidates = np.array([(left, top, right, bottom) for left, right in sides for top, bottom in sides])  # (n, 4)
    low = np.maximum(candidates[:, None, :2], true_boxes[:, :2])  # (n, m, 2)
    high = np.minimum(candidates[:, None, 2:], true_boxes[:, 2:])
    intersections = (high - low).clip(0).prod(-1)  # (n, m)
    areas = (candidates[:, 2:] - candidates[:, :2]).prod(-1)  # (n,)
    true_areas = (true_boxes[:, 2:] - true_boxes[:, :2]).prod(-1)  # (m,)
    ious = intersections / (areas[:, None] + true_areas - intersections)
    means = ious @ counts / counts.sum()  # (n,)
    best = int(means.argmax())
    return tuple(candidates[best].tolist()), float(means[best])


def tokenizer() -> Tokenizer:
    """Train byte-level BPE on everything the task says: every word and every digit is one token."""
    texts = ["system\nYou are a helpful assistant.", "user\n", "assistant\n"]
    corners = list(product((0, 3, 6), repeat=2))  # of a box in each position
    for name in NAMES:
        texts.append(PROBLEM.format(name))
        for left, top in corners:
            box = (left, top, left + 2, top + 2)
            texts += [answer(name, box, "name"), answer(name, box, "position")]
    return train_tokenizer(texts, vocab_size=512)


def task(objects: tuple[int, int] = (1, 1), jitter: int = 1, wrong: float = 0.3, thinking: str = "name") -> Task:
    """Make the task; the arguments are those of Localisation, and only demonstrations are jittered or wrong."""

    def datasets(
        data, seed: int, demonstrations=512, wrong_demonstrations=wrong, thousandths=False
    ) -> tuple[dict[str, Dataset], Dataset]:
        options = {
            "objects": objects,
            "thinking": thinking,
            "thousandths": thousandths,
            "prompt_template": data.prompt_template,
            "system_prompt": data.system_prompt,
        }
        training = {
            "demonstrations": Localisation(
                demonstrations, f"{seed}/sft", jitter=jitter, wrong_boxes=wrong_demonstrations, **options
            ),
            "prompts": Localisation(FRESH_ROWS, f"{seed}/grpo", **options),
        }
        return training, Localisation(data.eval_rows, "test", **options)

    return Task(datasets, tokenizer, lambda held_out: constant_box(held_out)[1], "constant box")


TASK = task()
THREE = task(objects=(3, 3), jitter=0, wrong=0.0, thinking="position")
