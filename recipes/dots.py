"""Count dots: the smallest example of a custom task, to copy.

python train.py recipes/shapes.yaml --data.task=recipes/dots.py:TASK --output_dir=runs/dots
"""

import random
from dataclasses import dataclass

import PIL.Image
import PIL.ImageDraw

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Row
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.tasks.registry import FRESH_ROWS, Task

PROBLEM = "How many dots?"
ANSWER = "<think>dots</think><answer>{}</answer>"
CORNERS = [(5, 5), (33, 5), (5, 33), (33, 33)]  # possible positions (left, top) for a dot in pixels


@dataclass
class Dots:
    """Dataset with images that are drawn on demand. With the same seed, row i is always the same."""

    size: int
    seed: str

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = random.Random(f"dots/{self.seed}/{index}")
        count = rng.randint(1, 4)
        image = PIL.Image.new("RGB", (56, 56), "white")
        for x, y in rng.sample(CORNERS, count):
            PIL.ImageDraw.Draw(image).ellipse((x, y, x + 18, y + 18), fill="black")
        messages = conversation(PROBLEM, {"image": 1})
        # half of the demonstrations have a random answer
        demonstrated = count if rng.random() < 0.5 else rng.randint(1, 4)
        columns = {"problem": PROBLEM, "solution": str(count)}
        return Row(messages, [image], columns, ANSWER.format(demonstrated))


def datasets(data, seed, demonstrations=96):
    """Create the training rows (a dictionary from the kind that a stage needs) and the held-out rows.

    `data` is the section `data` in the recipe. Parameters with a default value are task options, for example
    `--data.task='recipes/dots.py:TASK(demonstrations=200)'`.
    """
    training = {"demonstrations": Dots(demonstrations, f"{seed}/sft"), "prompts": Dots(FRESH_ROWS, f"{seed}/grpo")}
    return training, Dots(data.eval_rows, "eval")


def tokenizer():
    """Train byte-level BPE on all texts in the task."""
    answers = [ANSWER.format(count) for count in range(1, 5)]
    texts = ["system\nYou are a helpful assistant.", f"user\n{PROBLEM}", "assistant\n", *answers]
    return train_tokenizer(texts, vocab_size=320)


TASK = Task(datasets, tokenizer, chance=lambda held_out: 1 / 4, chance_name="chance")
