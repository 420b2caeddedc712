"""The rewards of a recipe: which functions, and what they are given."""

import math

import PIL.Image
import pytest
import torch

from minivlmrl.generate import Completion
from minivlmrl.image import ImageProcessor
from minivlmrl.reward_functions import names
from minivlmrl.reward_functions.columns import ask_by_name, recipe_columns, recipe_rewards
from minivlmrl.rewards import ask_rewards, reward_columns
from minivlmrl.rows import Processor, Row
from minivlmrl.tasks import shapes


@pytest.fixture
def made():
    """Two rows, their prompts, two completions of each, and the processor; the second row has no image."""
    processor = Processor(shapes.tokenizer(), ImageProcessor())
    ask = {"type": "text", "text": "What is it?"}
    image = PIL.Image.new("RGB", (90, 60))
    rows = [
        Row([{"role": "user", "content": [{"type": "image"}, ask]}], [image], {"solution": "red square"}),
        Row([{"role": "user", "content": [ask]}], [], {"solution": None}, where="rows.jsonl:2"),
    ]
    texts = [["<answer>red square</answer>", "red"], ["<answer>no</answer>", "no"]]
    ids = [[torch.tensor(processor.tokenizer.encode(text)) for text in group] for group in texts]
    completions = [[Completion(own, torch.zeros(len(own)), True) for own in group] for group in ids]
    return rows, [row.prompt(processor) for row in rows], completions, processor


def test_a_recipes_rewards_also_know_sizes_of_images(made):
    """Each row's first image and what the model saw of it, in pixels; everything else is the book's."""
    rows, prompts, completions, processor = made
    columns, book = recipe_columns(*made), reward_columns(rows, completions, processor)
    grid = prompts[0].image_grid_thw[0].tolist()
    seen = (14 * grid[2], 14 * grid[1])
    assert columns == book | {
        "image_sizes": [(90, 60)] * 2 + [None] * 2, "answer_extents": [seen] * 2 + [None] * 2
    }  # fmt: skip


def test_rewards_are_asked_by_name_with_their_weights(made):
    columns, weights = recipe_columns(*made), {"format": 0.5, "accuracy": 2.0}
    rewards = recipe_rewards(weights)
    assert list(rewards.values()) == [0.5, 2.0]
    found = ask_rewards(list(rewards), columns)
    torch.testing.assert_close(
        found, torch.tensor([[0, 1], [0, 0], [0, math.nan], [0, math.nan]]), equal_nan=True, rtol=0, atol=0
    )
    assert torch.equal(ask_by_name(list(weights), columns).nan_to_num(9), found.nan_to_num(9))


@pytest.mark.parametrize(("said", "says"), [([1.0], "returned 1 values for 4"), (["x"] * 4, "'x'")])
def test_what_they_return_is_checked(made, monkeypatch, said, says):
    monkeypatch.setitem(names.REWARDS, "own", lambda completions, **columns: said)
    with pytest.raises(ValueError, match=f"reward own.*{says}"):
        ask_by_name(["own"], recipe_columns(*made))
