"""Fashion-MNIST task for recipes/fashion.yaml: name the piece of clothing in a small photograph.

    apt-get install dataset-fashion-mnist   # on Debian and Ubuntu: /usr/share/datasets/fashion-mnist, 31 MB
    git clone https://github.com/zalandoresearch/fashion-mnist   # the same files in fashion-mnist/data/fashion

Fashion-MNIST (MIT license, arXiv 1708.07747) has 60,000 training and 10,000 test photographs with 28 x 28 gray pixels,
in ten classes. SFT has a few demonstrations, a fifth of them with random labels. GRPO trains on all 60,000, and only
its reward uses labels.
"""

import gzip
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import numpy as np
import PIL.Image

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.data.tokenizer import Tokenizer, train_tokenizer
from minivlmrl.tasks.registry import Task

LABELS = ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
PROBLEM = "Which piece of clothing?"
SIZE = 42  # image side in pixels: 9 tokens with 7 x 7 patches
FILES = {"train": "train", "test": "t10k"}  # {split: file name prefix}


@cache
def read_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a split's photographs (n, 28, 28) and labels (n,), both uint8."""
    # skip the file header: 16 bytes for images, 8 for labels
    images = gzip.decompress((folder / f"{FILES[split]}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{FILES[split]}-labels-idx1-ubyte.gz").read_bytes())
    return np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28), np.frombuffer(labels, np.uint8, offset=8)


@dataclass
class Fashion(Sequence[Row]):
    """Rows for the photographs with the indices `chosen`."""

    folder: Path
    split: str
    chosen: Sequence[int]
    seed: int = 0
    wrong_labels: float = 0.0  # fraction of random labels
    prompt_template: str = "{problem}"
    system_prompt: str | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Row:
        number = self.chosen[index]
        images, labels = read_split(self.folder, self.split)
        image = PIL.Image.fromarray(images[number]).resize((SIZE, SIZE), PIL.Image.Resampling.BICUBIC)
        label = LABELS[labels[number]]
        rng = random.Random(f"fashion/{self.seed}/{number}")
        shown_label = rng.choice(LABELS) if rng.random() < self.wrong_labels else label
        messages = conversation(PROBLEM, {"image": 1}, self.prompt_template, self.system_prompt)
        return Row(messages, [image.convert("RGB")], {"problem": PROBLEM, "solution": label}, shown_label)


def tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer on all text in the task."""
    texts = ["system\nYou are a helpful assistant.", f"user\n{PROBLEM}", "assistant\n", *LABELS]
    return train_tokenizer(texts, vocab_size=512)


def datasets(
    data,
    seed: int,
    folder: str = "/usr/share/datasets/fashion-mnist",
    demonstrations: Annotated[int, ">= 1"] = 500,
    wrong_demonstrations: Annotated[float, "[0, 1]"] = 0.2,
) -> tuple[dict[str, Dataset], Dataset]:
    """Build SFT and GRPO rows from the training split, and held-out rows from the test split.

    Args:
        data: recipe section `data`.
        folder: has the four files of the Debian package.
        demonstrations: SFT rows.
        wrong_demonstrations: fraction of random labels in SFT.
    """
    rows = partial(
        Fashion, Path(folder), seed=seed, prompt_template=data.prompt_template, system_prompt=data.system_prompt
    )
    count = len(read_split(Path(folder), "train")[1])
    order = random.Random(seed).sample(range(count), count)
    training: dict[str, Dataset] = {
        "demonstrations": rows("train", order[:demonstrations], wrong_labels=wrong_demonstrations),
        "prompts": rows("train", order),
    }
    return training, rows("test", range(min(data.eval_rows, len(read_split(Path(folder), "test")[1]))))


TASK = Task(datasets, tokenizer, 1 / len(LABELS))
