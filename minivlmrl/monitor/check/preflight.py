"""Check recipe, rows and rewards before the first optimizer step, and print device, model and options."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from minivlmrl.config.loading import changed_prompts, differing_options
from minivlmrl.config.options import RunConfig
from minivlmrl.data.boxes import parse_boxes
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.loader import next_readable
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Dataset, ToolUse
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, error_context, pluralize
from minivlmrl.files import INFERENCE_CONFIG
from minivlmrl.generation.environments import agents
from minivlmrl.kernels.backend import KERNELS, backend_for
from minivlmrl.model.checkpoint import DTYPES
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.peft import find_adapter
from minivlmrl.monitor.check.effects import options_without_effect
from minivlmrl.monitor.check.row_notes import describe_boxes, describe_rows
from minivlmrl.monitor.check.summary import describe_device, trainable_summary
from minivlmrl.rewards.columns import call_rewards, reward_columns
from minivlmrl.rewards.registry import (
    COMPARE_SOLUTIONS,
    READS_MESSAGES,
    Reward,
    held_out_rewards,
    required_columns,
    training_rewards,
)
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.registry import find_trainer

NUM_SOLUTIONS = 10_000  # maximum solutions to check per dataset; 10,000 take a few seconds
NUM_IMAGES = 16  # maximum images per dataset to open, to check boxes against image sizes
TYPICAL_WEIGHT = 0.01  # typical weight, in absolute value, in models with billions of parameters


class Preflight(Callback):
    mistakes: Sequence[str] = ()

    def on_setup(self, config: RunConfig, world: World):
        if world.is_main:
            describe_hardware(config, world)

    def on_rows(self, config: RunConfig, datasets: dict[str, Dataset], processor: Processor, world: World):
        world.run_on_rank_zero(partial(print_all, describe_rows(config, datasets, processor)))
        try_rewards(config, datasets, processor)
        world.run_on_rank_zero(partial(check_truths, config, datasets))

    def on_model(
        self, config: RunConfig, datasets: dict[str, Dataset], model: VisionLanguageModel, processor: Processor,
        world: World,
    ):  # fmt: skip
        trainers = {stage: find_trainer(stage, config) for stage in config.stage_names}
        if world.is_main:
            describe_model(config, model)
            if "<think>" in processor.template.text:
                prefix = processor.template.generation_prefix
                print(f"prompts open the answer with {prefix!r}, which reward functions get as part of the completion")
            print_all(collect_notes(config, trainers))
            print_all(describe_boxes(trainers, datasets, processor))
            self.mistakes = list(find_mistakes(config, datasets))

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        print_all(self.mistakes)


def print_all(notes: Iterable[str]):
    for note in notes:
        print(note, flush=True)


def scored_rows(config: RunConfig, datasets: dict[str, Dataset]) -> Iterator[tuple[str, Dataset, list[Reward]]]:
    """Yield (stage or "eval", dataset, rewards) for all datasets whose completions are scored."""
    for stage, rows in datasets.items():
        if stage == "eval":
            yield stage, rows, held_out_rewards(config)
        elif find_trainer(stage, config).samples_completions:
            yield stage, rows, training_rewards(config)


def scored_files(config: RunConfig, datasets: dict[str, Dataset]) -> Iterator[tuple[str, FileDataset, list[Reward]]]:
    """Yield (stage or "eval", dataset, rewards) for all datasets from files whose completions are scored."""
    for stage, rows, rewards in scored_rows(config, datasets):
        if isinstance(rows, FileDataset):
            yield stage, rows, rewards


def try_rewards(config: RunConfig, datasets: dict[str, Dataset], processor: Processor):
    """Call all rewards once with an invented completion, for the first row per file.

    This test also finds out whether a reward function takes texts or chat messages. All ranks, and a resumed run, test
    the same rows, so they agree.
    """
    READS_MESSAGES.clear()
    text_ids = processor.tokenizer.encode("<answer>invented</answer>")
    ids = torch.tensor([*text_ids, processor.stop_token_ids[0]])
    for stage, rows, rewards in scored_rows(config, datasets):
        no_columns = dict.fromkeys(required_columns(rewards)) if stage == "eval" else {}
        skips = stage != "eval" and config.data.skip_unreadable
        for index in first_rows(rows):
            row, prompt, _ = next_readable(rows, index, lambda row: row.prompt(processor), skips)
            row.columns = no_columns | row.columns
            name = config.sampling.environment
            environment = None if name is None else agents().begin_with_row(name, row)
            completion = Completion(ids, tool_use=ToolUse(environment))
            columns = reward_columns([row], [prompt], [[completion]], processor, reward_model_scores=[0.0])
            where = "; data.eval_rewards chooses the rewards of data.eval_file" if stage == "eval" else ""
            try:
                call_rewards(rewards, columns)
            except UserError as error:
                raise UserError(f"{error}{where}") from error


def first_rows(rows: Dataset) -> Iterable[int]:
    """Return the index of the first row in every file."""
    first: dict[Any, int] = {}
    if isinstance(rows, FileDataset):
        for index, facts in enumerate(rows.facts):
            first.setdefault(facts.file, index)
    return first.values() or [0]


def check_truths(config: RunConfig, datasets: dict[str, Dataset]):
    """Raise UserError if no answer can match a solution, such as a box outside the image."""
    for _, rows, rewards in scored_files(config, datasets):
        rewards = [reward for reward in rewards if reward.name in COMPARE_SOLUTIONS]
        for facts in rows.facts[:: math.ceil(len(rows) / NUM_SOLUTIONS)]:
            names = facts.file.constants.get("row_rewards")
            with error_context(facts.where):
                for reward in rewards:
                    if names is None or reward.name in names:
                        sizes = [(math.inf, math.inf)]
                        reward.function([None], [facts.solution], image_sizes=sizes, answer_extents=sizes)
        if all(reward.name == "accuracy" for reward in rewards):
            continue
        from minivlmrl.rewards.boxes import check_inside

        for index in range(0, len(rows), math.ceil(len(rows) / NUM_IMAGES)):
            row = rows[index]
            sizes = []
            with suppress(ValueError):  # training reports or skips unreadable images
                sizes = [row.images[0].size] if row.images else []
            with error_context(row.where):
                for size in sizes:
                    check_inside(row.columns.get("solution"), size, len(row.images))


def describe_hardware(config: RunConfig, world: World):
    """Print device, number of ranks and kernel backends."""
    compute_dtype = config.model.compute_dtype or config.model.dtype
    sample = torch.empty(0, dtype=DTYPES[compute_dtype], device=world.device)
    on_torch = [kernel for kernel in KERNELS if backend_for(sample, kernel) == "torch"]
    kernels = f"triton (torch for {', '.join(on_torch)})" if on_torch else "triton"
    if len(on_torch) == len(KERNELS):
        kernels = "torch"
    print(f"device: {describe_device(world.device)}; ranks: {world.size}; kernels: {kernels}", flush=True)


def describe_model(config: RunConfig, model: VisionLanguageModel):
    """Print parameter counts, dtypes, and trained model parts."""
    dtype = config.model.dtype
    parameters = [*model.parameters()]
    count = sum(parameter.numel() for parameter in parameters)
    print(f"model: {count:,} parameters in {dtype}, computed in {config.model.compute_dtype or dtype}", flush=True)
    if not all(parameter.requires_grad for parameter in parameters):
        print(trainable_summary(model))


def collect_notes(config: RunConfig, trainers: dict[str, type[Trainer]]) -> Iterator[str]:
    """Yield notes about options without effect, and about prompt options changed since model training."""
    adapter = config.adapter.path
    model = find_adapter(adapter) if adapter else config.model.path
    folders = [model, config.reference.path, config.reward_model.path, config.ppo.critic_path]
    for folder in dict.fromkeys(filter(None, folders)) if config.stages else ():
        trained = Path(folder, INFERENCE_CONFIG)
        changed = changed_prompts(trained, config)
        if changed:
            yield f"{trained}, with which the model was trained, sets other values for {', '.join(changed)}"
    if not config.stages:
        yield "stages is []: nothing is trained; the model is only evaluated and saved"
    for stage, trainer in trainers.items():
        differing = differing_options(config, trainer)
        if differing:
            yield f"options of the stage {stage} that differ: {', '.join(differing)}"
    for options, reason in options_without_effect(config, trainers):
        yield f"{', '.join(options)}: no effect, because {reason}"


def find_mistakes(config: RunConfig, datasets: dict[str, Dataset]) -> Iterator[str]:
    """Yield notes about likely mistakes, such as training rows in the evaluation data."""
    if "format" in config.rewards and config.data.answer_format != "tags":
        yield (
            f"rewards has format, which asks for tags, but data.answer_format is {config.data.answer_format}, so tags "
            'would be a part of the answer; leave out format, as in "--rewards={accuracy: 1.0}"'
        )
    for stage, rows, rewards in scored_files(config, datasets):
        start = f"of {pluralize(len(rows), 'row')} of {stage} have"
        names = [reward.name for reward in rewards if "answer_extents" in signature(reward.function).parameters]
        several = []  # rows with a box and several images
        for facts in rows.facts:
            if facts.num_images > 1 and parse_boxes(str(facts.solution)):
                several.append(facts.where)
        if names and several:
            yield (
                f"{len(several)} {start} a box and several images (the first is {several[0]}), but reward {names[0]} "
                "measures boxes in the first image; put the image of the box first, or leave out the others"
            )
        empty = [facts.where for facts in rows.facts if isinstance(facts.solution, str) and not facts.solution.strip()]
        if empty and any(reward.name == "accuracy" for reward in rewards):
            yield (
                f"{len(empty)} {start} an empty solution, which reward accuracy does not score (the first is "
                f"{empty[0]}); write a solution, or remove the row"
            )
    dtype = DTYPES[config.model.dtype]
    # 16-bit weights lose small updates by rounding; adamw_8bit stores the rounding error
    trains_weights = not config.adapter.r or config.adapter.modules_to_save
    rounds = dtype.itemsize == 2 and config.optimizer.name == "adamw" and trains_weights
    for stage in config.stage_names:
        rows = datasets.get(stage)
        if find_trainer(stage, config).needs == "labels" and isinstance(rows, FileDataset):
            picked = range(0, len(rows), math.ceil(len(rows) / NUM_SOLUTIONS))
            labels = {rows.read(index)[0].columns["label"] for index in picked}
            if len(labels) == 1:
                yield (
                    f"all rows of {stage} have the label {json.dumps(labels.pop())}, but it learns from good and bad "
                    "answers; add rows with the other label"
                )
        held_out = datasets.get("eval", [])
        repeated = rows_trained_on(held_out, datasets.get(stage))
        if repeated:
            yield (
                f"{len(repeated)} of {len(held_out)} evaluation rows are also training rows of {stage} (the first is "
                f"{held_out[repeated[0]].name}), so they measure memorization; remove them from data.eval_file"
            )
        rate = getattr(config, stage).learning_rate
        # larger weights lose their updates by rounding
        largest_weight = 4 * rate / torch.finfo(dtype).eps
        if rounds and largest_weight < TYPICAL_WEIGHT:
            yield (
                f"model.dtype is {config.model.dtype} and {stage}.learning_rate is {rate}, so updates of weights over "
                f"{largest_weight:.1g} are lost, because the updated weights round to their old values; use "
                "model.dtype=float32, optimizer.name=adamw_8bit or adapter.r=16"
            )


def rows_trained_on(held_out, rows) -> list[int]:
    """Return indices of evaluation rows with the same prompt and images as a training row."""
    held_out_hashes = getattr(held_out, "prompt_hashes", ())
    training_hashes = getattr(rows, "prompt_hashes", ())
    shared = {*held_out_hashes} & {*training_hashes}
    trained = {rows.content(i) for i, row_hash in enumerate(training_hashes) if row_hash in shared}
    candidates = [i for i, row_hash in enumerate(held_out_hashes) if row_hash in shared]
    return [i for i in candidates if held_out.content(i) in trained]
