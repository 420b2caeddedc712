"""Look again, harder: two squares of stripes, and a look at each.

A completion, in one line:
    <think>northwest, southeast</think><zoom>northwest</zoom>[a crop]<zoom>southeast</zoom>[a crop]
    <answer>red rows, blue columns</answer>
One demonstration in ten looks at both squares, the others anywhere, as in zoom.py. Options of recipes/zoom.yaml:
    --data.task=recipes/zoom_twice.py:TASK --sampling.environment=recipes/zoom_twice.py:Twice
    --sampling.max_new_tokens=72 "--data.eval_rewards=[accuracy, recipes/zoom_twice.py:looks]"
"""

import random
import re
import sys
from itertools import product
from pathlib import Path

from minivlmrl.data.conversations import conversation
from minivlmrl.data.rows import Row

sys.path.append(str(Path(__file__).parent))  # zoom.py is beside this file

from zoom import (
    CORNERS,
    HABIT,
    LABELS,
    NOTHING,
    PROBLEM,
    Drawn,
    Quarters,
    corner,
    crop,
    demonstration,
    paper,
    shown,
    stripes,
    task,
    tokenizer_of,
)


class Twice(Quarters):
    """The environment: two calls."""

    max_tool_calls = 2


class Pairs(Drawn):
    """Pictures with two squares of stripes."""

    def __getitem__(self, index):
        rng = random.Random(f"zoom/twice/{self.seed}/{index}")
        image = paper(rng)
        quarters = sorted(rng.sample(range(4), 2))
        labels = {quarter: rng.choice(LABELS) for quarter in quarters}
        for quarter, label in labels.items():
            stripes(image, label, *corner(rng, quarter))
        asked_quarters = quarters if rng.random() < 0.1 else rng.choices(range(4), HABIT, k=2)
        calls = [f"<zoom>{CORNERS[quarter]}</zoom>" for quarter in asked_quarters]
        crops = [crop(image, quarter) for quarter in asked_quarters]
        read_labels = [labels.get(quarter, NOTHING) for quarter in asked_quarters]
        corners = [CORNERS[quarter] for quarter in quarters]
        first_text = f"<think>{', '.join(corners)}</think>{calls[0]}"
        completion = demonstration(first_text, crops[0], calls[1], crops[1], label=", ".join(read_labels))
        columns = {"problem": PROBLEM, "solution": ", ".join(labels.values()), "picture": image, "corners": corners}
        return Row(conversation(PROBLEM, {"image": 1}), [shown(image)], columns, completion)


def looks(completions, corners, **columns):
    """Reward 1 for a look at each square, in order. For evaluation."""
    values = []
    for text, right_corners in zip(completions, corners, strict=True):
        asked_corners = re.findall(r"<zoom>(\w+)</zoom>", text)
        values.append(float(asked_corners == right_corners))
    return values


def tokenizer():
    """Train byte-level BPE on everything the task says."""
    texts = list(CORNERS)
    for first, second in product(CORNERS, repeat=2):
        texts.append(f"{first}, {second}")
    for label in [*LABELS, NOTHING]:
        texts.append(f"{label}, {label}")
    return tokenizer_of(texts)


TASK = task(Pairs, tokenizer)
