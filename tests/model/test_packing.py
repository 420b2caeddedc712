"""Test the packed batch: order of prompts and completions, positions, masks and images."""

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.tiny import pack


def test_the_docstring_example():
    """The last token of a completion is predicted, but is not an input."""
    prompt = tiny.prompt(torch.Generator(), [], text=3)
    batch = pack([prompt], [[torch.tensor([10, 11, 12]), torch.tensor([20, 21])]], tiny.config())
    assert batch.input_ids.tolist() == [*prompt.input_ids.tolist(), 10, 11, 20]
    assert batch.completion_ids.tolist() == [10, 11, 12, 20, 21]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]] * 3


def test_completion_mask_and_rows_come_from_lengths_not_from_token_ids():
    """Image and pad tokens in a completion are treated as text."""
    prompt = tiny.prompt(torch.Generator().manual_seed(0), [(1, 4, 6)])
    completions = [torch.tensor([tiny.IMAGE, 0, 2, tiny.IMAGE]), torch.tensor([7])]
    batch = pack([prompt], [completions], tiny.config())
    assert len(batch.vision_index) == 6
    assert batch.completion_mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.pad(batch.completion_ids).tolist() == [[tiny.IMAGE, 0, 2, tiny.IMAGE], [7, 0, 0, 0]]
    assert [piece.tolist() for piece in batch.completion_ids.split(batch.layout.row_lengths)] == [
        c.tolist() for c in completions
    ]


def test_an_empty_completion_is_refused():
    prompt = tiny.prompt(torch.Generator(), [])
    with pytest.raises(ValueError, match="no tokens"):
        pack([prompt], [[torch.zeros(0, dtype=torch.long)]], tiny.config())


def test_cached_image_embeddings_are_used_if_all_prompts_have_them():
    generator = torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, grids) for grids in ([(1, 4, 6)], [(1, 2, 2)])]
    prompts[0].vision_embeds = torch.ones(6, 64)
    assert pack(prompts, [[], []], tiny.config()).vision_embeds is None
    prompts[1].vision_embeds = torch.zeros(1, 64)
    assert pack(prompts, [[], []], tiny.config()).vision_embeds.tolist() == [[1.0] * 64] * 6 + [[0.0] * 64]
