"""Test the random numbers of prompts."""

import numpy as np
import torch

from minivlmrl.data.rows import uniform_numbers


def test_random_numbers_depend_on_the_key_of_a_prompt():
    """NumPy's generator is seeded with the key of a prompt, and gives one number per token of a completion."""
    numbers = uniform_numbers(["a", "bc"], 2, 3)
    expected = [np.random.default_rng(seed).random((2, 3)) for seed in ([97], [98, 99])]
    assert numbers.tolist() == np.concatenate(expected).tolist()
    assert numbers.dtype == torch.float64
