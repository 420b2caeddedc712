"""Tests that PromptSlots arranges rows by their prompt and inverts this arrangement."""

import pytest
import torch

from minivlmrl.kernels.shared_prefix import PromptSlots


@pytest.mark.parametrize("prompt_index", [[0, 0, 1, 1], [0, 0, 0, 1, 2, 2], [0], [0, 2, 2]], ids=str)
def test_products_with_prompts_equal_those_of_each_row(prompt_index):
    prompt_index = torch.tensor(prompt_index)
    prompts = int(prompt_index.max()) + 1
    rows = torch.randn(len(prompt_index), 2, 3, 4)
    keys = torch.randn(prompts, 2, 5, 4)
    slots = PromptSlots(prompt_index, prompts)
    assert torch.equal(slots.by_row(slots.by_prompt(rows)), rows)
    assert slots.by_prompt(rows).shape == (prompts, 2, 3 * slots.slots, 4)
    torch.testing.assert_close(slots.by_row(slots.by_prompt(rows) @ keys.mT), rows @ keys[prompt_index].mT)
    assert torch.equal(slots.expand_to_rows(keys), keys[prompt_index])
