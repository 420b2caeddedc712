"""Sample tokens with the Triton kernels of kernels/sample_blocks.py instead of torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minivlmrl.generation.generate import TokenSampler
from minivlmrl.kernels.backend import backend_for, to_device
from minivlmrl.kernels.sample_blocks import sample_blocks


def samples_in_blocks(temperature: float, device: torch.device) -> bool:
    """Return whether make_block_sampler can replace make_token_sampler, if there are no filters."""
    if not temperature:
        return False
    return backend_for(torch.empty(0, device=device), "sample_blocks") == "triton"


def make_block_sampler(
    temperature: float, stop_ids: Sequence[int], uniforms: Tensor, device: torch.device
) -> TokenSampler:
    """Make the function with which `generate` samples one token per row.

    The function equals that of make_token_sampler with sample_by_uniforms, except for the rounding
    of probabilities.

    Args:
        temperature: logit divisor, greater than 0.
        stop_ids: token ids that end a completion.
        uniforms: (R, max_new_tokens) float64 in [0, 1), see sample_by_uniforms.
        device: the logits' device.
    """
    uniforms = to_device(uniforms, device)
    stop_index = to_device(torch.tensor(stop_ids, dtype=torch.long), device)

    def sample_token(logits: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids, logps = sample_blocks(logits.float(), uniforms[rows, counts], temperature)
        return ids, logps, torch.isin(ids, stop_index)

    return sample_token
