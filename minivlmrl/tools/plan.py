"""What a run needs of each GPU's memory, phase by phase, and which options make it fit.

python -m minivlmrl plan --model FOLDER_OR_CONFIG --gpus 8 [RECIPE] [--section.name=value ...]

Of the model only config.json is read; run/memory.py says what is counted.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from minivlmrl.algorithms.table import find_algorithm
from minivlmrl.hub.folder import read_json
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.run.config import RunConfig, load_config, recipes_folder
from minivlmrl.run.memory import (
    GB,
    IMAGE_TOKENS,
    RESERVE,
    TEXT_TOKENS,
    Costs,
    most,
    plan,
    state_bytes,
)
from minivlmrl.run.resume import KEPT
from minivlmrl.scale.checkpoint import DTYPES

# options that save memory, cheapest first
SAVINGS = (
    "model.activation_checkpointing=true",
    "sharding.enabled=true",
    "{stage}.micro_batch_size=1",
    "model.compute_dtype=bfloat16",
    "rollout.gather_weights=false",
    "sharding.cpu_offload=true",
)
# what LoRA asks for besides, of which the second packs the base
LORA = ["--adapter.r=16", "--model.dtype=bfloat16", "--model.compute_dtype=null"]
LORA = (LORA, [*LORA, "--adapter.quantize=nf4"])
# by GB of memory, of the data sheet: a card, and GB a second of its memory and of its bus to the
# host, one way, and GFLOPs a second (bfloat16, dense)
CARDS = {24: ("L4", 300, 32, 121e3), 48: ("L40S", 864, 32, 362e3), 80: ("H100", 3350, 64, 989e3)}


def main(arguments: list[str]):
    """Print the plan that the command line asks for."""
    usage = "%(prog)s --model MODEL [RECIPE] [--section.name=value ...] [options]"
    p = argparse.ArgumentParser("python -m minivlmrl plan", usage, __doc__.splitlines()[0])
    p.add_argument("--model", required=True, help="a folder with a config.json, or that file")
    p.add_argument("--gpus", type=int, default=1, help="of all nodes together")
    p.add_argument("--gpu_memory", type=float, default=80.0, help="GB of one GPU")
    p.add_argument("--text_tokens", type=int, default=TEXT_TOKENS, help="a prompt's text")
    p.add_argument("--image_tokens", type=int, default=IMAGE_TOKENS, help="h/28 x w/28 (Qwen3: 32)")
    p.add_argument("--frames", type=int, default=1, help="that share image_tokens")
    given, rest = p.parse_known_args(arguments)
    recipe = recipes_folder() / "own_data.yaml"
    if rest and not rest[0].startswith("--"):
        recipe = rest.pop(0)
    path = Path(given.model)
    if not path.exists():
        cure = f"of a repository do: hf download {path} config.json"
        raise ValueError(f"{path}: no such file or folder; {cure}")
    config = ModelConfig.from_dict(read_json(path if path.is_file() else path / "config.json"))
    costs = Costs(config)
    memory = given.gpu_memory * GB
    lengths = given.text_tokens, given.image_tokens, given.frames
    card, *speeds = CARDS[min(CARDS, key=lambda size: abs(size - given.gpu_memory))]
    gpus = f"{given.gpus} GPUs of {given.gpu_memory:g} GB"
    print(f"{given.model}: {costs.parameters:,} parameters; {gpus}")
    config = load_config(recipe, rest)
    for stage in config.stages:
        find_algorithm(stage, config)  # refuses an unknown one

        def planned(overrides: list[str], stage=stage) -> tuple[RunConfig, dict[str, dict]]:
            run = load_config(recipe, [*rest, *overrides])
            return run, plan(run, stage, costs, given.gpus, *lengths)

        def needed(overrides: list[str]) -> float:
            return most(planned(overrides)[1])

        def show(overrides: list[str], stage=stage):
            run, phases = planned(overrides)
            seconds = least_seconds(run, stage, costs, given.gpus, sum(lengths[:2]), *speeds)
            print(table(phases, memory), besides(run, stage, costs, given.gpus, *lengths), sep="\n")
            print(f"over {seconds:.2g} s a step by the data sheet of an {card}")

        print(f"\n{stage}")
        show([])
        if needed([]) <= memory:
            continue
        rate = f"--{stage}.learning_rate={10 * getattr(config, stage).learning_rate:.2g}"
        lora = ([*way, rate] for way in LORA if not config.adapter.r and needed(way) <= memory)
        kept = smallest_saving(needed, stage, memory, SAVINGS[:-1])
        moved = None if kept else smallest_saving(needed, stage, memory)
        ways = {"fits with": kept, "LoRA fits with": next(lora, None), "or it fits with": moved}
        ways = {said: way for said, way in ways.items() if way}
        for said, way in ways.items():
            print(f"{said} {' '.join(way)}")
            show(way)
        if not ways:
            print("does not fit: take more GPUs, shorter prompts or a smaller model")


def smallest_saving(
    needed: Callable[[list[str]], float], stage: str, memory: float, savings=SAVINGS
) -> list[str] | None:
    """The fewest of `savings`, cheap ones first, whose bytes fit; None if all are not enough."""
    savings = [f"--{saving.format(stage=stage)}" for saving in savings]
    for count in range(len(savings) + 1):
        for overrides in map(list, combinations(savings, count)):
            with suppress(ValueError):  # an option that needs another one, which is left out here
                if needed(overrides) <= memory:
                    return overrides
    return None


def table(phases: dict[str, dict], memory: float) -> str:
    """A Markdown table in GB with one column for each phase."""
    names = dict.fromkeys(name for items in phases.values() for name in items)
    rows = {name: [items.get(name) for items in phases.values()] for name in names}
    rows["in reserve"] = [RESERVE] * len(phases)
    rows["all"] = [most({name: phases[name]}) for name in phases]
    lines = [f"| GB on each GPU | {' | '.join(phases)} |", "|---" * (len(phases) + 1) + "|"]
    for name, row in rows.items():
        cells = ["" if size is None else f"{size / GB:.1f}" for size in row]
        if name == "all":
            marks = (" (too much)" * (size > memory) for size in row)
            cells = list(map("".join, zip(cells, marks, strict=True)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def besides(run: RunConfig, stage: str, costs: Costs, gpus: int, *lengths: int) -> str:
    """Say what a stage needs beside the memory of its GPUs: of the host, of the disk."""
    kept = replace(run, sharding=replace(run.sharding, cpu_offload=False))
    moved, items = (plan(r, stage, costs, gpus, *lengths)["train"] for r in (run, kept))
    state = state_bytes(run, stage, costs)
    host = (sum(items.values()) - sum(moved.values())) / GB
    said = f"{host:.1f} GB of host memory for each GPU; " * (host > 0)
    return f"{said}{state / GB:.1f} GB of disk for each of {KEPT + 1} states"


def least_seconds(
    run: RunConfig, stage: str, costs: Costs, gpus: int, prompt: int, *speeds: float
) -> float:
    """Seconds of a step at the `speeds` of CARDS: decoding reads weights, offloading moves them."""
    config = getattr(run, stage)
    algorithm = find_algorithm(stage, run)
    new = 0
    G = len(algorithm.answers)
    passes = 4 if run.adapter.r else 6
    passes += 2 * run.model.activation_checkpointing
    if not algorithm.answers:
        G = config.num_generations
        new = run.sampling.max_new_tokens / config.steps_per_generation
    tokens = passes * (prompt + G * run.sampling.max_new_tokens) + 2 * prompt * (new > 0)
    size = DTYPES[run.model.compute_dtype or run.model.dtype].itemsize
    share = config.prompts_per_step / gpus
    (memory, bus, peak) = (GB * x for x in speeds)
    seconds = costs.backbone * (tokens * share / peak + new * size / memory)
    if run.sharding.cpu_offload:  # to forward and backward, gradients; to a rollout or its tokens
        moves = 3 * math.ceil(share / config.micro_batch_size)
        if new:
            moves += 1 / config.steps_per_generation if run.rollout.gather_weights else new
        size = DTYPES[run.model.dtype].itemsize
        shards = gpus // run.sharding.replicas
        seconds += moves * costs.parameters * size / shards / bus
    return seconds
