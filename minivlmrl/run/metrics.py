"""Log the metrics of a run to JSON-lines files, a progress bar and trackers.

metrics.jsonl is the same for the same seed; times and memory have their own file, timings.jsonl.
"""

import importlib.util
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minivlmrl.config.import_utils import call_user_code, resolve_object, with_options
from minivlmrl.config.options import RunConfig
from minivlmrl.config.parsing import error_context, json_text
from minivlmrl.distributed.process_group import World
from minivlmrl.run.rollout_log import CompletionsLog
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Step, Trainer

METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
EVALUATIONS, WARNINGS = "evaluations.jsonl", "warnings.jsonl"
FILES = METRICS, TIMINGS, EVALUATIONS, WARNINGS
# How to reduce these metrics of micro-batches to the metric of a step; all others are averaged.
OVER_STEP = {"rollout/logp_mismatch": max, "loss": sum}
Means = tuple[dict[str, float], float]  # metrics, and the number of tokens or pairs they average


class MetricsLog(ExitStack):
    """Write log files, the progress bar, completions and trackers, on rank 0 only.

    In a resumed run the log files start with the lines that the checkpoint contains.
    """

    def __init__(self, config: RunConfig, world: World, progress: TrainerState):
        super().__init__()
        self.world = world
        self.steps = progress.steps  # number of optimizer steps of all stages
        self.begin_time = 0.0  # start time of the current stage
        self.completions = CompletionsLog(config, world, progress)
        self.files = {}
        self.trackers = []
        if not world.is_main:
            return
        for name in FILES:
            path = Path(config.output_dir, name)
            file = self.enter_context(path.open("wb+"))
            file.write(progress.logs.get(name, "").encode())
            file.flush()
            self.files[name] = file
        for name in dict.fromkeys(config.report_to):
            tracker = find_tracker(name)
            self.trackers.append(
                call_user_code(f"report_to {name}", tracker, config, self.steps, self)
            )

    def write(self, name: str, line: dict):
        """Append one JSON line to the log file called `name`."""
        self.files[name].write(f"{json_text(line)}\n".encode())
        self.files[name].flush()

    def track(self, values: dict[str, float]):
        """Send values to the trackers, with the number of steps of all stages as x-axis."""
        for log in self.trackers:
            log(values, self.steps)

    def stage(self, trainer: Trainer, steps_done: int, seconds: float):
        """Start a stage with a new progress bar.

        Args:
            steps_done: optimizer steps that a resumed stage has already done.
            seconds: time that these steps took.
        """
        self.trainer = trainer
        self.name = trainer.stage
        bar = progress_bar(self.name, trainer.config.max_steps, self.world.is_main, steps_done)
        self.bar = self.enter_context(bar)  # so that an error message starts on its own line
        self.begin_time = time.perf_counter() - seconds
        self.last_seconds = seconds
        self.mark()

    def mark(self):
        """Record the lengths of the log files, after a step or before a stage's first step."""
        self.file_ends = {name: file.tell() for name, file in self.files.items()}

    @property
    def seconds(self) -> float:
        """Seconds since the stage began, without evaluations."""
        return time.perf_counter() - self.begin_time

    def written(self) -> dict[str, str]:
        """Return the contents of the log files up to the last `mark`, for the checkpoint.

        Later evaluations are left out, because a resumed run repeats them.
        """
        logs = {}
        for name, file in self.files.items():
            file.seek(0)  # read() moves the position to the end again, where the next line belongs
            logs[name] = file.read()[: self.file_ends[name]].decode()
        return logs

    def step(self, number: int, metrics: dict[str, float], step: Step) -> dict:
        """Log an optimizer step, and return its metrics with the routing tables of experts."""
        self.steps += 1
        routers = self.trainer.router_log  # None if the model has no experts
        values = metrics | (routers.take() if routers else {})
        if not self.files:
            return values
        line = {"stage": self.name, "step": number}
        seconds = self.seconds
        self.write(METRICS, line | values)
        self.track({name: value for name, value in metrics.items() if math.isfinite(value)})
        num_tokens = sum(len(batch.group.input_ids) for batch in step.micro_batches)
        step_time = seconds - self.last_seconds
        timing = {
            "seconds": seconds,
            "step_time": step_time,
            "tokens_per_second": num_tokens / step_time,
        }
        self.write(TIMINGS, line | timing | peak_memory())
        self.last_seconds = seconds
        self.show(number, metrics, step_time)
        self.completions.step(self.trainer, step, number)
        return values

    def warn(self, stage: str, step: int, warning: str, steps_done: int):
        """Append a warning to warnings.jsonl, and print it after the number of steps done."""
        self.write(WARNINGS, {"stage": stage, "step": step, "warning": warning})
        tqdm.write(f"step {steps_done}: {warning}", file=sys.stderr)

    def show(self, number: int, metrics: dict[str, float], step_time: float):
        """Advance the progress bar, or print one line per step if there is no terminal.

        Notebooks print only every tenth step, because they keep all lines.
        """
        names = ["loss", "rewards/accuracies"]
        if "reward" in metrics:
            means = [name for name in metrics if re.fullmatch("rewards/.*/mean", name)]
            names = ["reward", *means[:3], "completions/mean_length", "kl"]
        shown = {}
        for name in names:
            if name in metrics:
                short_name = re.sub("^(rewards|completions)/|/mean$", "", name)
                shown[short_name] = f"{metrics[name]:.3f}"
        # Only three metrics are shown, so that the bar itself has room in the line.
        self.bar.set_postfix(dict(list(shown.items())[:3]), refresh=False)
        self.bar.update()
        print_every = 10 if "ipykernel" in sys.modules else 1
        if self.bar.disable and (number % print_every == 0 or number + 1 == self.bar.total):
            done = f"{self.name} {number + 1}/{self.bar.total}"
            values = [f"{name}={value}" for name, value in shown.items()]
            with ending_unread():
                print(done, *values, f"{step_time:.2f} s", flush=True)

    def evaluation(self, stage: str, steps_done: int, values: dict[str, float], seconds: float):
        """Log an evaluation on held-out rows.

        Args:
            steps_done: optimizer steps of the stage before the evaluation.
            seconds: duration of the evaluation; it does not count as training time.
        """
        self.begin_time += seconds
        if not self.files:
            return
        line = {"stage": stage, "step": steps_done}
        self.write(EVALUATIONS, line | values)
        self.track(values)
        shown = " ".join(
            f"{name.removeprefix('eval/')}={value:.3f}" for name, value in values.items()
        )
        with ending_unread():
            tqdm.write(f"held-out, {stage} {steps_done}: {shown} ({seconds:.1f} s)")

    def end_stage(self) -> float:
        """Close the progress bar, and return the seconds since the stage began."""
        self.bar.close()
        return self.seconds


@contextmanager
def ending_unread() -> Iterator[None]:
    """Treat a closed stdout like SIGTERM, so that the run saves a checkpoint and exits.

    A closed stdout happens, for example, in `torchrun train.py | head`.
    """
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("stdout is closed; the run saves a checkpoint and exits", file=sys.stderr)
        signal.raise_signal(signal.SIGTERM)


def progress_bar(
    name: str, total: int, is_main: bool, initial: int = 0, leave: bool = True
) -> tqdm:
    """Create a progress bar for rank 0; it is disabled if stderr is not a terminal."""
    return tqdm(
        total=total,
        initial=initial,
        desc=name,
        leave=leave,
        disable=not is_main or not sys.stderr.isatty(),
        mininterval=0.5,
        dynamic_ncols=True,
    )


def check_mismatch(run: RunConfig, metrics: dict[str, float]):
    """Raise ValueError if sampler and trainer compute different log-probabilities.

    In float32 no token may differ by more than rollout.max_logp_mismatch. In 16 bits single tokens
    do, so the root mean square over tokens must stay below a tenth of that bound.
    """
    name = "rollout/logp_mismatch"
    bound = run.rollout.max_logp_mismatch
    if (run.model.compute_dtype or run.model.dtype) in ("bfloat16", "float16"):
        name = "rollout/logp_mismatch_rms"
        bound = bound / 10
    mismatch = metrics.get(name, 0.0)
    if mismatch > bound and not run.adapter.dropout:  # the sampler applies no dropout
        raise ValueError(
            f"{name} is {mismatch:.3g} nats: sampler and trainer disagree about the "
            f"log-probabilities of sampled tokens by more than {bound}. This is a bug, or the dtype "
            "is too coarse; rollout.max_logp_mismatch sets the bound, and .inf disables the check"
        )


def peak_memory() -> dict[str, float]:
    """Return this process's peak memory in GiB: GPU memory if there is a GPU, else host memory.

    Returns an empty dict on Windows, which does not report host memory.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    elif importlib.util.find_spec("resource"):
        from resource import RUSAGE_SELF, getrusage

        unit = 1 if sys.platform == "darwin" else 1024
        peak = getrusage(RUSAGE_SELF).ru_maxrss * unit
    else:  # Windows
        return {}
    return {"peak_memory_gib": round(peak / 2**30, 3)}


def to_floats(parts: list[tuple[dict[str, Tensor], float]]) -> list[Means]:
    """Convert the metrics of all micro-batches to floats with a single transfer to the host.

    One transfer is faster, because each transfer waits for the GPU.
    """
    values = [value.double() for metrics, _ in parts for value in metrics.values()]
    numbers = iter(torch.stack(values).tolist())
    return [({name: next(numbers) for name in metrics}, weight) for metrics, weight in parts]


def merge(parts: list[Means]) -> Means:
    """Merge the metrics of micro-batches or ranks, weighted by their tokens or pairs.

    OVER_STEP lists the metrics that are summed or maximised instead. Metrics whose name ends in
    _rms are merged as root mean squares.
    """
    total = sum(weight for _, weight in parts)
    merged = {}
    for name in parts[0][0]:
        if name in OVER_STEP:
            merged[name] = OVER_STEP[name](metrics[name] for metrics, _ in parts)
        elif name.endswith("_rms"):  # root mean square
            squares = sum(metrics[name] ** 2 * weight for metrics, weight in parts)
            merged[name] = math.sqrt(squares / (total or 1))
        else:
            weighted = sum(metrics[name] * weight for metrics, weight in parts)
            merged[name] = weighted / (total or 1)
    return merged, total


def tensorboard(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Create a TensorBoard tracker that writes to tensorboard/ in the run's folder.

    After a resume, TensorBoard hides the steps that the run repeats.

    Args:
        steps: optimizer steps that the run has already done.
        closing: exit stack that closes the tracker.

    Returns:
        A function log(values, steps), like every tracker.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(config.output_dir) / "tensorboard"
    if not steps:
        shutil.rmtree(folder, ignore_errors=True)
    # Purge what follows the last step done. An evaluation that is repeated has the same values.
    writer = closing.enter_context(SummaryWriter(str(folder), purge_step=steps + 1))

    def log(values: dict[str, float], steps: int):
        for name, value in values.items():
            writer.add_scalar(name, value, steps)

    return log


def weights_and_biases(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Create a Weights & Biases tracker that logs to the project minivlmrl.

    WANDB_MODE=offline writes to wandb/ in the run's folder instead. A resumed run appears as a new
    run in W&B. Arguments and return value are those of `tensorboard`.
    """
    import wandb  # pyright: ignore[reportMissingImports]  # optional, see check_trackers

    folder = Path(config.output_dir)
    run = wandb.init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))
    closing.callback(run.finish)
    return run.log


TRACKERS = {"tensorboard": tensorboard, "wandb": weights_and_biases}


def find_tracker(name: str) -> Callable:
    """Return the tracker called `name`: a function (config, steps, closing) -> log(values, steps)."""
    with error_context(f"report_to {name}"):
        return with_options(*resolve_object("tracker", name, TRACKERS))


def check_trackers(names: Sequence[str]):
    """Raise ValueError if a tracker does not exist or is not installed, before weights are loaded."""
    for name in names:
        find_tracker(name)
        if name not in TRACKERS:
            continue
        package = importlib.util.find_spec(name)
        # A folder wandb/ that earlier runs wrote is found too, but has no origin.
        if package is None or package.origin is None:
            raise ValueError(f"report_to: {name} is not installed; pip install 'minivlmrl[{name}]'")
