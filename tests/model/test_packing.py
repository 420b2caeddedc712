"""Test what a packed batch refuses and caches; test_properties.py tests its content."""

import pytest
import torch

from tests.helpers import tiny


def test_an_empty_completion_is_refused():
    prompt = tiny.prompt(torch.Generator(), [])
    with pytest.raises(ValueError, match="no tokens"):
        tiny.pack([prompt], [[torch.zeros(0, dtype=torch.long)]], tiny.config())


def test_cached_image_embeddings_are_used_if_all_prompts_have_them():
    generator = torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, grids) for grids in ([(1, 4, 6)], [(1, 2, 2)])]
    prompts[0].vision_embeds = torch.ones(6, 64)
    assert tiny.pack(prompts, [[], []], tiny.config()).vision_embeds is None
    prompts[1].vision_embeds = torch.zeros(1, 64)
    assert tiny.pack(prompts, [[], []], tiny.config()).vision_embeds.tolist() == [[1.0] * 64] * 6 + [[0.0] * 64]
