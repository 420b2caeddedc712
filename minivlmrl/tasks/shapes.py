"""Built-in task: name the color and shape of the object in a small image.

A prompt has one image, and the answer is one of 12 classes (6 colors x 2 shapes):
<think>I see green</think><answer>green square</answer>

Half the demonstrations have a random label, so accuracy is low after SFT, and GRPO can improve it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import PIL.Image
import PIL.ImageDraw

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.data.tokenizer import Tokenizer, train_tokenizer
from minivlmrl.tasks.registry import FRESH_ROWS, Task

COLORS = {
    "red": (220, 50, 47),
    "green": (60, 160, 60),
    "blue": (50, 90, 210),
    "yellow": (225, 190, 20),
    "purple": (140, 60, 170),
    "black": (35, 35, 35),
}
SHAPES = ("square", "triangle")
LABELS = tuple(f"{color} {shape}" for color in COLORS for shape in SHAPES)
CHANCE = 1 / len(LABELS)
PROBLEM = "What is it?"
SIZE = 56  # image width and height in pixels
OBJECT_SIZES = (32, 52)  # smallest and largest object width in pixels


@dataclass
class Shapes(Sequence[Row]):
    """Dataset whose images are drawn on access, from the seed and the row index.

    Columns `solution` and `chosen` are always correct; `rejected` is wrong.
    """

    size: int
    seed: int | str
    wrong_labels: float = 0.0  # fraction of demonstrations with a random label
    prompt_template: str = "{problem}"
    system_prompt: str | None = None
    tags: bool = True  # whether demonstrations have <think> and <answer> tags

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        index = range(self.size)[index]  # raise IndexError after the last row, so that iteration stops
        rng = random.Random(f"shapes/{self.seed}/{index}")
        label = rng.choice(LABELS)
        image = draw_picture(label, rng)
        shown_label = rng.choice(LABELS) if rng.random() < self.wrong_labels else label
        return Row(
            conversation(PROBLEM, {"image": 1}, self.prompt_template, self.system_prompt),
            [image],
            {"problem": PROBLEM, "solution": label},
            completion=tagged_answer(shown_label) if self.tags else shown_label,
            chosen=tagged_answer(label),
            rejected=make_rejected(label, random.Random(f"shapes/{self.seed}/{index}/rejected")),
        )


def tagged_answer(label: str) -> str:
    return f"<think>I see {label.split()[0]}</think><answer>{label}</answer>"


def make_rejected(label: str, rng: random.Random) -> str:
    """Make a rejected answer: wrong color, wrong shape, contradictory reasoning, or missing characters."""
    color, shape = label.split()
    other_color = rng.choice([name for name in COLORS if name != color])
    other_shape = SHAPES[1 - SHAPES.index(shape)]
    text = tagged_answer(label)
    kind = rng.randrange(4)
    if kind == 0:
        return tagged_answer(f"{other_color} {shape}")
    if kind == 1:
        return tagged_answer(f"{color} {other_shape}")
    if kind == 2:
        return text.replace(label, f"{other_color} {shape}")
    start = rng.randrange(1, len(text))
    return text[:start] + text[start + rng.randint(1, 12) :]


def draw_picture(label: str, rng: random.Random) -> PIL.Image.Image:
    image = PIL.Image.new("RGB", (SIZE, SIZE), tuple(rng.randint(200, 255) for _ in range(3)))
    side = rng.randint(*OBJECT_SIZES)
    left = rng.randint(0, SIZE - side)
    top = rng.randint(0, SIZE - side)
    color, shape = label.split()
    right = left + side - 1  # - 1, because PIL also fills the last pixel
    bottom = top + side - 1
    pen = PIL.ImageDraw.Draw(image)
    if shape == "triangle":
        pen.polygon([((left + right) / 2, top), (left, bottom), (right, bottom)], fill=COLORS[color])
    else:
        pen.rectangle((left, top, right, bottom), fill=COLORS[color])
    return image


def tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer with about 370 tokens on all text in the task."""
    texts = ["system\nYou are a helpful assistant.", f"user\n{PROBLEM}", "assistant\n"]
    return train_tokenizer([*texts, *map(tagged_answer, LABELS)], vocab_size=512)


def datasets(
    data,
    seed: int,
    demonstrations: Annotated[int, ">= 1"] = 96,
    wrong_demonstrations: Annotated[float, "[0, 1]"] = 0.5,
    pairs: Annotated[int, ">= 1"] = 1024,
) -> tuple[dict[str, Dataset], Dataset]:
    """Build training rows for all stages, and held-out rows.

    Args:
        demonstrations: SFT rows.
        wrong_demonstrations: fraction of SFT rows with a random label.
        pairs: rows for DPO and the reward model.
    """
    rows = partial(Shapes, prompt_template=data.prompt_template, system_prompt=data.system_prompt)
    training: dict[str, Dataset] = {
        "demonstrations": rows(
            demonstrations, f"{seed}/sft", wrong_labels=wrong_demonstrations, tags=data.answer_format == "tags"
        ),
        "pairs": rows(pairs, f"{seed}/pairs"),
        "prompts": rows(FRESH_ROWS, f"{seed}/grpo"),
    }
    return training, rows(data.eval_rows, "eval")


TASK = Task(datasets, tokenizer, CHANCE)
