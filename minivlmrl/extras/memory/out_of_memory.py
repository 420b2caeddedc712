"""Explain an out-of-memory error: phase, longest row and an option to change."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.processor import encode_answer
from minivlmrl.data.rows import Row
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, is_out_of_memory, truncate_message
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.evaluate import evaluation_sampling
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.registry import find_trainer


class OutOfMemory(UserError):
    """Raised when memory runs out during a run; the message names the phase."""


class OutOfMemoryReport(Callback):
    """Convert out-of-memory errors to OutOfMemory."""

    state: TrainerState | None = None  # training state, None before the run begins
    trainer: Trainer | None = None

    def on_setup(self, config: RunConfig, world: World):
        self.config = config
        self.gpus = world.size

    def on_run_begin(self, config: RunConfig, log: MetricsLog):
        self.state = log.state

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        self.trainer = trainer

    def on_error(self, error: Exception):
        if is_out_of_memory(error):
            raise OutOfMemory(self.describe(error)) from error

    def describe(self, error: Exception) -> str:
        """Return phase, longest row and the first option to change."""
        phase = getattr(error, "phase", "step")
        stage = None
        where = ""
        if self.state is not None and self.state.stage < len(self.state.stages):
            stage = self.state.stages[self.state.stage]
            where = f"{stage} step {self.state.step}, "
        reason = truncate_message(str(error).partition("\n")[0])
        parts = [f"{where}phase {phase}: memory ran out{f' ({reason:.400})' if reason else ''}"]
        rows = getattr(error, "rows", ())
        if self.trainer is not None and rows:
            with suppress(OSError, ValueError):  # the row may be unreadable
                parts.append(f"the longest row is {longest_row(self.trainer, rows)}")
        options = cures(self.config, stage, phase, self.gpus)
        cure = [*options, "--data.max_pixels, a smaller model or a larger GPU"][0]
        return "; ".join([*parts, f"lower the memory of this phase with {cure}"])


def longest_row(trainer: Trainer, rows: Sequence[Row]) -> str:
    """Describe the longest row: file, line and number of tokens."""
    processor = trainer.processor

    def length(row: Row) -> int:
        texts = [text for name in trainer.answers if (text := getattr(row, name)) is not None]
        answers = sum(len(encode_answer(processor, row, text).ids) for text in texts)
        return len(row.prompt(processor).input_ids) + answers

    lengths = [*map(length, rows)]
    longest = max(lengths)
    row = rows[lengths.index(longest)]
    return f"{row.name} with {longest:,} tokens"


WEIGHTS = "nf4", "sharding", "lora", "bfloat16", "8-bit moments"
TRAINING = "communication", "recomputation", "micro-batch", "nf4", "sharding", "bfloat16"
# {training phase or estimate entry: options that lower its memory, most effective first}
CURES = {
    "sampling": ("sampling batch", "layer by layer", "nf4", "bfloat16"),
    "evaluation": ("sampling batch", "layer by layer", "nf4", "bfloat16"),
    "scoring": ("micro-batch", "nf4", "bfloat16"),
    "reference": ("micro-batch", "nf4", "bfloat16"),
    "forward": TRAINING,
    "backward": TRAINING,
    "update": TRAINING,
    "optimizer": ("sharding", "lora", "8-bit moments", "bfloat16"),
    "gradients": ("communication", "sharding", "lora", "bfloat16"),
    "gathered": ("layer by layer", "nf4", "bfloat16"),
}


def cures(config: RunConfig, stage: str | None, phase: str, gpus: int) -> list[str]:
    """Return options, such as --adapter.r=16, that reduce memory in a phase."""
    model = config.model
    adapter = config.adapter
    has_full_base = adapter.r and adapter.quantize is None
    is_float32 = model.dtype == "float32" and not model.compute_dtype
    # adapters do not work on frozen layers, or if sync_ref_model updates a reference loaded from a folder
    moves_folder = config.reference.path and config.reference.sync_ref_model
    takes_adapters = not (adapter.r or moves_folder or "language" in model.freeze)
    # with an environment, ranks prefill tool results at different times, so all need gathered weights
    gathers = config.uses_fsdp and config.rollout.gather_weights and not config.sampling.environment
    options = {
        "sampling batch": smaller_sampling_batch(config, phase),
        "layer by layer": gathers and "--rollout.gather_weights=false",
        "micro-batch": smaller_micro_batch(config, stage, gpus) if stage else "",
        "communication": config.sharding.once_per_step and "--sharding.once_per_step=false",
        "sharding": gpus > 1 and not config.uses_fsdp and "--sharding.enabled=true",
        "recomputation": not model.activation_checkpointing and "--model.activation_checkpointing=true",
        "nf4": has_full_base and "--adapter.quantize=nf4",
        "lora": takes_adapters and "--adapter.r=16",
        "8-bit moments": config.optimizer.name == "adamw" and "--optimizer.name=adamw_8bit",
        "bfloat16": is_float32 and "--model.dtype=bfloat16",
    }
    return [text for name in CURES.get(phase, WEIGHTS) if (text := options[name])]


def smaller_sampling_batch(config: RunConfig, phase: str) -> str:
    """Return an option that samples fewer completions at once, or ""."""
    sampling = evaluation_sampling(config.sampling) if phase == "evaluation" else config.sampling
    tokens = sampling.max_batch_tokens
    smallest = 2 * sampling.max_new_tokens
    lower = max(16384, smallest) if tokens is None else tokens // 2
    return f"--sampling.max_batch_tokens={lower}" if lower >= smallest else ""


def smaller_micro_batch(config: RunConfig, stage: str, gpus: int) -> str:
    """Return an option with smaller micro-batches that the trainer accepts, or ""."""
    section = getattr(config, stage)
    size = min(section.micro_batch_size, section.prompts_per_step // gpus)
    for smaller in range(size // 2, 0, -1):
        changed = copy.copy(config)
        setattr(changed, stage, replace(section, micro_batch_size=smaller))
        with suppress(UserError):  # the trainer may reject this micro-batch size
            find_trainer(stage, changed).check(changed)
            return f"--{stage}.micro_batch_size={smaller}"
    if size == 1 and getattr(section, "max_tokens_per_micro_batch", 0) is None:
        return f"--{stage}.max_tokens_per_micro_batch={4 * config.sampling.max_new_tokens}"
    return ""
