"""Estimate a run's GPU memory, per GPU and phase.

minivlmrl memory RECIPE --gpu_memory auto [--section.name=value ...]
minivlmrl memory --model FOLDER_OR_REPOSITORY --gpus 8 [RECIPE] [--section.name=value ...]

No weights are loaded. Prompt lengths are measured if the rows exist; otherwise, prompts have 200 text and 1000 image
tokens. --gpu_memory is a size in GB, a card such as T4 or 4090, or auto for this machine's free memory.
"""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import torch

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.download import SETTINGS, find_folder
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_files import split_of
from minivlmrl.data.row_sizes import RowSize
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, pluralize, require
from minivlmrl.extras.memory.cards import CARDS, Card, find_card
from minivlmrl.extras.memory.estimate import GB, RESERVE, MemoryEstimator, MemoryQuestion, estimate_phases, peak_bytes
from minivlmrl.extras.memory.memory_check import measure_datasets, refusal
from minivlmrl.json_files import read_json
from minivlmrl.model import config_json
from minivlmrl.model.build import read_sizes
from minivlmrl.model.checkpoint import load_processor
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.peft import base_model, is_adapter_folder
from minivlmrl.run.datasets import load_datasets
from minivlmrl.run.setup import adapt_processor, filter_long_rows
from minivlmrl.trainers.registry import find_trainers


def main(arguments: list[str]):
    """Print a memory table per stage, and what to change if it does not fit."""
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
    card = find_gpu(options.gpu_memory)
    costs = MemoryEstimator(model_config(name), card.before_ampere)
    print(f"{name}: {costs.parameters:,} parameters; {pluralize(options.gpus, 'GPU')} of {card.memory:g} GB")
    measured = open_rows(config, find_settings(name))
    if measured is None and config.data.train_file:
        missing = f"{config.data.train_file}, data.eval_file or tokenizer.json beside config.json"
        print(f"The rows were not read, because {missing} is missing; the sizes of the prompts are assumed.")
    for stage in config.stage_names:
        question = MemoryQuestion(config, stage, costs, options.gpus)
        if measured is not None:
            datasets, processor = measured
            rows, held_out = measure_datasets(question, datasets, processor)
            question = replace(question, rows=rows, held_out=held_out)
        phases = estimate_phases(question)
        print(f"\n{stage}: {row_text(question.rows[0])}\n{memory_table(phases, card.memory * GB)}")
        if peak_bytes(phases) > card.memory * GB:
            print(f"\n{refusal(question, card.memory * GB)}")


def row_text(row: RowSize) -> str:
    """Describe the row for which memory is estimated."""
    name = f"the largest row is {row.where}" if row.where else "assumed prompts"
    return f"{name}: {row.text_tokens:,} text tokens and {row.image_tokens:,} image tokens"


def find_gpu(text: str) -> Card:
    """Return the memory of a card, from its name, a size in GB or "auto"."""
    if text == "auto":
        if not torch.cuda.is_available():
            raise UserError("--gpu_memory auto needs a GPU, but PyTorch finds none; pass its memory in GB or its name")
        return Card(torch.cuda.mem_get_info()[0] / GB, torch.cuda.get_device_capability() < (8, 0))
    card = find_card(text)
    if card is None and re.fullmatch(r"\d{1,3}(\.\d*)?", text):  # size in GB, at most three digits: 2080 is a GPU name
        card = Card(float(text), False)
    if card is None:
        known = ", ".join(CARDS.values())
        raise UserError(f"--gpu_memory is {text!r}, but it must be a number of GB, auto or one of {known}")
    return card


def open_rows(config: RunConfig, folder: Path) -> tuple[dict[str, Dataset], Processor] | None:
    """Open the recipe's datasets and the processor; return None if a file is missing."""
    data = config.data
    files = [data.train_file, *data.files.values(), *(section.file for section in data.train)]
    has_rows = data.task is not None or any(files)
    paths = [split_of(file)[0] for file in (*files, data.eval_file) if file]
    if not (has_rows and all(path.exists() for path in (*paths, folder / "tokenizer.json"))):
        return None
    datasets = load_datasets(config, {stage: trainer.needs for stage, trainer in find_trainers(config).items()})
    processor = adapt_processor(load_processor(folder, data.min_pixels, data.max_pixels), config)
    return filter_long_rows(config, datasets, processor, World()), processor


def build_parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [RECIPE] [--model MODEL] [--section.name=value ...] [options]"
    parser = argparse.ArgumentParser("minivlmrl memory", usage, str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--model", help="config.json, its folder or a repository id; defaults to model.path")
    add("--gpus", type=int, default=1, help="number of GPUs on all nodes together")
    add("--gpu_memory", default="80", help="memory of each GPU in GB, a card such as 4090, or auto; defaults to 80")
    return parser


def find_settings(name: str | Path) -> Path:
    """Return the folder with config.json, downloading only config and tokenizer from the Hub."""
    path = Path(name)
    return path.parent if path.is_file() else find_folder(path, SETTINGS)


def model_config(name: str | Path) -> ModelConfig:
    """Read the model's sizes from a config.json, a folder or a repository."""
    if Path(name).is_file():
        return read_sizes(name)
    return config_json.from_dict(read_json(find_settings(name) / "config.json"))


def memory_table(phases: dict[str, dict], gpu_bytes: float) -> str:
    """Format an estimate as a Markdown table, one column per phase."""
    rows = [["GB on each GPU", *phases], ["---" for _ in (None, *phases)]]
    for name in dict.fromkeys(name for items in phases.values() for name in items):
        rows.append([name, *(f"{items[name] / GB:.1f}" if name in items else "" for items in phases.values())])
    rows.append(["in reserve", *[f"{RESERVE / GB:.1f}"] * len(phases)])
    totals = [peak_bytes({name: items}) for name, items in phases.items()]
    rows.append(["total", *(f"{total / GB:.1f}{' (too much)' if total > gpu_bytes else ''}" for total in totals)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
