"""Seconds of a training forward and backward: each prompt once for its G completions, or once for every completion.

python benchmarks/group_forward.py                  # a table, about two minutes
python benchmarks/group_forward.py --json FILE      # and its numbers
python benchmarks/group_forward.py --quick          # one small cell

Peer: the layout that other trainers use, a row for each completion with a prompt and an image of its own, through the
same model code (so without padding, which would slow it further). Time is the CPU time of one thread, the two layouts
in turn, the median of each. First, in float64, the log-probabilities and gradients of the two are compared.

The ratio holds both savings, of prompt tokens and of images, and grows with the price of an image. Most of each prompt
is its image here, as with photographs. Counted by the parameters that work on a token, the default tower (--tower
large, 1.36 million parameters with the decoder) spends 3.5 times as much on an image token as the decoder on any token,
as in a VLM with a small decoder; --tower small spends 0.4 times as much, as Qwen2.5-VL-7B does (3B: 0.8).
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import time
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from minivlmrl.batch import GroupBatch, pack
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import Prompt
from minivlmrl.scale.checkpoint import initialize, random_model
from minivlmrl.tasks import shapes

RECIPE_MODEL = Path(__file__).resolve().parents[1] / "recipes" / "shapes_model.json"
IMAGE_SIDES = {64: 6, 128: 10, 312: 16}  # prompt tokens -> merged image tokens a side (84, 140 and 224 pixels)
NUM_GENERATIONS = (4, 8, 16)
COMPLETION_TOKENS = (16, 48, 128)
TEXT_TOKENS = 256  # ids below are text, not control tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="prompt 64, G 4, completion 16 alone")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each layout and cell")
    parser.add_argument("--tower", choices=TOWERS, default="large", help="size of the vision tower")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(options.tower)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} million parameters, {model.config.num_hidden_layers} layers, torch {torch.__version__}")
    difference = compare(model)
    print(
        "float64, grouped against repeated, max difference:", ", ".join(f"{k} {v:.1e}" for k, v in difference.items())
    )
    print(f"{'prompt':>6} {'G':>3} {'completion':>10} {'group ms':>9} {'repeated ms':>11} {'ratio':>6}")
    cells = []
    for cell in [(64, 4, 16)] if options.quick else product(IMAGE_SIDES, NUM_GENERATIONS, COMPLETION_TOKENS):
        cells.append(numbers := measure(model, *cell, options.repeats))
        print("{:6} {:3} {:10} {:9.1f} {:11.1f} {:6.2f}".format(*numbers.values()), flush=True)
    if options.json:
        about = {
            "parameters": size,
            "tower": options.tower,
            "float64_max_difference": difference,
            "repeats": options.repeats,
            "threads": 1,
        }
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        about |= {"versions": {"torch": torch.__version__}, "date": date}
        options.json.write_text(json.dumps({"cells": cells, **about}, indent=2) + "\n")


TOWERS = {  # see the module's docstring
    "large": {"depth": 4, "hidden_size": 96, "intermediate_size": 256},
    "small": {"depth": 1, "hidden_size": 48, "intermediate_size": 96},
}


def build_model(tower: str) -> Qwen2_5_VL:
    """The default recipe's model with 4 decoder layers instead of 3, and another vision tower."""
    config = random_model(RECIPE_MODEL, shapes.tokenizer(), seed=0)[0].config
    vision = dataclasses.replace(config.vision_config, **TOWERS[tower])
    model = Qwen2_5_VL(dataclasses.replace(config, num_hidden_layers=4, vision_config=vision))
    initialize(model, torch.Generator().manual_seed(0))
    return model


def measure(model: Qwen2_5_VL, prompt_tokens: int, num_generations: int, completion_tokens: int, repeats: int) -> dict:
    """Median CPU milliseconds of each layout."""
    prompts = 1 if prompt_tokens > 128 else 2
    batches = layouts(model.config, prompts, prompt_tokens, num_generations, completion_tokens)
    seconds = ([], [])
    for _ in range(repeats + 1):
        for batch, spent in zip(batches, seconds, strict=True):
            begin = time.process_time()
            forward_backward(model, batch)
            spent.append(time.process_time() - begin)
    group, repeated = (statistics.median(spent[1:]) * 1e3 for spent in seconds)  # the first pass warms up
    return {
        "prompt_tokens": prompt_tokens, "num_generations": num_generations, "completion_tokens": completion_tokens,
        "group_ms": round(group, 1), "repeated_ms": round(repeated, 1), "ratio": round(repeated / group, 2),
    }  # fmt: skip


def forward_backward(model: Qwen2_5_VL, batch: GroupBatch) -> Tensor:
    model.zero_grad()
    logps, _ = per_token_logps(model, batch)
    logps.sum().backward()
    return logps.detach()


def layouts(
    config: ModelConfig, prompts: int, prompt_tokens: int, num_generations: int, completion_tokens: int
) -> tuple[GroupBatch, GroupBatch]:
    """The same random prompts and completions, grouped and repeated; completion tokens come in one order in both."""
    generator = torch.Generator().manual_seed(0)
    made = [make_prompt(config, prompt_tokens, generator) for _ in range(prompts)]
    groups = [list(torch.randint(TEXT_TOKENS, (num_generations, completion_tokens), generator=generator)) for _ in made]
    rows = [(prompt, [completion]) for prompt, group in zip(made, groups, strict=True) for completion in group]
    return pack(made, groups, config), pack(*zip(*rows, strict=True), config)


def make_prompt(config: ModelConfig, tokens: int, generator: torch.Generator) -> Prompt:
    """Random text around one random image."""
    side, merge = IMAGE_SIDES[tokens], config.vision_config.spatial_merge_size
    image = [config.vision_start_token_id, *[config.image_token_id] * side**2, config.vision_end_token_id]
    text = torch.randint(TEXT_TOKENS, (tokens - len(image),), generator=generator)
    half = len(text) // 2
    pixel_values = torch.randn((side * merge) ** 2, config.vision_config.patch_dim, generator=generator)
    grid = torch.tensor([[1, side * merge, side * merge]])
    return Prompt(torch.cat([text[:half], torch.tensor(image), text[half:]]), pixel_values, grid)


def compare(model: Qwen2_5_VL) -> dict[str, float]:
    """Largest differences between the two layouts in float64: of a log-probability, and of a gradient."""
    model.double()
    logps, gradients = [], []
    for batch in layouts(model.config, prompts=2, prompt_tokens=64, num_generations=4, completion_tokens=16):
        logps.append(forward_backward(model, batch))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.float()
    largest = gradients[0].abs().max()
    return {
        "logps": (logps[0] - logps[1]).abs().max().item(),
        "gradients": (gradients[0] - gradients[1]).abs().max().item(),
        "gradients / largest": ((gradients[0] - gradients[1]).abs().max() / largest).item(),
    }


if __name__ == "__main__":
    main()
