"""Task for recipes/localisation.yaml: give the bounding box for the object that the prompt names.

A prompt consists of an image and a text such as "box the purple circle". The answer is a thought and a box:
    <think>purple circle</think><answer>1 2 5 6</answer>
A box is left, top, right, bottom in units of 7 pixels, one digit each: 1 2 5 6 covers the pixels from 7 to 35 across
and from 14 to 42 down. Demonstrations are often wrong. Some boxes are held out, see `is_unseen`: only the seeds
"validation" and "test" have objects there; the column `unseen` marks these rows.
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
UNIT = 7  # pixels per unit
GRID = SIZE // UNIT  # 8, image side in units
EVALUATION_SEEDS = ("validation", "test")
VERTICAL = ("top", "middle", "bottom")
HORIZONTAL = ("left", "center", "right")


@dataclass
class Localisation:
    """Dataset with images that are drawn on demand. With the same seed, row i is always the same.

    A row has the columns `problem`; `solution`, the true box in pixels; `answer_extent`, the image's width and height
    in an answer's units, (8, 8); and `unseen`.

    A single object is a square with a side of 14, 21, 28 or 35 pixels. With several objects, width and height are each
    14, 21 or 28.
    """

    size: int
    seed: int | str
    # minimum and maximum object count per image; the objects have different colours and do not overlap
    objects: tuple[int, int] = (1, 1)
    jitter: int = 0  # largest shift in units for each coordinate in a demonstrated box, see `jittered`
    wrong_boxes: float = 0.0  # fraction of rows whose demonstrated box is random
    thinking: str = "name"  # thought in a demonstration, "name" or "position", see `answer`
    thousandths: bool = False  # demonstrate boxes as Qwen3-VL writes them, [125 250 625 750], instead of in units
    prompt_template: str = "{problem}"
    system_prompt: str | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        rng = random.Random(f"localisation/{self.seed}/{index}")
        objects = self._objects(rng)
        image = draw(objects, rng)
        name, box = objects[0]
        # a separate generator, so that images and true boxes do not depend on the noise
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
        """Sample the objects' names and boxes; the prompt asks for the first object."""
        count = rng.randint(*self.objects)
        rng.sample(NAMES, count)  # unused, but needed for the same images as in published runs
        names = [f"{color} {rng.choice(SHAPES)}" for color in rng.sample(list(COLORS), count)]
        # sampled before the positions, so that sizes do not depend on how well they fit
        sizes = [self._size(rng) for _ in range(count)]
        while True:
            boxes = [placed(size, rng) for size in sizes]
            held_out = self.seed not in EVALUATION_SEEDS and any(map(is_unseen, boxes))
            if not held_out and not any(overlap(a, b) for a, b in combinations(boxes, 2)):
                return list(zip(names, boxes, strict=True))

    def _size(self, rng: random.Random) -> tuple[int, int]:
        """Sample width and height in units."""
        if self.objects[1] == 1:
            side = rng.randint(2, 5)
            return side, side
        return rng.randint(2, 4), rng.randint(2, 4)


def answer(name: str, box: Box, thinking: str = "name", thousandths: bool = False) -> str:
    """Format a demonstrated answer: a thought (the object's name or its position) and a box.

    Example for a position: <think>purple top purple right</think><answer>4 0 8 3</answer>. The colour is repeated
    before each word, because a small decoder can then look up the object's place.
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
    """Return the third of the image, vertically and horizontally, that contains a box's centre.

    Example: (4, 0, 8, 3) gives ("top", "right").
    """
    left, top, right, bottom = box
    third_down = (top + bottom) * 3 // (2 * GRID)
    third_across = (left + right) * 3 // (2 * GRID)
    return VERTICAL[third_down], HORIZONTAL[third_across]


def placed(size: tuple[int, int], rng: random.Random) -> Box:
    """Sample the position for a box with this width and height."""
    width, height = size
    left = rng.randint(0, GRID - width)
    top = rng.randint(0, GRID - height)
    return left, top, left + width, top + height


def pixels(box: Box) -> list[int]:
    """Convert a box to pixels: (1, 2, 5, 6) to [7, 14, 35, 42]."""
    return [UNIT * number for number in box]


def is_unseen(box: Box) -> bool:
    """Return whether a box is held out from training, for example (0, 0, 2, 2).

    15 of the 126 possible boxes for a single object are held out, some with each size.
    """
    return zlib.crc32(" ".join(map(str, box)).encode()) % 10 == 0


def overlap(a: Box, b: Box) -> bool:
    """Return whether two boxes overlap; (0, 0, 2, 2) and (2, 0, 4, 2) only touch and do not overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def jittered(box: Box, units: int, rng: random.Random) -> Box:
    """Shift each coordinate by -units, 0 or +units within the image.

    Opposite sides that would meet or cross are not shifted.
    """
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
    """Draw an image with objects that fill their boxes, on a light background with a random colour."""
    image = PIL.Image.new("RGB", (SIZE, SIZE), tuple(rng.randint(200, 255) for _ in range(3)))
    for name, box in objects:
        fill(image, *name.split(), pixels(box))
    return image


def constant_box(rows: Dataset) -> tuple[Box, float]:
    """Find the best answer that ignores the image: the box with the largest mean IoU with all true boxes.

    Returns:
        The box in units, and its mean IoU.
    """
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
    """Train byte-level BPE on all texts in the task, so that every word and every digit is one token."""
    texts = ["system\nYou are a helpful assistant.", "user\n", "assistant\n"]
    corners = list(product((0, 3, 6), repeat=2))  # (left, top) for a box in each position
    for name in NAMES:
        texts.append(PROBLEM.format(name))
        for left, top in corners:
            box = (left, top, left + 2, top + 2)
            texts += [answer(name, box, "name"), answer(name, box, "position")]
    return train_tokenizer(texts, vocab_size=512)


def task(objects: tuple[int, int] = (1, 1), jitter: int = 1, wrong: float = 0.3, thinking: str = "name") -> Task:
    """Create the task with Localisation's options; `jitter` and `wrong` only change demonstrations."""

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
