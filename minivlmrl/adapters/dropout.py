"""Dropout on the inputs of lora_A, as PEFT's, by a key: no generator, and nothing to resume.

A mask depends on the key and on the layer alone. So blocks that are computed again in the backward
draw the same one. A prompt that is computed once for its completions has one mask for all of them.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from minivlmrl.adapters.lora import adapters


@contextmanager
def dropout(model: nn.Module, p: float, key: str) -> Iterator[None]:
    """Let a model's adapters drop a share p of their inputs."""
    layers = adapters(model) if p else {}
    for name, layer in layers.items():
        layer.drop = partial(drop, p, zlib.crc32(f"{key}/{name}".encode()))
    yield
    for layer in layers.values():
        layer.drop = None


def drop(p: float, seed: int, x: Tensor) -> Tensor:
    """(N, in_features) with a share p set to 0 and the rest divided by 1 - p."""
    generator = None if x.is_meta else torch.Generator(x.device).manual_seed(seed)
    return x * torch.empty_like(x).bernoulli_(1 - p, generator=generator) / (1 - p)
