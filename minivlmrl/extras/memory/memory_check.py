"""Check before training that a run fits into GPU memory and on the disk; errors suggest options to change."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_sizes import TOKEN_BYTES, RowSize, image_tokens, patch_counter, row_sizes, text_bytes
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError
from minivlmrl.extras.memory.estimate import (
    GB,
    MemoryEstimator,
    MemoryQuestion,
    bytes_of,
    estimate_phases,
    peak_bytes,
    state_bytes,
)
from minivlmrl.extras.memory.largest_batch import try_largest_batches
from minivlmrl.extras.memory.out_of_memory import cures
from minivlmrl.kernels.dense_attention import is_before_ampere
from minivlmrl.model.checkpoint import DTYPES
from minivlmrl.model.lora import adapter_parameters
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.checkpoints import NUM_KEPT_STATES
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Trainer

# {phase name in estimate.py: phase name in out_of_memory.py}
MEASURED = {"rollout": "sampling", "score": "scoring", "train": "forward", "evaluation": "evaluation"}
NUM_HEAVIEST = 64  # number of largest rows to measure
# model entries of a memory estimate
MODELS = "weights", "reference", "critic", "policy"


class MemoryCheck(Callback):
    """Raise UserError, before weights are loaded, if a run does not fit on the disk or the GPUs.

    On GPUs, the largest batches are also run once before the first step.
    """

    estimator: MemoryEstimator | None = None

    def on_setup(self, config: RunConfig, world: World):
        self.plans = {}  # {stage: result of estimate_phases}
        self.questions = {}  # {stage: MemoryQuestion with measured rows}, empty on CPUs
        if config.model.path is None:  # skip models with random weights, which are small
            return
        self.estimator = MemoryEstimator.from_folder(config.model.path, is_before_ampere(world.device))
        for stage in config.stage_names:
            check_disk(MemoryQuestion(config, stage, self.estimator, world.size))

    def on_rows(self, config: RunConfig, datasets: dict[str, Dataset], processor: Processor, world: World):
        if self.estimator is None or world.device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(world.device)
        available = min(world.gather_objects(free))
        self.datasets = datasets
        for stage in config.stage_names:
            question = MemoryQuestion(config, stage, self.estimator, world.size)
            measure = partial(measure_datasets, question, datasets, processor)
            rows, held_out = world.compute_on_rank_zero(measure, "measure the rows")
            question = replace(question, rows=rows, held_out=held_out)
            self.plans[stage] = estimate_phases(question)
            if peak_bytes(self.plans[stage]) > available:
                raise UserError(refusal(question, available))
            self.questions[stage] = question

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        if trainer.stage in self.questions:
            optimizer_bytes = int(self.plans[trainer.stage]["train"]["optimizer"])
            try_largest_batches(self.questions[trainer.stage], trainer, optimizer, self.datasets, optimizer_bytes)


def measure_datasets(
    question: MemoryQuestion, datasets: dict[str, Dataset], processor: Processor
) -> tuple[list[RowSize], list[RowSize]]:
    answers = question.trainer.answers
    rows = heaviest_rows(datasets[question.stage], processor, answers)
    return rows, heaviest_rows(datasets.get("eval", ()), processor, answers)


def heaviest_rows(rows: Dataset, processor: Processor, answers: Sequence[str] = ()) -> list[RowSize]:
    """Return the sizes of the largest readable rows, in descending order."""
    indices = range(min(len(rows), NUM_HEAVIEST))  # data.task: generated rows have similar sizes
    if isinstance(rows, FileDataset):
        counter = patch_counter(processor)
        weights = []
        for index, facts in enumerate(rows.facts):
            weight = 2 * image_tokens(facts, counter) + text_bytes(facts, answers) / TOKEN_BYTES
            if weight == math.inf:
                sizes = row_sizes(rows, [index], processor, answers, unreadable=[])
                weight = max((size.weight for size in sizes), default=0)
            weights.append(weight)
        indices = sorted(range(len(rows)), key=lambda index: -weights[index])[:NUM_HEAVIEST]
    sizes = row_sizes(rows, indices, processor, answers, unreadable=[])
    return sorted(sizes, key=lambda size: -size.weight)


def refusal(question: MemoryQuestion, available: float) -> str:
    stage, gpus = question.stage, question.gpus
    phases = estimate_phases(question)
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    ways = cures(question.config, stage, cause(phase, phases[phase]), gpus)
    row = (question.held_out if phase == "evaluation" else question.rows)[0]
    row_text = f"prompts of {row.prompt_tokens:,} tokens are assumed"
    if row.where:
        row_text = f"the largest row is {row.where}, with a prompt of {row.prompt_tokens:,} tokens"
    fits = ""
    if row.media:
        row_text += f", of which {row.image_tokens:,} show {row.media}"
        if pixels := fitting_pixels(question, available):
            option = f'"--data.video={{max_pixels: {pixels}}}"' if row.has_videos else f"--data.max_pixels={pixels}"
            fits = f"The stage fits with {option}. "
    return (
        f"{stage} needs about {peak_bytes(phases) / GB:.1f} GB on {f'each of {gpus} GPUs' if gpus > 1 else 'the GPU'} "
        f"(phase {phase}), but only {available / GB:.1f} GB are free; {row_text}. "
        f"{fits}Try {', then '.join([*ways, 'a larger GPU, more GPUs or a smaller model'])}. "
        "docs/memory.md explains these options; --check_memory=false skips this check."
    )


def cause(phase: str, items: dict[str, float]) -> str:
    """Return the key in out_of_memory.CURES for the largest entry of a phase."""
    largest = max(items, key=items.__getitem__)
    if largest in MODELS:
        return "weights"
    if largest in ("optimizer", "gradients") or (largest == "gathered" and phase in ("rollout", "evaluation")):
        return largest
    return MEASURED[phase]


def fitting_pixels(question: MemoryQuestion, available: float) -> int:
    """Return the largest data.max_pixels that fits into memory, 0 if none does."""
    vision = question.estimator.config.vision_config

    def smaller(rows: Sequence[RowSize], tokens: int) -> list[RowSize]:
        return [replace(row, image_tokens=min(row.image_tokens, row.frames * tokens)) for row in rows]

    fits, too_large = 0, max(row.image_tokens // row.frames for row in (*question.rows, *question.held_out))
    for _ in range(5):
        tokens = (fits + too_large) // 2  # tokens per image or pair of frames
        rows, held_out = smaller(question.rows, tokens), smaller(question.held_out, tokens)
        is_enough = peak_bytes(estimate_phases(replace(question, rows=rows, held_out=held_out))) <= available
        fits, too_large = (tokens, too_large) if is_enough else (fits, tokens)
    return fits * (vision.patch_size * vision.spatial_merge_size) ** 2


def written_bytes(question: MemoryQuestion) -> dict[str, float]:
    """Return the maximum disk space for a stage's checkpoints and weights, as {name: bytes}."""
    config, estimator = question.config, question.estimator
    sizes = {}
    if config.checkpoint_steps or config.checkpoint_minutes:
        # the newest state is written before the oldest is deleted
        sizes["training states"] = (NUM_KEPT_STATES + 1) * state_bytes(question)
    dtype = config.model.save_dtype or estimator.config.torch_dtype
    weights = estimator.parameters * DTYPES[dtype].itemsize
    adapter = bytes_of(adapter_parameters(estimator.build(config)))
    saved = adapter if config.save == "adapter" else weights
    folder = Path(config.output_dir)
    sizes["weights"] = weights
    if config.save_steps or (folder / "checkpoint").is_dir():
        sizes["weights"] += saved
    if config.best_metric is not None:
        sizes["weights"] += 2 * saved
    return sizes


def describe_written(question: MemoryQuestion) -> str:
    return " and ".join(f"{two_digits(size / GB)} GB of {name}" for name, size in written_bytes(question).items())


def two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"


def check_disk(question: MemoryQuestion):
    """Raise UserError if the disk has too little free space."""
    config = question.config
    folder = Path(config.output_dir).absolute()
    earlier = 0  # bytes from an earlier run that this run will replace
    for pattern in ("states/*/*", "checkpoint/**/*", "best/**/*"):
        earlier += sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free + earlier
    if sum(written_bytes(question).values()) > free:
        hint = "set save to adapter, " if config.adapter.r and config.save == "merged" else ""
        raise UserError(
            f"{question.stage} writes {describe_written(question)}, but only {two_digits(free / GB)} GB are free for "
            f"{config.output_dir}. Free some space, choose another output_dir, {hint}or skip this "
            "check with --check_memory=false."
        )
