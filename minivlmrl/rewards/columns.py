"""Build the arguments for reward functions from rows and completions, and call the functions."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Row
from minivlmrl.rewards.text import find_answer


def reward_columns(
    rows: Sequence[Row], completions: Sequence[Sequence[Completion]], processor: Processor
) -> dict[str, list]:
    """Collect the arguments for reward functions from B rows with G completions each.

    Returns:
        {name: n = B * G values}. If a row lacks a column, its completions' values are None. `completions` has the texts
        of the assistant's turns. The values of `answer_texts` are the answers in these texts, see find_answer.
    """
    flat_completions = []
    row_of_each = []
    for row, group in zip(rows, completions, strict=True):
        flat_completions += group
        row_of_each += [row] * len(group)
    columns = {}
    for name in sorted(set().union(*(row.columns for row in rows))):
        columns[name] = [row.columns.get(name) for row in row_of_each]
    texts = [processor.decode_assistant_turn(completion) for completion in flat_completions]
    columns["prompts"] = [row.messages for row in row_of_each]
    columns["images"] = [row.images for row in row_of_each]
    columns["row_names"] = [row.where or f"row {row.index}" for row in row_of_each]
    columns["completion_ids"] = [completion.ids.tolist() for completion in flat_completions]
    columns["completions"] = texts
    columns["answer_texts"] = [find_answer(text, processor.answer_format) for text in texts]
    return columns


def call_rewards(rewards: Sequence[Callable], columns: dict[str, list]) -> Tensor:
    """Call K reward functions on n completions.

    Returns:
        (n, K) float32, NaN where a reward function returned None.
    """
    values = []
    for reward in rewards:
        answers = reward(**columns)
        values.append([math.nan if answer is None else answer for answer in answers])
    shape = len(rewards), len(columns["completions"])
    return torch.tensor(values, dtype=torch.float32).view(shape).T
