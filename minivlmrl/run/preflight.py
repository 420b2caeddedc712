"""What is refused or printed before the first step: rewards that fail, long rows, lost options."""

from collections.abc import Iterator

import torch

from minivlmrl.config.options import RunConfig
from minivlmrl.config.validation import is_set, unnamed_stages
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_summary import check_lengths
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.environments import begin_environment
from minivlmrl.generation.sampler import find_engine
from minivlmrl.kernels.backend import backend_for
from minivlmrl.model.checkpoint import DTYPES
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.trainable import trainable_summary
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import held_out_rewards, required_columns, training_rewards
from minivlmrl.trainers.base import Trainer

TYPICAL_WEIGHT = 0.01  # size of a weight of a model of billions


def try_rewards(config: RunConfig, needs: dict[str, str], datasets: dict[str, Dataset]):
    """Call the rewards with an invented completion, so that one that fails does so now (ValueError).

    Args:
        needs: for each stage what its rows must have, a key of run.datasets.NEEDS.
    """
    for stage, rows in datasets.items():
        if stage == "eval":
            rewards = held_out_rewards(config)
            no_columns = dict.fromkeys(required_columns(rewards))  # a row without one is not judged
        elif needs[stage] == "prompts":
            rewards = training_rewards(config)
            no_columns = {}
        else:
            continue
        row = rows[0]
        size = row.images[0].size if row.images else None
        columns = {
            **no_columns,
            **row.columns,
            "prompts": row.messages,
            "images": row.images,
            "environments": begin_environment(config.sampling.environment, row),
            "row_names": row.where or f"row {row.index}",
            "reward_model_scores": 0.0,
            "image_sizes": size,
            "answer_extents": size,
            "completion_ids": [0, 1, 2],
            "answer_texts": "invented",
            "turn_texts": [],
            "completions": "<answer>invented</answer>",
        }
        call_rewards(rewards, {name: [value] for name, value in columns.items()})


def check_experts(config: RunConfig, model: Qwen2_5_VL):
    """Refuse a weight for the balance of experts (ValueError) if the model has none."""
    for stage in config.stage_names:
        if getattr(config, stage).router_aux_loss_coef and model.config.experts is None:
            raise ValueError(
                f"{stage}.router_aux_loss_coef: the model has no experts; leave it out"
            )


def check_positions(
    config: RunConfig,
    needs: dict[str, str],
    datasets: dict[str, Dataset],
    model: Qwen2_5_VL,
    processor: Processor,
):
    """Refuse rows (ValueError) that, with what is drawn, are over the model's positions."""
    max_positions = model.config.max_position_embeddings
    most_drawn = find_engine(config.sampling).most_tokens(config.sampling) or max_positions
    for name, rows in datasets.items():
        is_answered = needs.get(name, "prompts") == "prompts"
        num_new = config.sampling.max_new_tokens if is_answered else 0
        most_tokens = max_positions
        bound = f"the model's {max_positions} (max_position_embeddings)"
        if needs.get(name) == "prompts" and most_drawn < max_positions:  # it draws no evaluation
            most_tokens = most_drawn
            bound = f"the {most_drawn} of sampling.engine"
        limit = most_tokens - num_new
        reason = (
            f"and {num_new} new ones are over {bound}; "
            f"shorten it, or leave it out, as data.max_prompt_tokens={limit} does in training"
        )
        check_lengths(rows, processor, limit, reason)


def describe_run(config: RunConfig, model: Qwen2_5_VL, world: World):
    """Print what runs where."""
    dtype = config.model.dtype
    compute_dtype = config.model.compute_dtype or dtype
    kernels = backend_for(torch.empty(0, dtype=DTYPES[compute_dtype], device=world.device))
    device = f"CPU (threads: {torch.get_num_threads()})"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"device: {device}; ranks: {world.size}; kernels: {kernels}")
    print(
        f"model: {num_parameters:,} parameters in {dtype}, computed in {compute_dtype}", flush=True
    )
    if not all(parameter.requires_grad for parameter in model.parameters()):
        print(trainable_summary(model))


def describe_thought(processor: Processor):
    """Print whether a model that thinks begins to do so in the prompt."""
    if not processor.template or "<think>" not in processor.template.text:
        return
    opened = processor.template.opened
    print(
        f"prompts open the answer with {opened!r}; rewards read it with the completion", flush=True
    )


def collect_notes(
    config: RunConfig, trainers: dict[str, type[Trainer]], datasets: dict[str, Dataset]
) -> Iterator[str]:
    """Say what of a recipe has no effect with these stages, or another one than was probably meant.

    What has none with any stage is refused, see config/validation.py.
    """
    if not config.stages:
        yield "stages is []: nothing is trained, the model is evaluated and saved as it is"
    for name in config.unused_sections:
        yield f"{name}: no effect, stages does not name it"
    yield from unnamed_sections(config)
    yield from unused_files(config)
    if all(trainer.answers for trainer in trainers.values()):
        for name in ("rewards", "log_completions", "rollout.max_logp_mismatch"):
            if is_set(name, config):
                yield f"{name}: no effect, no stage samples completions"
    yield from find_mistakes(config, datasets)


def unnamed_sections(config: RunConfig) -> Iterator[str]:
    """Name the options that are set of stages that the recipe does not name."""
    for name in unnamed_stages(config):
        section = getattr(config, name)
        changed = [f"{name}.{option}" for option in vars(section) if is_set(option, section)]
        if "reward_model" in config.rewards:  # it is scored by a model from elsewhere
            changed = [option for option in changed if option != "reward_model.path"]
        if changed:
            yield f"{', '.join(changed)}: no effect, stages does not name {name}"


def unused_files(config: RunConfig) -> Iterator[str]:
    """Name the files of rows that no stage of the recipe reads."""
    for stage in config.data.files:
        if stage not in config.stage_names:
            yield f"data.files.{stage}: no effect, stages does not name {stage}"
    if config.stages and config.data.files.keys() >= {*config.stage_names}:
        for name in ("train_file", "train"):
            if getattr(config.data, name):
                yield f"data.{name}: no effect, data.files has the rows of all stages"


def find_mistakes(config: RunConfig, datasets: dict[str, Dataset]) -> Iterator[str]:
    """Name evaluation rows that are trained on, and updates that a dtype cannot hold."""
    dtype = DTYPES[config.model.dtype]
    # neither adapters in float32 nor Kahan's sum lose any
    rounds = dtype.itemsize == 2 and config.optimizer.name == "adamw" and not config.adapter.r
    for stage in config.stage_names:
        held_out = datasets.get("eval", [])
        count = count_trained_on(held_out, datasets.get(stage))
        if count:
            yield (
                f"{count} of {len(held_out)} evaluation rows are training rows of {stage} too: "
                "they say what it remembers; leave them out of data.eval_file"
            )
        rate = getattr(config, stage).learning_rate
        largest_weight = 4 * rate / torch.finfo(dtype).eps  # a larger one stays as it is
        if rounds and largest_weight < TYPICAL_WEIGHT:
            yield (
                f"model.dtype is {config.model.dtype}: updates of {stage}.learning_rate {rate} are "
                f"lost in weights over {largest_weight:.1g}; "
                "take model.dtype=float32, optimizer.name=adamw_8bit or adapter.r=16"
            )


def count_trained_on(held_out, rows) -> int:
    """Count the rows of files that ask and show what training rows do, whatever their names."""
    held_out_hashes = getattr(held_out, "prompt_hashes", ())
    training_hashes = getattr(rows, "prompt_hashes", ())
    shared = {*held_out_hashes} & {*training_hashes}
    trained = {rows.content(i) for i, row_hash in enumerate(training_hashes) if row_hash in shared}
    alike = [i for i, row_hash in enumerate(held_out_hashes) if row_hash in shared]
    return sum(held_out.content(i) in trained for i in alike)
