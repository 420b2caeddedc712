"""Explain out-of-memory errors: phase, longest row, and an option to change."""

from collections.abc import Sequence
from contextlib import suppress

from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.row_sizes import row_size
from minivlmrl.data.rows import Row
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, is_out_of_memory, truncate_message
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.evaluate import evaluation_sampling
from minivlmrl.run.metrics import MetricsLog
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Trainer


class OutOfMemory(UserError):
    """Error that names the phase in which memory ran out, and an option to change."""


class OutOfMemoryReport(Callback):
    """Convert PyTorch out-of-memory errors to OutOfMemory, with an explanation."""

    state: TrainerState | None = None  # None before the run begins
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
        """Describe an out-of-memory error: step, phase, longest row, and the first option to change."""
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
    lengths = [row_size(row, trainer.processor, trainer.answers).longest for row in rows]
    longest = max(lengths)
    return f"{rows[lengths.index(longest)].name} with {longest:,} tokens"


SAMPLING = "sampling", "evaluation"
TRAINING = "forward", "backward", "update", "training"
COMPUTING = *TRAINING, "scoring", "reference"


def cures(config: RunConfig, stage: str | None, phase: str, gpus: int) -> list[str]:
    """List options that reduce memory in a phase, such as --adapter.r=16, most effective first.

    Args:
        phase: such as "forward" in a run; "sampling", "evaluation" or "training" in an estimate.
    """
    model = config.model
    adapter = config.adapter
    full_base = adapter.r and adapter.quantize is None
    takes_adapters = not (adapter.r or "language" in model.freeze)
    options: list[tuple[bool, str]] = []
    if phase in SAMPLING:
        options.append(smaller_sampling_batch(config, phase))
    if phase in TRAINING:
        options.append((not model.activation_checkpointing, "--model.activation_checkpointing=true"))
    if phase in COMPUTING and stage:
        options.append(smaller_micro_batch(config, stage, gpus))
    options += [
        (full_base, "--adapter.quantize=nf4"),
        (gpus > 1 and not config.uses_fsdp, "--sharding.enabled=true"),
        (takes_adapters, "--adapter.r=16"),
        (config.optimizer.name == "adamw", "--optimizer.name=adamw_8bit"),
        (model.dtype == "float32" and not model.compute_dtype, "--model.dtype=bfloat16"),
    ]
    return [option for applies, option in options if applies]


def smaller_sampling_batch(config: RunConfig, phase: str) -> tuple[bool, str]:
    """Return (whether it is possible, option) for sampling fewer completions at once."""
    sampling = evaluation_sampling(config.sampling) if phase == "evaluation" else config.sampling
    smallest = 2 * sampling.max_new_tokens
    lower = sampling.max_batch_tokens // 2 if sampling.max_batch_tokens else max(16384, smallest)
    return lower >= smallest, f"--sampling.max_batch_tokens={lower}"


def smaller_micro_batch(config: RunConfig, stage: str, gpus: int) -> tuple[bool, str]:
    """Return (whether it is possible, option) for smaller micro-batches."""
    section = getattr(config, stage)
    size = min(section.micro_batch_size, section.prompts_per_step // gpus)
    if size > 1:
        return True, f"--{stage}.micro_batch_size={size // 2}"
    is_whole = getattr(section, "max_tokens_per_micro_batch", 0) is None
    return is_whole, f"--{stage}.max_tokens_per_micro_batch={4 * config.sampling.max_new_tokens}"
