"""Estimate a run's GPU memory, per GPU and phase.

minivlmrl memory RECIPE --gpu_memory auto [--section.name=value ...]
minivlmrl memory --model FOLDER_OR_REPOSITORY --gpus 8 [RECIPE] [--section.name=value ...]

No weights are loaded. Prompt lengths are measured if the rows exist; otherwise, prompts have 200 text and 1000 image
tokens. --gpu_memory is a size in GB, or auto for this machine's free memory.
"""

import argparse
import re
from pathlib import Path

import torch

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.download import SETTINGS, find_folder
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, pluralize, require
from minivlmrl.model.build import read_sizes
from minivlmrl.model.checkpoint import load_processor
from minivlmrl.model.peft import base_model, is_adapter_folder
from minivlmrl.monitor.memory.estimate import GB, RESERVE, MemoryEstimator, MemoryQuestion, estimate_phases, peak_bytes
from minivlmrl.monitor.memory.memory_check import measure_datasets
from minivlmrl.monitor.memory.out_of_memory import cures
from minivlmrl.run.datasets import load_datasets
from minivlmrl.run.setup import adapt_processor, filter_long_rows
from minivlmrl.trainers.registry import find_trainers


def main(arguments: list[str]):
    """Print the estimated memory per stage and phase, and options to change if it does not fit."""
    options, overrides = build_parser().parse_known_args(arguments)
    require(options.gpus >= 1, "--gpus", options.gpus, "at least 1")
    recipe = recipes_folder() / "own_data.yaml"
    if overrides and not overrides[0].startswith("--"):
        recipe = overrides.pop(0)
    config = load_config(recipe, overrides)
    name = options.model or config.model.path
    if name is None:
        raise UserError(f"{recipe} has no model.path; pass --model with a config.json or a folder")
    name = base_model(name) if is_adapter_folder(name) else name
    file = Path(name) if Path(name).is_file() else find_folder(name, SETTINGS) / "config.json"
    estimator = MemoryEstimator(read_sizes(file))
    available = find_memory(options.gpu_memory)
    gpus = f"{pluralize(options.gpus, 'GPU')} of {available / GB:g} GB"
    print(f"{name}: {estimator.parameters:,} parameters; {gpus}")
    try:
        datasets, processor = open_rows(config, file.parent)
    except UserError as error:
        missing, _, _ = str(error).partition(": ")
        print(f"Prompt sizes are assumed, because these rows were not read: {missing}")
        datasets = {}
    for stage in config.stage_names:
        question = MemoryQuestion(config, stage, estimator, options.gpus)
        if datasets:
            question = measure_datasets(question, datasets, processor)
        phases = estimate_phases(question)
        row = question.rows[0]
        where = f"the largest row is {row.where}" if row.where else "assumed prompts"
        print(f"\n{stage}: {where}: {row.text_tokens:,} text tokens and {row.image_tokens:,} image tokens")
        for phase, items in phases.items():
            sizes = ", ".join(f"{size / GB:.1f} {name}" for name, size in items.items() if size)
            print(f"{phase:<12}{peak_bytes({phase: items}) / GB:6.1f} GB: {sizes}, {RESERVE / GB:.1f} in reserve")
        if peak_bytes(phases) > available:
            largest = max(phases, key=lambda phase: sum(phases[phase].values()))
            ways = [*cures(config, stage, largest, options.gpus), "a smaller data.max_pixels or model"]
            print(f"{stage} does not fit. Try {', then '.join(ways)}; docs/memory.md explains these options.")


def find_memory(text: str) -> float:
    """Return GPU memory in bytes, given --gpu_memory: a size in GB, or "auto"."""
    if text == "auto":
        if not torch.cuda.is_available():
            raise UserError("--gpu_memory auto needs a GPU, but PyTorch finds none; pass its memory in GB")
        return torch.cuda.mem_get_info()[0]
    require(bool(re.fullmatch(r"\d{1,3}(\.\d*)?", text)), "--gpu_memory", text, "a number of GB, such as 24, or auto")
    return float(text) * GB


def open_rows(config: RunConfig, folder: Path) -> tuple[dict[str, Dataset], Processor]:
    """Open a recipe's datasets and processor, to measure prompts."""
    needs = {stage: trainer.needs for stage, trainer in find_trainers(config).items()}
    datasets = load_datasets(config, needs)
    processor = load_processor(folder, config.data.min_pixels, config.data.max_pixels)
    processor = adapt_processor(processor, config)
    return filter_long_rows(config, datasets, processor, World()), processor


def build_parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [RECIPE] [--model MODEL] [--section.name=value ...] [options]"
    parser = argparse.ArgumentParser("minivlmrl memory", usage, str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--model", help="config.json, its folder or a repository id; defaults to model.path")
    add("--gpus", type=int, default=1, help="number of GPUs on all nodes together")
    add("--gpu_memory", default="80", help="memory of each GPU in GB, or auto; defaults to 80")
    return parser
