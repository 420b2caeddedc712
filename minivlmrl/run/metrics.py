"""Log metrics to JSON lines files, a progress bar and trackers.

Runs with the same recipe and seed write identical metrics.jsonl files. Times and peak memory are in timings.jsonl.
"""

import importlib.util
import math
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from minivlmrl.config.import_utils import resolve_object, with_options
from minivlmrl.config.options import RunConfig
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError, error_context, in_one_line
from minivlmrl.json_files import json_text, write_file
from minivlmrl.run.progress_bar import ProgressBar
from minivlmrl.run.rollout_log import COMPLETIONS, CompletionsLog
from minivlmrl.run.signals import Preempted
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer
from minivlmrl.trainers.rollout_metrics import CLIP_RATIOS

METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
EVALUATIONS = "evaluations.jsonl"
WARNINGS = "warnings.jsonl"
FILES = METRICS, TIMINGS, EVALUATIONS, WARNINGS
SPEED_STEPS = 10  # optimizer steps over which the printed speed is averaged
# maximum root mean square difference between log-probs from sampling and training, in nats per token. For comparison: a
# sampling temperature wrong by a tenth gives about 0.1 times their standard deviation
EXACT_LIMIT = 0.01  # limit for float32 and float64
ROUNDED_LIMIT = 0.05  # limit for 16-bit dtypes
ENGINE_LIMIT = 0.1  # limit for other sampling engines, such as vLLM
MANY_STEPS = 50  # longer stages print only every tenth step
# {metric: how to combine its values over micro-batches}; by default, their mean
OVER_STEP = {"rollout/logp_mismatch": max, "loss": sum, **dict.fromkeys(CLIP_RATIOS, sum)}
# {metric: (mean, how many tokens or answers it averages)}
Means = dict[str, tuple[float, float]]


class MetricsLog(ExitStack):
    """Write log files, completions, trackers and the progress bar, on rank 0 only."""

    def __init__(self, config: RunConfig, world: World, state: TrainerState):
        super().__init__()
        self.config = config
        self.world = world
        self.state = state
        self.begin_time = 0.0
        self.evaluated: dict[str, float] = {}
        self.bar = ProgressBar("", 0, is_main=False)  # no output until the first stage begins
        self.files = {}
        self.num_lines = {}
        self.trackers = {}
        for name in dict.fromkeys(config.report_to) if world.is_main else ():
            self.trackers[name] = find_tracker(name)(config, state.steps, self)

    def open_files(self, resumed: Path | None = None):
        """Create log files, or delete lines written after the resumed state."""
        config = self.config
        self.completions = CompletionsLog(config, self.world, partial(self.write, COMPLETIONS), resumed)
        names = [*FILES, COMPLETIONS] if config.log_completions else FILES
        for name in names if self.world.is_main else ():
            path = Path(config.output_dir, name)
            written = path.read_bytes().splitlines(keepends=True) if resumed and path.is_file() else []
            kept = written[: self.state.num_log_lines.get(name)]
            write_file(path, b"".join(kept))
            self.num_lines[name] = len(kept)
            self.files[name] = self.enter_context(path.open("ab", buffering=0))

    def write(self, name: str, line: dict):
        rest = encode(line)
        while rest:  # files are unbuffered, so closing them cannot fail on a full disk
            rest = rest[self.files[name].write(rest) :]
        self.num_lines[name] += 1

    def track(self, values: dict[str, float]):
        """Send metrics to trackers such as wandb, with steps counted over all stages.

        If a tracker fails, it is removed.
        """
        for name, log in [*self.trackers.items()]:
            try:
                log(values, self.state.steps)
            except Preempted:
                raise
            except Exception as error:
                del self.trackers[name]
                text = f"report_to {name} failed, and gets no more metrics: {in_one_line(error)}"
                self.bar.print(text, file=sys.stderr)

    def stage(self, trainer: Trainer, steps_done: int, seconds: float):
        """Start a stage with a new progress bar.

        Args:
            steps_done, seconds: optimizer steps and training time before the run was resumed.
        """
        self.trainer = trainer
        self.name = trainer.stage
        self.bar = ProgressBar(self.name, trainer.options.max_steps, self.world.is_main, steps_done)
        # close the bar even after an error, so the error message starts on a new line
        self.callback(self.bar.close)
        self.begin_time = time.perf_counter() - seconds
        self.last_seconds = seconds
        # discard times from before the first step, such as the memory check
        trainer.timer.take()
        self.timings = deque(maxlen=SPEED_STEPS)
        self.count_lines()

    def count_lines(self):
        """Store how many lines the log files have, for the next state.

        A resumed run deletes later lines, such as evaluations after this step, and writes them again.
        """
        self.state.num_log_lines = {**self.num_lines}

    @property
    def seconds(self) -> float:
        """Training time in this stage, without evaluations."""
        return time.perf_counter() - self.begin_time

    def flush(self):
        for file in self.files.values():
            os.fsync(file.fileno())

    def step(self, number: int, metrics: dict[str, float], step: Step) -> dict:
        """Log an optimizer step, first to files and then to trackers, which may fail."""
        line = {"stage": self.name, "step": number}
        phases = self.trainer.timer.take()
        [num_tokens] = self.world.sum(tokens_of(step))
        if self.files:
            seconds = self.seconds
            step_time = seconds - self.last_seconds
            timing = {
                "seconds": seconds,
                "step_time": step_time,
                "phases": phases,
                "tokens_per_second": num_tokens / step_time,
                **memory_use(),
            }
            self.write(METRICS, line | metrics)
            self.write(TIMINGS, line | timing)
            self.last_seconds = seconds
            self.timings.append(timing)
        self.world.barrier()
        if self.completions.is_due(step, number):
            self.completions.step(self.trainer, step, number)
        if self.files:
            self.track({name: value for name, value in metrics.items() if math.isfinite(value)})
            self.show(number, metrics, self.timings[-1]["step_time"])
        return metrics

    def warn(self, stage: str, step: int, warning: str, steps_done: int):
        self.write(WARNINGS, {"stage": stage, "step": step, "warning": warning})
        self.bar.print(f"warning, {stage} {steps_done}: {warning}", file=sys.stderr)

    def show(self, number: int, metrics: dict[str, float], step_time: float):
        """Advance the progress bar; if stderr is not a terminal, print a line instead."""
        names = ["loss", "rewards/accuracies"]
        if "reward" in metrics:
            means = [name for name in metrics if re.fullmatch("rewards/.*/mean", name)]
            names = ["reward", *means[:3], "completions/mean_length", "kl"]
        names = [name for name in names if name in metrics]
        values = [
            f"{re.sub('^(rewards|completions)/|/mean$', '', short)}={metrics[name]:.3f}"
            for name, short in zip(names, short_names(names), strict=True)
        ]
        self.bar.update(values=values[:3])
        done = number + 1
        total = self.bar.total
        # print fewer lines in long stages, and in notebooks, which keep all lines
        print_every = 10 if total > MANY_STEPS or "ipykernel" in sys.modules else 1
        if self.bar.hidden and (done in (1, total) or done % print_every == 0):
            print(
                f"{self.name} {done}/{total}, training batch:",
                *values,
                f"{step_time:.2f} s, {self.bar.left} left",
                flush=True,
            )

    def evaluation(self, stage: str, steps_done: int, values: dict[str, float], seconds: float):
        """Log an evaluation on held-out rows.

        Args:
            seconds: duration, not counted as training time.
        """
        self.begin_time += seconds
        self.evaluated = values
        if not self.files:
            return
        self.write(EVALUATIONS, {"stage": stage, "step": steps_done, **values})
        self.track(values)
        shown = " ".join(
            f"{name.removeprefix('eval/')}={value:.3f}"
            for name, value in zip(short_names(values), values.values(), strict=True)
        )
        self.bar.print(f"held-out, {stage} {steps_done}: {shown} ({seconds:.1f} s)")

    def end_stage(self) -> float:
        """Print the speed, close the bar, and return the training time in seconds."""
        if self.timings:
            self.bar.print(f"speed, {self.name}: {describe_speed(self.timings)}")
        self.bar.close()
        return self.seconds


def short_names(names: Iterable[str]) -> list[str]:
    """Shorten metric names like "eval/my_rewards.py:brevity_sampled" to "eval/brevity_sampled", if they stay unique."""
    names = [*names]
    short = [re.sub(r"^(eval/|rewards/)?.*\.py:", r"\1", name) for name in names]
    return short if len({*short}) == len(names) else names


def encode(line: dict) -> bytes:
    return f"{json_text(line)}\n".encode()


def check_mismatch(config: RunConfig, metrics: dict[str, float]):
    """Raise UserError if log-probs from sampling and training differ by more than rollout.max_logp_mismatch allows."""
    limit = EXACT_LIMIT
    if config.sampling.engine != "native":
        limit = ENGINE_LIMIT
    elif (config.model.compute_dtype or config.model.dtype) in ("bfloat16", "float16"):
        limit = ROUNDED_LIMIT
    bound = limit * config.rollout.max_logp_mismatch
    mismatch = metrics.get("rollout/logp_mismatch_rms", 0.0)
    # allow differences with dropout, which applies to training but not to sampling
    if mismatch > bound and not config.adapter.dropout:
        raise UserError(
            f"rollout/logp_mismatch_rms is {mismatch:.3g} nats, but at most {bound:g} is allowed: the sampler and the "
            "trainer compute different log-probabilities for the same tokens. Either there is a bug, such as another "
            "temperature, or the dtype is not precise enough; rollout.max_logp_mismatch multiplies the limit, and the "
            "value .inf disables the check"
        )


def tokens_of(step: Step) -> int:
    """Count this rank's tokens in a step: each group's prompt once, and all its completions."""
    if not step.groups:
        return sum(len(batch.group.input_ids) for batch in step.micro_batches)
    prompts = sum(len(group[0].prompt.input_ids) for group in step.groups)
    return prompts + sum(len(sample.completion.ids) for group in step.groups for sample in group)


def memory_use() -> dict[str, float]:
    """Return peak memory in GiB; on a GPU, also allocated, reserved and free memory."""
    if torch.cuda.is_available():
        use = {
            "peak_memory_gib": torch.cuda.max_memory_allocated(),
            "allocated_memory_gib": torch.cuda.memory_allocated(),
            "reserved_memory_gib": torch.cuda.memory_reserved(),
            "free_memory_gib": torch.cuda.mem_get_info()[0],
        }
    elif importlib.util.find_spec("resource"):
        from resource import RUSAGE_SELF, getrusage

        unit = 1 if sys.platform == "darwin" else 1024
        use = {"peak_memory_gib": getrusage(RUSAGE_SELF).ru_maxrss * unit}
    else:  # Windows has no getrusage
        return {}
    return {name: round(value / 2**30, 3) for name, value in use.items()}


def describe_speed(timings: Sequence[dict]) -> str:
    """Format mean times per optimizer step, and GPU memory in the last step."""

    last = timings[-1]
    text = f"{fmean(timing['step_time'] for timing in timings):.2f} s a step"
    phases = Counter()
    for timing in timings:
        phases.update(timing.get("phases", {}))
    if phases:
        text += f" ({', '.join(f'{name} {value / len(timings):.2f}' for name, value in phases.items())})"
    text += f", {fmean(timing['tokens_per_second'] for timing in timings):,.0f} tokens/s"
    if "free_memory_gib" in last:
        text += (
            f"; GPU memory: {last['allocated_memory_gib']:.1f} GiB allocated, "
            f"{last['reserved_memory_gib']:.1f} reserved, {last['free_memory_gib']:.1f} free"
        )
    return text


def merge(parts: list[Means]) -> Means:
    """Average metrics over micro-batches or ranks, weighted by tokens or answers; NaN if there are none."""
    merged = {}
    for name in parts[0]:
        values, counts = zip(*(part[name] for part in parts), strict=True)
        total = sum(counts)
        counted = [(value, count) for value, count in zip(values, counts, strict=True) if count]
        if name in OVER_STEP:
            mean = OVER_STEP[name](values)
        elif not total:
            mean = math.nan
        elif name.endswith("_rms"):
            mean = math.sqrt(sum(value**2 * count for value, count in counted) / total)
        else:
            mean = sum(value * count for value, count in counted) / total
        merged[name] = mean, total
    return merged


TRACKERS = {
    "tensorboard": "minivlmrl.extras.tensorboard:tracker",
    "trackio": "minivlmrl.extras.trackio_tracker:tracker",
    "wandb": "minivlmrl.extras.weights_and_biases:tracker",
}


def find_tracker(name: str) -> Callable:
    with error_context(f"report_to {name}"):
        return with_options(*resolve_object("tracker", name, TRACKERS))
