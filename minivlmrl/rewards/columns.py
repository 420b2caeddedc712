"""Call reward functions with the columns of dataset rows and the sampled completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.errors import UserError, user_code
from minivlmrl.rewards.text import find_answer

Size = tuple[float, float]


@dataclass
class RewardArguments:
    """Arguments that a reward function may take besides dataset columns: lists with one value per completion."""

    completions: list[str]
    prompts: list[list[dict]]
    images: list[Sequence[PIL.Image.Image]]
    row_names: list[str]
    completion_ids: list[list[int]]
    answer_texts: list[str | None]
    turn_texts: list[list[str]]
    image_sizes: list[Size | None]
    answer_extents: list[Size | None]
    environments: list[Any]
    row_rewards: list[list[str] | None]  # reward names for the row, None = all
    extras: list[dict]  # values for the completion log, added by rewards with log_extra
    reward_model_scores: Sequence[float] | None = None
    # single objects instead of lists, set by Reward.__call__
    trainer_state: Any = None
    log_metric: Callable[[str, float], None] | None = None
    log_extra: Callable[[str, list], None] | None = None


REWARD_ARGUMENTS = {field.name for field in fields(RewardArguments)}


def reward_columns(
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    processor: Processor,
    reward_model_scores: Sequence[float] | None = None,
) -> dict[str, list]:
    """Collect arguments of reward functions for B dataset rows with G completions each.

    Returns:
        {argument name: one value per completion, None if the row lacks the column}
    """
    flat = []
    row_of_each = []
    extents = []
    for row, prompt, group in zip(rows, prompts, completions, strict=True):
        flat += group
        row_of_each += [row] * len(group)
        extents += [image_and_box_sizes(row, prompt, processor)] * len(group)
    texts = [processor.decode_assistant_turn(completion) for completion in flat]
    arguments = RewardArguments(
        completions=texts,
        prompts=[row.messages for row in row_of_each],
        images=[row.images for row in row_of_each],
        row_names=[row.name for row in row_of_each],
        completion_ids=[completion.ids.tolist() for completion in flat],
        answer_texts=[find_answer(text, processor.answer_format) for text in texts],
        turn_texts=[[processor.decode_assistant_turn(turn) for turn in c.turns or [c]] for c in flat],
        image_sizes=[size for size, _ in extents],
        answer_extents=[box_scale for _, box_scale in extents],
        environments=[completion.tool_use.environment for completion in flat],
        row_rewards=[row.columns.get("row_rewards") for row in row_of_each],
        extras=[completion.extra for completion in flat],
        reward_model_scores=reward_model_scores,
    )
    names = sorted(set().union(*(row.columns for row in rows)) - REWARD_ARGUMENTS)
    columns = {name: [row.columns.get(name) for row in row_of_each] for name in names}
    return columns | {name: value for name, value in vars(arguments).items() if value is not None}


def image_and_box_sizes(row: Row, prompt: Prompt, processor: Processor) -> tuple[Size | None, Size | None]:
    """Return the first image's (width, height), in file pixels and in the units of predicted boxes."""
    if not row.images:
        return None, None
    patch_size = processor.image_processor.patch_size
    _, height, width = prompt.image_grid_thw[prompt.second_per_grid_ts == 0][0].tolist()
    # use a stored image size, if any, instead of opening the image file
    size = getattr(row.images, "sizes", {}).get(0) or row.images[0].size
    space = row.columns.get("box_space") or processor.box_space
    return size, box_scale(space, size, (width * patch_size, height * patch_size))


def box_scale(space: str, original: Size, resized: Size) -> Size:
    """Return the image (width, height) in box units, for example (1000, 1000).

    Args:
        space: "original" (file pixels), "resized" (model input pixels, Qwen2.5-VL), "thousandths" (0 to 1000, Qwen2-VL
            and Qwen3-VL) or "unit" (0 to 1).
        original: (width, height) in file pixels.
        resized: (width, height) in model input pixels.
    """
    return {"original": original, "resized": resized, "thousandths": (1000, 1000), "unit": (1, 1)}[space]


def call_rewards(rewards: Sequence[Callable], columns: dict[str, list]) -> Tensor:
    """Return (n completions, K rewards) float32, NaN = not scored."""
    values: list[list[float]] = []
    errors: list[UserError] = []
    for reward in rewards:
        try:
            values.append(reward(**columns))
        except UserError as error:
            errors.append(error)
    for error in errors[1:]:
        errors[0].add_note(f"{user_code(error)}: {error}".removeprefix(": "))
    if errors:  # raise a single error, with the names of all failed rewards
        raise errors[0]
    return torch.tensor(values, dtype=torch.float32).view(len(rewards), len(columns["completions"])).T
