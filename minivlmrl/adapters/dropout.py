"""Dropout on the inputs of lora_A, as PEFT's, drawn by key: there is no generator, and nothing to resume.

Whether it drops input i of a token depends on the run's seed, the stage, its optimizer step, the layer, i, and the
token: the number of its prompt in the step, that of its completion in the group, and where it is there. So neighbours,
micro-batches and ranks change no mask. A prompt that is computed once for its completions has one mask for all of them.
Masks are there while a step is trained on: sampling, evaluation, the reference, old log-probabilities have no dropout.
"""

import zlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from minivlmrl.adapters.lora import LoRALinear, adapters
from minivlmrl.batch import GroupBatch, MicroBatch, Step
from minivlmrl.generate import random_numbers
from minivlmrl.kernels.backend import to_device
from minivlmrl.vision import window_order


def with_dropout(algorithm, step: Step, number: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of optimizer step `number`; the masks of one are there until the next is asked for."""
    p, layers, batches = algorithm.run.adapter.dropout, adapters(algorithm.trained), step.micro_batches
    if not p or not layers:
        yield from batches
        return
    rows = [batch.rows for batch in batches]  # of this rank's completions; answers are in order
    sizes = [len(batch.loss_mask) for batch in batches]
    rows = torch.arange(sum(sizes)).split(sizes) if rows[0] is None else rows
    first = algorithm.world.rank * sum(sizes) - min(own.min() for own in rows)
    G, key = getattr(algorithm.config, "num_generations", 0), f"{algorithm.run.seed}/{algorithm.stage}/{number}/dropout"
    for batch, own in zip(batches, rows, strict=True):
        tokens = token_numbers(batch.group, (own + first).tolist(), G or len(algorithm.answers), key)
        place_masks(layers, batch.group, tokens, algorithm.policy.config, p)
        yield batch
    for layer in layers.values():
        layer.drop = None


def token_numbers(group: GroupBatch, rows: list[int], num_generations: int, key: str) -> Tensor:
    """(N,) int32, a random number of each token of the run; rows are the numbers of its completions in the step."""
    drawn, left = [], iter(rows)
    for prompt, lengths in zip(group.layout.prompt_lengths, group.layout.completion_lengths, strict=True):
        own = [divmod(next(left), num_generations) for _ in lengths]
        keys, counts = [f"{own[0][0]}", *(f"{i}/{j}" for i, j in own)], [prompt, *(n - 1 for n in lengths)]
        for name, count in zip(keys, counts, strict=True):
            drawn.append(torch.from_numpy(random_numbers(f"{key}/{name}").integers(-(2**31), 2**31, count)))
    return to_device(torch.cat(drawn).int(), group.input_ids.device)


def place_masks(layers: dict[str, LoRALinear], group: GroupBatch, tokens: Tensor, config, p: float):
    """Give each layer the numbers of its inputs: of tokens, of those that are selected, of patches in window order."""
    vision, merged = config.vision_config, tokens.new_zeros(1)  # a sharded rank without images computes a black one
    if len(group.image_grid_thw):
        merged = tokens[group.vision_index][window_order(group.image_grid_thw, vision)[0].to(tokens.device)]
    patches = mix(merged[:, None] + torch.arange(vision.spatial_merge_size**2).to(tokens)).flatten()
    last = f"model.layers.{config.num_hidden_layers - 1}.mlp."  # after the last attention, see decoder.py
    kinds = {"visual.merger.": merged, "visual.": patches, last: tokens[group.layout.predict_index], "": tokens}
    for name, layer in layers.items():
        numbers = next(numbers for part, numbers in kinds.items() if part in name)
        layer.drop = partial(drop, numbers, zlib.crc32(name.encode()) - 2**31, p)


def drop(tokens: Tensor, layer: int, p: float, x: Tensor) -> Tensor:
    """(N, in_features) of which a share p is 0 and the rest divided by 1 - p; tokens (N,) int32."""
    inputs = mix(torch.arange(x.shape[1], dtype=torch.int32, device=x.device) + layer)
    return x.where(mix(tokens[:, None] + inputs) >= int(p * 2**32) - 2**31, 0) * (1 / (1 - p))


def mix(numbers: Tensor) -> Tensor:
    """Scramble int32 in place, one to one: lowbias32 of Chris Wellons' hash-prospector, factors of its issue 19."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        numbers ^= numbers >> shift & (1 << 32 - shift) - 1  # a shift that fills up with zeros
        numbers *= factor
    return numbers
