"""Rows laid out by their prompt, and back."""

import pytest
import torch

from minivlmrl.kernels.prompt_slots import PromptSlots


@pytest.mark.parametrize("owner", [[0, 0, 1, 1], [0, 0, 0, 1, 2, 2], [0], [0, 2, 2]], ids=str)
def test_products_with_prompts_equal_those_of_each_row(owner):
    owner = torch.tensor(owner)
    prompts, generator = int(owner.max()) + 1, torch.Generator().manual_seed(0)
    rows = torch.randn(len(owner), 2, 3, 4, generator=generator)
    keys = torch.randn(prompts, 2, 5, 4, generator=generator)
    slots = PromptSlots(owner, prompts)
    assert torch.equal(slots.by_row(slots.by_prompt(rows)), rows)
    assert slots.by_prompt(rows).shape == (prompts, 2, 3 * slots.slots, 4)
    torch.testing.assert_close(slots.by_row(slots.by_prompt(rows) @ keys.mT), rows @ keys[owner].mT)
