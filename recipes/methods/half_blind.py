"""The built-in shapes with a hint in the question, which is right half the time: half can be answered blind.

problem: "Perhaps a red square. What is it?"    solution: "blue triangle"
"""

import random
from dataclasses import dataclass

from minivlmrl.data.messages import conversation
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.tasks import shapes
from minivlmrl.tasks.registry import FRESH_ROWS, Task

RIGHT = 0.5  # fraction of rows whose hint is the solution
REPEATED = 0.875  # fraction of demonstrations that repeat the hint, right or wrong


@dataclass
class HalfBlind(shapes.Shapes):
    """Shapes with a hint in the question."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        rng = random.Random(f"hint/{self.seed}/{index}")
        solution = row.columns["solution"]
        others = [label for label in shapes.LABELS if label != solution]
        hint = solution if rng.random() < RIGHT else rng.choice(others)
        problem = f"Perhaps a {hint}. {shapes.PROBLEM}"
        row.messages = conversation(problem, {"image": 1}, self.prompt_template, self.system_prompt)
        row.columns["problem"] = problem
        row.completion = shapes.tagged_answer(hint if rng.random() < REPEATED else solution)
        return row


def tokenizer():
    texts = [f"user\nPerhaps a {label}. {shapes.PROBLEM}" for label in shapes.LABELS]
    texts += ["system\nYou are a helpful assistant.", "assistant\n", *map(shapes.tagged_answer, shapes.LABELS)]
    return train_tokenizer(texts, vocab_size=512)


def datasets(data, seed):
    # 96 rows, as in the built-in task, would be learned by heart, and the hint ignored
    demonstrations = HalfBlind(4096, f"{seed}/sft")
    return {"demonstrations": demonstrations, "prompts": HalfBlind(FRESH_ROWS, f"{seed}/grpo")}, HalfBlind(
        data.eval_rows, "eval"
    )


TASK = Task(datasets, tokenizer, RIGHT)
