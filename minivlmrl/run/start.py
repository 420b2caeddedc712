"""What a run does and says before its first step: tries rewards, counts rows, says what runs."""

import math
from collections.abc import Iterator

import torch
from torch import nn

from minivlmrl.adapters.trained import table
from minivlmrl.algorithms.base import TrainingConfig
from minivlmrl.data.row_summary import check_lengths, summary, without_long
from minivlmrl.kernels.backend import backend_for
from minivlmrl.reward_functions.names import columns_of
from minivlmrl.rewards import ask_rewards
from minivlmrl.rows import Dataset, Processor
from minivlmrl.run.batches import check_shares, load_datasets
from minivlmrl.run.model import build_model
from minivlmrl.scale.checkpoint import DTYPES
from minivlmrl.scale.ranks import World

TYPICAL = 0.01  # size of a weight of a model of billions


def prepare(config, algorithms: dict, world: World) -> tuple[nn.Module, Processor, dict]:
    """Make model, processor, rows by stage and "eval"; refuse what would fail later (ValueError).

    In this order: what takes the least time to refuse comes first.
    """
    needs = {stage: algorithm.needs for stage, algorithm in algorithms.items()}
    for stage in config.stages:
        check_shares(stage, getattr(config, stage).prompts_per_step, world.size)
    judged_by = map(columns_of, (config.training_rewards, config.held_out_rewards))
    datasets = load_datasets(config, needs, *judged_by)
    try_rewards(config, needs, datasets)
    model, processor = build_model(config, world, datasets)
    describe_run(config, model, world)
    if world.is_main and processor.template and "<think>" in processor.template.text:
        opened = processor.template.opened
        read = f"a thought, {opened!r}, and rewards read it with the completion"
        print(f"prompts open {read if opened else 'no thought'}", flush=True)
    for note in notes(config, datasets) if world.is_main else ():
        print(note, flush=True)
    datasets = fit_rows(config, datasets, processor, world)
    check_positions(config, needs, datasets, model, processor)
    return model, processor, datasets


def try_rewards(config, needs: dict[str, str], datasets: dict[str, Dataset]):
    """Ask the rewards about an invented completion: one that fails (ValueError) does so now.

    Args:
        needs: for each stage what its rows must have, a key of batches.NEEDS.
    """
    asked = [stage for stage in datasets if stage == "eval" or needs[stage] == "prompts"]
    for stage in asked:
        rewards = config.held_out_rewards if stage == "eval" else config.training_rewards
        row = datasets[stage][0]
        size = row.images[0].size if row.images else None
        # a held-out row without one of these is not judged
        columns = dict.fromkeys(columns_of(rewards) if stage == "eval" else ()) | row.columns
        columns |= {"prompts": row.messages, "images": row.images, "environments": None}
        columns |= {"row_names": row.where or f"row {row.index}", "reward_model_scores": 0.0}
        columns |= {"image_sizes": size, "answer_extents": size, "completion_ids": [0, 1, 2]}
        columns |= {"answer_texts": "invented", "completions": "<answer>invented</answer>"}
        ask_rewards(rewards, {name: [value] for name, value in columns.items()})


def describe_run(config, model: nn.Module, world: World):
    """Print on the first rank what runs where."""
    if not world.is_main:
        return
    dtype = config.model.dtype
    compute_dtype = config.model.compute_dtype or config.model.dtype
    kernels = backend_for(torch.empty(0, dtype=DTYPES[compute_dtype], device=world.device))
    gpu = world.device.type == "cuda" and torch.cuda.get_device_name(world.device)
    device = gpu or f"CPU (threads: {torch.get_num_threads()})"
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"device: {device}; ranks: {world.size}; kernels: {kernels}")
    print(f"model: {count:,} parameters in {dtype}, computed in {compute_dtype}", flush=True)
    if not all(parameter.requires_grad for parameter in model.parameters()):
        print(table(model))


def notes(config, datasets: dict[str, Dataset]) -> Iterator[str]:
    """Say what of a recipe has no effect, or another one than was probably meant."""
    if not config.stages:
        yield "stages is []: nothing is trained, the model is evaluated and saved as it is"
    used = [getattr(config, stage) for stage in config.stages]
    for name, section in vars(config).items():
        if isinstance(section, TrainingConfig) and not any(section is one for one in used):
            plain = vars(type(section)())
            if changed := [f"{name}.{k}" for k, v in vars(section).items() if v != plain[k]]:
                yield f"{', '.join(changed)}: no effect, stages does not name {name}"
    yield from mistakes(config, datasets)


def mistakes(config, datasets: dict[str, Dataset]) -> Iterator[str]:
    """Name evaluation rows that are trained on, and updates that a dtype cannot hold."""
    dtype = DTYPES[config.model.dtype]
    plain = config.optimizer.name == "adamw"
    for stage in config.stages:
        held_out = datasets.get("eval")
        trained = datasets.get(stage)
        if count := trained_on(held_out, trained):
            where = f"{count} of {len(held_out)} evaluation rows are training rows of {stage} too"
            yield f"{where}: they say what it remembers; leave them out of data.eval_file"
        rate = getattr(config, stage).learning_rate
        most = 4 * rate / torch.finfo(dtype).eps
        if dtype.itemsize == 2 and plain and not config.adapter.r and most < TYPICAL:
            cure = "take model.dtype=float32, optimizer.name=adamw_8bit or adapter.r=16"
            lost = f"updates of {stage}.learning_rate {rate} are lost in weights over {most:.1g}"
            yield f"model.dtype is {config.model.dtype}: {lost}; {cure}"


def trained_on(held_out, rows) -> int:
    """Count the rows of files that ask and show what training rows do, whatever their names."""
    asked, known = (getattr(some, "asked", ()) for some in (held_out, rows))
    alike = {*asked} & {*known}
    trained = {rows.content(i) for i, one in enumerate(known) if one in alike}
    return sum(held_out.content(i) in trained for i, one in enumerate(asked) if one in alike)


def fit_rows(config, datasets: dict, processor: Processor, world: World) -> dict[str, Dataset]:
    """Leave out rows with long prompts, end stages after max_epochs, and print what rows there are.

    Image files are opened, not decoded.
    """
    fitted = {}
    texts = {}
    for name, rows in datasets.items():
        limit = None if name == "eval" else config.data.max_prompt_tokens
        fitted[name], long = (rows, []) if limit is None else without_long(rows, processor, limit)
        if name != "eval" and config.max_epochs is not None:
            stage = getattr(config, name)
            steps = math.ceil(config.max_epochs * len(fitted[name]) / stage.prompts_per_step)
            stage.max_steps = min(stage.max_steps, steps)
        text = summary(fitted[name], processor) if world.is_main else ""
        if long:
            text += f"; {len(long)} over data.max_prompt_tokens left out: {', '.join(long[:5])}"
        texts.setdefault(text, []).append(name)
    for text, names in texts.items() if world.is_main else ():
        print(f"rows of {', '.join(names)}: {text}", flush=True)
    return fitted


def check_positions(config, needs: dict[str, str], datasets, model, processor: Processor):
    """Refuse rows (ValueError) that, with what is drawn, are over the model's positions."""
    most = model.config.max_position_embeddings
    for name, rows in datasets.items():
        new = config.sampling.max_new_tokens if needs.get(name, "prompts") == "prompts" else 0
        cause = f"and {new} new ones are over the model's {most} (max_position_embeddings)"
        cure = f"data.max_prompt_tokens={most - new} leaves out such rows"
        cure = "shorten it, or leave it out of data.eval_file" if name == "eval" else cure
        check_lengths(rows, processor, most - new, f"{cause}; {cure}")
