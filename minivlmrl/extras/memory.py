"""Estimate the memory that a run needs on each GPU, phase by phase.

python -m minivlmrl memory RECIPE --gpu_memory auto [--section.name=value ...]
python -m minivlmrl memory --model FOLDER_OR_REPOSITORY --gpus 8 [RECIPE] [--section.name=value ...]

The model's weights are not read. The recipe's rows are measured if they exist; otherwise,
or with --text_tokens or --image_tokens, all prompts are assumed to be equal. With
--gpu_memory auto, the size is the free memory of this machine's GPU. diagnostics/memory.py
explains the estimate.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.data.download import find_settings
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_summary import RowSize
from minivlmrl.data.rows import Dataset
from minivlmrl.diagnostics.memory import GB, RESERVE, MemoryEstimator, MemoryQuestion, estimate_phases, peak_bytes
from minivlmrl.diagnostics.memory_check import measure_datasets, refusal
from minivlmrl.distributed.process_group import World
from minivlmrl.json_files import read_json
from minivlmrl.model import config_json
from minivlmrl.model.checkpoint import load_processor
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.peft import base_model, is_adapter_folder
from minivlmrl.run.datasets import load_datasets
from minivlmrl.run.setup import adapt_processor, fit_rows
from minivlmrl.trainers.registry import find_trainers


def main(arguments: list[str]):
    options, overrides = build_parser().parse_known_args(arguments)
    recipe = recipes_folder() / "own_data.yaml"
    if overrides and not overrides[0].startswith("--"):
        recipe = overrides.pop(0)
    run = load_config(recipe, overrides)
    name = options.model or run.model.path
    if name is None:
        raise ValueError(f"{recipe} has no model.path; pass --model with a config.json or a folder")
    name = base_model(name) if is_adapter_folder(name) else name
    costs = MemoryEstimator(model_config(name))
    gpu_bytes = gpu_size(options.gpu_memory)
    print(f"{name}: {parameters_text(costs)}; {options.gpus} GPUs of {gpu_bytes / GB:g} GB")
    typical = [assumed_row(options)]
    vision = costs.config.vision_config
    images = ImageProcessor(vision.patch_size, merge_size=vision.spatial_merge_size)
    measured = None
    if options.text_tokens is None and options.image_tokens is None:
        measured = open_rows(run, find_settings(name))
    for stage in run.stage_names:
        question = MemoryQuestion(run, stage, costs, options.gpus, typical, typical)
        if measured is not None:
            datasets, processor = measured
            images = processor.image_processor
            rows, held_out = measure_datasets(question, datasets, processor)
            question = replace(question, rows=rows, held_out=held_out)
        phases = estimate_phases(question)
        print(f"\n{stage}: {row_text(question.rows[0])}\n{memory_table(phases, gpu_bytes)}")
        if peak_bytes(phases) > gpu_bytes:
            print(f"\n{refusal(question, images, gpu_bytes)}")


def parameters_text(costs: MemoryEstimator) -> str:
    text = f"{costs.parameters:,} parameters"
    if costs.active_parameters < costs.parameters:
        text += f", {costs.active_parameters:,} active per token"
    return text


def row_text(row: RowSize) -> str:
    name = f"the largest row is {row.where}" if row.where else "assumed prompts"
    return f"{name}: {row.text_tokens:,} text tokens and {row.image_tokens:,} image tokens"


def gpu_size(text: str) -> float:
    """Return a GPU's memory in bytes: a number of GB, or "auto" for the free memory here."""
    if text == "auto":
        if not torch.cuda.is_available():
            raise ValueError("--gpu_memory auto needs a GPU, but PyTorch finds none; pass its GB")
        return torch.cuda.mem_get_info()[0]
    try:
        return float(text) * GB
    except ValueError as error:
        raise ValueError(f"--gpu_memory is {text!r}, but it must be GB or auto") from error


def assumed_row(options: argparse.Namespace) -> RowSize:
    """Return the size for all rows that the command line gives; the default is RowSize()."""
    given = {name: getattr(options, name) for name in ("text_tokens", "image_tokens", "frames")}
    return RowSize(**{name: value for name, value in given.items() if value is not None})


def open_rows(run: RunConfig, folder: Path) -> tuple[dict[str, Dataset], Processor] | None:
    """Open a recipe's rows, and the processor that measures them.

    Args:
        folder: the model's folder.

    Returns:
        None if the recipe names no rows, its files do not exist, or the folder has no tokenizer.
    """
    data = run.data
    files = [data.train_file, *data.files.values(), *(section.file for section in data.train)]
    named = [file for file in files if file]
    is_complete = data.task is not None or (bool(named) and all(Path(f).exists() for f in named))
    if not is_complete or not (folder / "tokenizer.json").is_file():
        return None
    if data.eval_file and not Path(data.eval_file).exists():
        return None
    trainers = find_trainers(run)
    datasets = load_datasets(run, {stage: trainer.needs for stage, trainer in trainers.items()})
    processor = adapt_processor(load_processor(folder, data.min_pixels, data.max_pixels), run)
    return fit_rows(run, datasets, processor, World())[0], processor


def build_parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [RECIPE] [--model MODEL] [--section.name=value ...] [options]"
    parser = argparse.ArgumentParser("python -m minivlmrl memory", usage, str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--model", help="config.json, its folder or a repository id; defaults to model.path")
    add("--gpus", type=int, default=1, help="number of GPUs on all nodes together")
    add("--gpu_memory", default="80", help="memory of each GPU in GB, or auto; defaults to 80")
    add("--text_tokens", type=int, help="number of text tokens per prompt; defaults to 200")
    add(
        "--image_tokens",
        type=int,
        help="number of image tokens per prompt: height/28 x width/28 (/32 instead for Qwen3); defaults to 1000",
    )
    add("--frames", type=int, help="number of images that the image tokens are divided into")
    return parser


def model_config(name: str | Path) -> ModelConfig:
    """Read a model's config.json, see find_settings."""
    path = Path(name)
    return config_json.from_dict(read_json(path if path.is_file() else find_settings(name) / "config.json"))


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
