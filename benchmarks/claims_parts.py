"""What the runs of claims.py change that is no option of a recipe: tasks, a reward, and changes of a step.

A change is called before each step, by a callback: change(algorithm, step, number). It may replace
micro-batches of the step, or how the next rollouts are drawn; the loop itself is the one of every run.
"""

import copy
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import torch

from minivlmrl.data.rows import Dataset, Row
from minivlmrl.rewards.text import normalize
from minivlmrl.tasks.registry import FRESH_ROWS, Task
from minivlmrl.tasks.shapes import CHANCE, Shapes, datasets, tokenizer

UNSEEN = ("green triangle", "blue square", "black triangle")  # of COMBINATIONS: their words are seen in others


class Chosen:
    """Rows of another dataset by number; `mark` says of each whether it is unseen."""

    def __init__(self, rows: Dataset, numbers, mark=False):
        self.rows, self.numbers, self.mark = rows, numbers, mark

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[self.numbers[index]]
        return replace(row, columns=row.columns | {"unseen": is_unseen(row)}) if self.mark else row


class Seen(Chosen):
    """Of each 64 rows of another dataset the first that neither shows nor says an unseen combination."""

    def __init__(self, rows: Dataset, size: int):
        super().__init__(rows, range(size))

    def __getitem__(self, index: int) -> Row:
        for i in range(64):
            row = self.rows[64 * self.numbers[index] + i]
            if not is_unseen(row):
                return row
        raise ValueError(f"row {index}: all 64 rows are unseen combinations")


def is_unseen(row: Row) -> bool:
    """Say whether a row's picture, or what it demonstrates, is one of UNSEEN."""
    return any(label in f"{row.columns['solution']} {row.completion}" for label in UNSEEN)


def few(data, seed: int, prompts: int = 1):
    """shapes, but reinforcement learning has so many pictures, again and again."""
    training, held_out = datasets(data, seed)
    return training | {"prompts": Chosen(training["prompts"], range(prompts))}, held_out


def combinations(data, seed: int, demonstrations: int = 96, wrong: float = 0.5):
    """shapes, but pictures and words of UNSEEN are held out, and say so."""
    drawn = Shapes(64 * demonstrations, f"{seed}/sft", wrong_labels=wrong)
    fresh = Shapes(FRESH_ROWS, f"{seed}/grpo")
    training = {"demonstrations": Seen(drawn, demonstrations), "prompts": Seen(fresh, FRESH_ROWS // 64)}
    return training, Chosen(Shapes(data.eval_rows, "eval"), range(data.eval_rows), mark=True)


FEW = Task(few, tokenizer, lambda held_out: CHANCE, "chance")
COMBINATIONS = Task(combinations, tokenizer, lambda held_out: CHANCE, "chance")


def vote(answer_texts: list, row_names: list, completion_ids: list, winner="most", **columns) -> list[float]:
    """1.0 for the answer that most completions of a group give ("any": for that of one drawn at random).

    No solution is read. The first of equally frequent ones wins; completions without an answer earn 0.
    """
    rng = random.Random(repr(completion_ids))
    rewards = []
    for _, group in groupby(range(len(row_names)), key=lambda i: row_names[i]):
        answers = [None if answer_texts[i] is None else normalize(answer_texts[i]) for i in group]
        votes = [answer for answer in answers if answer] or [None]
        chosen = Counter(votes).most_common(1)[0][0] if winner == "most" else rng.choice(votes)
        rewards += [float(answer is not None and answer == chosen) for answer in answers]
    return rewards


def sign(kept_sign: int) -> Callable:
    """Learn from what is better than its group alone (1), or from what is worse (-1)."""

    def change(algorithm, step, number):
        for batch in step.micro_batches:
            batch.advantages = batch.advantages * (batch.advantages.sign() == kept_sign)

    return change


def some_tokens(share: float) -> Callable:
    """Learn from this share of all tokens, drawn at random, divided by all tokens as top_entropy_quantile does."""

    def change(algorithm, step, number):
        generator = torch.Generator().manual_seed(number)
        for batch in step.micro_batches:
            kept = torch.rand(batch.loss_mask.shape, generator=generator) < share  # (R, T)
            batch.advantages = batch.advantages[:, None] * kept

    return change


def late(delay: int, corrected: bool) -> Callable:
    """Train on each rollout `delay` steps after it was drawn, and on nothing before.

    corrected: with the ratio to the policy that drew, clipped; otherwise as if today's policy had drawn.
    """
    waiting = deque()

    def change(algorithm, step, number):
        waiting.append(step.micro_batches)
        if number < delay:  # its gradient is 0; these steps are spent, warmup too
            step.micro_batches = [copy.copy(batch) for batch in step.micro_batches]
            for batch in step.micro_batches:
                batch.advantages = torch.zeros_like(batch.advantages)
            return
        step.micro_batches = waiting.popleft()
        if corrected:
            for batch in step.micro_batches:
                batch.old_per_token_logps = batch.sampler_logps

    return change


class Rounded:
    """A sampler with each weight matrix rounded to so many bits; from the second rollout on."""

    def __init__(self, sample, bits: int):
        self.sample, self.bits = sample, bits

    def __getattr__(self, name: str):
        return getattr(self.sample, name)

    def __call__(self, *arguments):
        exact = {name: weight.detach().clone() for name, weight in self.sample.model.named_parameters()}
        with torch.no_grad():
            for weight in self.sample.model.parameters():
                weight.copy_(rounded(weight, self.bits))
        completions = self.sample(*arguments)
        self.sample.model.load_state_dict(exact, strict=False)
        return completions


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a matrix to 2^bits - 1 levels, symmetric, one scale for all; 16: to bfloat16. Vectors stay."""
    if bits == 16:
        return weight.bfloat16().to(weight.dtype)
    if weight.dim() < 2:
        return weight
    step = weight.abs().max().clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (weight / step).round() * step


def rounds(bits: int) -> Callable:
    """Draw rollouts with rounded weights."""

    def change(algorithm, step, number):
        if number == 0:
            algorithm.sample = Rounded(algorithm.sample, bits)

    return change
