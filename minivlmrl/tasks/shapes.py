"""The task of the default run: name the colour and the shape of the one object in a small picture.

A prompt shows one image and asks what is in it; the answer names one of 12 classes (6 colours x 2
shapes): <think>I see green</think><answer>green square</answer>

Demonstrations for sft are few and often wrong: they teach the form of an answer and a vague idea of
the task. The rest is left to reinforcement learning, with a reward that is always right.
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
SIZE = 56  # pixels a side of an image
OBJECT_SIZES = (32, 52)  # pixels a side of the object


@dataclass
class Shapes(Sequence[Row]):
    """Pictures drawn on demand: row i of a seed is always the same picture.

    `solution` is right in every row, also `chosen`; one of `worse` is `rejected`.
    """

    size: int
    seed: int | str
    wrong_labels: float = 0.0  # share of rows that demonstrate a class drawn at random
    prompt_template: str = "{problem}"
    system_prompt: str | None = None
    tags: bool = True  # of demonstrations; False: they are the label alone
    # for kto: one answer and a `label`, chosen and rejected in turn
    labelled: bool = False

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        index = range(self.size)[index]  # IndexError: without it list(rows) would not end
        rng = random.Random(f"shapes/{self.seed}/{index}")
        label = rng.choice(LABELS)
        image = draw_picture(label, rng)
        shown_label = rng.choice(LABELS) if rng.random() < self.wrong_labels else label
        messages = conversation(PROBLEM, {"image": 1}, self.prompt_template, self.system_prompt)
        columns: dict[str, str | bool] = {"problem": PROBLEM, "solution": label}
        # its own generator: pictures and demonstrations are those of a row without preferences
        rejected = worse(label, random.Random(f"shapes/{self.seed}/{index}/rejected"))
        if self.labelled:
            is_good = index % 2 == 0
            columns["label"] = is_good
            return Row(messages, [image], columns, tagged_answer(label) if is_good else rejected)
        demonstrated = tagged_answer(shown_label) if self.tags else shown_label
        return Row(messages, [image], columns, demonstrated, tagged_answer(label), rejected)


def tagged_answer(label: str) -> str:
    """Name a label in the demonstrated form."""
    return f"<think>I see {label.split()[0]}</think><answer>{label}</answer>"


def worse(label: str, rng: random.Random) -> str:
    """Make a worse answer: another colour, shape, or colour than in the thought, or a hole in it.

    docs/results.md says why there are four kinds, each in a quarter of the rows.
    """
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
    end = start + rng.randint(1, 12)
    return text[:start] + text[end:]


def draw_picture(label: str, rng: random.Random) -> PIL.Image.Image:
    """Draw one object of random size anywhere on a light background of random colour."""
    background = (rng.randint(200, 255), rng.randint(200, 255), rng.randint(200, 255))
    image = PIL.Image.new("RGB", (SIZE, SIZE), background)
    side = rng.randint(*OBJECT_SIZES)
    left = rng.randint(0, SIZE - side)
    top = rng.randint(0, SIZE - side)
    color, shape = label.split()
    fill(image, color, shape, (left, top, left + side, top + side))
    return image


def fill(image: PIL.Image.Image, color: str, shape: str, box: Sequence[int]):
    """Draw an object that fills a box in pixels: left, top, right, bottom."""
    left, top, right, bottom = box
    right -= 1  # PIL draws the last pixel too
    bottom -= 1
    pen = PIL.ImageDraw.Draw(image)
    if shape == "triangle":
        corners = [((left + right) / 2, top), (left, bottom), (right, bottom)]
        pen.polygon(corners, fill=COLORS[color])
    elif shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=COLORS[color])
    else:
        pen.rectangle((left, top, right, bottom), fill=COLORS[color])


def tokenizer() -> Tokenizer:
    """Train byte-level BPE on everything the task says; some 370 tokens."""
    texts = ["system\nYou are a helpful assistant.", f"user\n{PROBLEM}", "assistant\n"]
    return train_tokenizer([*texts, *map(tagged_answer, LABELS)], vocab_size=512)


def datasets(
    data,
    seed: int,
    demonstrations: Annotated[int, ">= 1"] = 96,
    wrong_demonstrations: Annotated[float, "[0, 1]"] = 0.5,
    pairs: Annotated[int, ">= 1"] = 1024,
) -> tuple[dict[str, Dataset], Dataset]:
    """Make training rows by what an algorithm needs, and held-out rows; see task.Task.

    Args:
        data: the recipe's section.
        demonstrations: rows for sft.
        wrong_demonstrations: share of them with a label drawn at random.
        pairs: rows for dpo, kto and reward_model.
    """
    pictures = partial(
        Shapes, prompt_template=data.prompt_template, system_prompt=data.system_prompt
    )
    training: dict[str, Dataset] = {
        "demonstrations": pictures(
            demonstrations,
            f"{seed}/sft",
            wrong_labels=wrong_demonstrations,
            tags=data.answer_format == "tags",  # they say the label where the rewards look for it
        ),
        "pairs": pictures(pairs, f"{seed}/pairs"),
        "labels": pictures(pairs, f"{seed}/pairs", labelled=True),
        "prompts": pictures(FRESH_ROWS, f"{seed}/grpo"),
    }
    return training, pictures(data.eval_rows, "eval")


TASK = Task(datasets, tokenizer, lambda held_out: CHANCE, "chance")
