"""Estimate the memory that a run needs on each GPU, phase by phase.

python -m minivlmrl memory --model FOLDER_OR_CONFIG --gpus 8 [RECIPE] [--section.name=value ...]

Only config.json of the model is read. diagnostics/memory.py explains the estimate.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig, ShardingOptions
from minivlmrl.data.download import find_folder
from minivlmrl.diagnostics.memory import (
    GB,
    IMAGE_TOKENS,
    RESERVE,
    TEXT_TOKENS,
    MemoryEstimator,
    estimate_phases,
    peak_bytes,
)
from minivlmrl.json_files import read_json
from minivlmrl.model import config_json
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.peft import base_model, is_adapter_folder

# meaning of the phases (columns) and items (rows) whose name in the table does not explain them
LEGEND = {
    "rollout": "sampling of completions",
    "score": "log-probabilities of the completions under the old policy and the reference model",
    "train": "forward and backward pass of one micro-batch",
    "weights": "the policy; with LoRA its base model and adapters",
    "optimizer": "moments of AdamW",
    "reference": "weights that the reference model does not share with the policy",
    "gathered": "full weights that FSDP assembles from the shards of all GPUs",
    "16-bit adapters": "copies of the float32 adapters, with which completions are sampled",
    "joined weights": "copies of the weights of q, k and v, which decode steps multiply at once",
    "keys and values": "KV cache of the completions that are sampled at the same time",
    "prompts' forward": "activations of the prompts of a rollout, before sampling begins",
    "logits": "scores over the vocabulary; training computes them piece by piece",
    "forward and backward": "activations that are kept for the backward pass",
    "in reserve": "evaluations, the CUDA context and buffers of NCCL",
}


def main(arguments: list[str]):
    options, overrides = build_parser().parse_known_args(arguments)
    recipe = recipes_folder() / "own_data.yaml"
    if overrides and not overrides[0].startswith("--"):
        recipe = overrides.pop(0)
    costs = MemoryEstimator(model_config(Path(options.model)))
    gpu_bytes = options.gpu_memory * GB
    gpu_text = f"{options.gpus} GPUs of {options.gpu_memory:g} GB"
    parameters_text = f"{costs.parameters:,} parameters"
    if costs.active_parameters < costs.parameters:
        parameters_text += f", {costs.active_parameters:,} active per token"
    print(f"{options.model}: {parameters_text}; {gpu_text}")
    run = load_config(recipe, overrides)
    printed = ["in reserve"]
    sizes = options.gpus, options.text_tokens, options.image_tokens, options.frames

    def estimate(config: RunConfig, stage: str) -> dict[str, dict[str, float]]:
        return estimate_phases(config, stage, costs, *sizes)

    for stage in run.stage_names:
        phases = estimate(run, stage)
        print(f"\n{stage}\n{memory_table(phases, gpu_bytes)}")
        for section, advice in faster_sharding(run, options.gpus):
            changed = copy(run)
            changed.sharding = section
            needed_bytes = peak_bytes(estimate(changed, stage))
            if needed_bytes <= gpu_bytes:
                print(f"{advice}. It needs {needed_bytes / GB:.1f} GB on each GPU.")
        if peak_bytes(phases) > gpu_bytes:
            print(
                "This does not fit into a GPU. docs/memory.md lists options that save memory; "
                "recipes/own_data_one_card.yaml trains LoRA on a card of 24 GB."
            )
        printed += [*phases, *itertools.chain(*phases.values())]
    print()
    for name, meaning in LEGEND.items():
        if name in printed:
            print(f"{name}: {meaning}")


def faster_sharding(run: RunConfig, gpus: int) -> Iterator[tuple[ShardingOptions, str]]:
    """Yield sections `sharding` that send less between GPUs but need more memory, with a sentence.

    A section is no advice if it makes a run slower, or if its options are already set.
    """
    section = run.sharding
    if gpus == 1 or not section.enabled or section.cpu_offload:
        return
    if run.adapter.r:
        yield (
            ShardingOptions(),
            "sharding.enabled=false sends only the gradients of the adapters between GPUs, once "
            "per step, because each GPU has all weights",
        )
    if not section.once_per_step:
        yield (
            replace(section, once_per_step=True),
            "sharding.once_per_step=true gathers weights and reduces gradients once per step, and "
            "not once per micro-batch",
        )


def build_parser() -> argparse.ArgumentParser:
    usage = "%(prog)s --model MODEL [RECIPE] [--section.name=value ...] [options]"
    parser = argparse.ArgumentParser(
        "python -m minivlmrl memory", usage, str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    add("--model", required=True, help="config.json, or the folder that contains it")
    add("--gpus", type=int, default=1, help="number of GPUs on all nodes together")
    add("--gpu_memory", type=float, default=80.0, help="memory of each GPU in GB")
    add("--text_tokens", type=int, default=TEXT_TOKENS, help="number of text tokens per prompt")
    add(
        "--image_tokens",
        type=int,
        default=IMAGE_TOKENS,
        help="number of image tokens per prompt: height/28 x width/28 (/32 instead for Qwen3)",
    )
    add(
        "--frames",
        type=int,
        default=1,
        help="number of video frames that the image tokens are divided into",
    )
    return parser


def model_config(path: Path) -> ModelConfig:
    """Read a config.json; `path` is the file or the folder that contains it.

    The folder of an adapter stands for its base model.
    """
    if is_adapter_folder(path):
        path = find_folder(base_model(path))
    if not path.exists():
        raise ValueError(
            f"{path}: no such file or folder; if this is a repository id, run `hf download {path} "
            "config.json` and pass the file"
        )
    return config_json.from_dict(read_json(path if path.is_file() else path / "config.json"))


def memory_table(phases: dict[str, dict], gpu_bytes: float) -> str:
    """Format the estimate in GB as a Markdown table with a column for each phase."""
    item_names = dict.fromkeys(name for items in phases.values() for name in items)
    lines = [table_row("GB on each GPU", phases), "|---" * (len(phases) + 1) + "|"]
    for name in item_names:
        item_sizes = [items.get(name) for items in phases.values()]
        cells = ["" if size is None else f"{size / GB:.1f}" for size in item_sizes]
        lines.append(table_row(name, cells))
    lines.append(table_row("in reserve", [f"{RESERVE / GB:.1f}"] * len(phases)))
    totals = []
    for name in phases:
        total_bytes = peak_bytes({name: phases[name]})
        mark = " (too much)" if total_bytes > gpu_bytes else ""
        totals.append(f"{total_bytes / GB:.1f}{mark}")
    lines.append(table_row("total", totals))
    return "\n".join(lines)


def table_row(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"
