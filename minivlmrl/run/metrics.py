"""Metrics of a run as it goes: lines of files, the same for the same seed, and a progress bar."""

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
# how a step's metric follows from those of its micro-batches; of all others the mean counts
OVER_STEP = {"rollout/logp_mismatch": max, "loss": sum}
Means = tuple[dict[str, float], float]  # metrics, and over how many tokens or pairs they are


class MetricsLog(ExitStack):
    """Writes, on the first rank, lines of files, a bar, completions and trackers.

    Its files begin with what a resumed run had written when its state was saved.
    """

    def __init__(self, config: RunConfig, world: World, progress: TrainerState):
        super().__init__()
        self.world = world
        self.steps = progress.steps  # of all stages
        self.begin_time = 0.0  # of the present stage
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
        """Add a line to a file."""
        self.files[name].write(f"{json_text(line)}\n".encode())
        self.files[name].flush()

    def track(self, values: dict[str, float]):
        """Send values to the trackers, after this many steps of all stages."""
        for log in self.trackers:
            log(values, self.steps)

    def stage(self, trainer: Trainer, steps_done: int, seconds: float):
        """Begin a stage with a new bar; a resumed one has done steps, which took `seconds`."""
        self.trainer = trainer
        self.name = trainer.stage
        bar = progress_bar(self.name, trainer.config.max_steps, self.world.is_main, steps_done)
        self.bar = self.enter_context(bar)  # so that what ends a run has a line of its own
        self.begin_time = time.perf_counter() - seconds
        self.last_seconds = seconds
        self.mark()

    def mark(self):
        """Note what the files hold after a step, or before the first of a stage."""
        self.file_ends = {name: file.tell() for name, file in self.files.items()}

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return time.perf_counter() - self.begin_time

    def written(self) -> dict[str, str]:
        """Return what the files held at the last mark, for the state of the run.

        A resumed run repeats the evaluations since then.
        """
        logs = {}
        for name, file in self.files.items():
            file.seek(0)  # the next write is at the end again: all was read
            logs[name] = file.read()[: self.file_ends[name]].decode()
        return logs

    def step(self, number: int, metrics: dict[str, float], step: Step) -> dict:
        """Record one optimizer step; returns its metrics with the tables of its routers."""
        self.steps += 1
        routers = self.trainer.router_log  # None: the model has no experts
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
        """Add a line to warnings.jsonl, and print it as a sentence about so many steps."""
        self.write(WARNINGS, {"stage": stage, "step": step, "warning": warning})
        tqdm.write(f"step {steps_done}: {warning}", file=sys.stderr)

    def show(self, number: int, metrics: dict[str, float], step_time: float):
        """Advance the bar; without a terminal print a line, in a notebook one in ten steps."""
        names = ["loss", "rewards/accuracies"]
        if "reward" in metrics:
            means = [name for name in metrics if re.fullmatch("rewards/.*/mean", name)]
            names = ["reward", *means[:3], "completions/mean_length", "kl"]
        shown = {}
        for name in names:
            if name in metrics:
                short_name = re.sub("^(rewards|completions)/|/mean$", "", name)
                shown[short_name] = f"{metrics[name]:.3f}"
        self.bar.set_postfix(dict(list(shown.items())[:3]), refresh=False)  # the bar needs room
        self.bar.update()
        print_every = 10 if "ipykernel" in sys.modules else 1  # a notebook keeps all lines
        if self.bar.disable and (number % print_every == 0 or number + 1 == self.bar.total):
            done = f"{self.name} {number + 1}/{self.bar.total}"
            values = [f"{name}={value}" for name, value in shown.items()]
            with ending_unread():
                print(done, *values, f"{step_time:.2f} s", flush=True)

    def evaluation(self, stage: str, steps_done: int, values: dict[str, float], seconds: float):
        """Record what held-out rows say after so many steps; its `seconds` are not the stage's."""
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
        """Close the bar; seconds since the stage began."""
        self.bar.close()
        return self.seconds


@contextmanager
def ending_unread() -> Iterator[None]:
    """Let a run save its state and end, as after SIGTERM, when nobody reads its stdout any more."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("stdout is closed: the run ends", file=sys.stderr)
        signal.raise_signal(signal.SIGTERM)


def progress_bar(
    name: str, total: int, is_main: bool, initial: int = 0, leave: bool = True
) -> tqdm:
    """A bar that stays on the first rank's terminal; without a terminal there is none."""
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
    """Raise ValueError if sampler and trainer disagree about tokens that were just sampled.

    In float32 no token may differ by more than the bound. In 16 bits single tokens do, so that
    the root mean square is compared with a tenth of it.
    """
    name = "rollout/logp_mismatch"
    bound = run.rollout.max_logp_mismatch
    if (run.model.compute_dtype or run.model.dtype) in ("bfloat16", "float16"):
        name = "rollout/logp_mismatch_rms"
        bound = bound / 10
    mismatch = metrics.get(name, 0.0)
    if mismatch > bound and not run.adapter.dropout:  # the sampler applies no dropout
        raise ValueError(
            f"{name} is {mismatch:.3g} nats: sampler and trainer disagree, a bug or a dtype too "
            f"coarse; rollout.max_logp_mismatch bounds it by {bound}, .inf does not check"
        )


def peak_memory() -> dict[str, float]:
    """Most memory that this process has held, in GiB: of its GPU, or of the machine if it says."""
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
    """Bring the metrics of all micro-batches to the host at once: a transfer waits for the GPU."""
    values = [value.double() for metrics, _ in parts for value in metrics.values()]
    numbers = iter(torch.stack(values).tolist())
    return [({name: next(numbers) for name in metrics}, weight) for metrics, weight in parts]


def merge(parts: list[Means]) -> Means:
    """Combine means of micro-batches or ranks."""
    total = sum(weight for _, weight in parts)
    merged = {}
    for name in parts[0][0]:
        if name in OVER_STEP:
            merged[name] = OVER_STEP[name](metrics[name] for metrics, _ in parts)
        elif name.endswith("_rms"):  # a root of a mean of squares
            squares = sum(metrics[name] ** 2 * weight for metrics, weight in parts)
            merged[name] = math.sqrt(squares / (total or 1))
        else:
            weighted = sum(metrics[name] * weight for metrics, weight in parts)
            merged[name] = weighted / (total or 1)
    return merged, total


def tensorboard(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Write the run's folder tensorboard/, without later steps of an attempt before a resume.

    Returns:
        log(values, steps), as every tracker; `closing` closes it.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(config.output_dir) / "tensorboard"
    if not steps:
        shutil.rmtree(folder, ignore_errors=True)
    # those after the last step that is done; an evaluation that comes again has the same values
    writer = closing.enter_context(SummaryWriter(str(folder), purge_step=steps + 1))

    def log(values: dict[str, float], steps: int):
        for name, value in values.items():
            writer.add_scalar(name, value, steps)

    return log


def weights_and_biases(config: RunConfig, steps: int, closing: ExitStack) -> Callable:
    """Send to the project minivlmrl (WANDB_MODE=offline: wandb/); a resume is another run there."""
    import wandb  # pyright: ignore[reportMissingImports]  # optional, see check_trackers

    folder = Path(config.output_dir)
    run = wandb.init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))
    closing.callback(run.finish)
    return run.log


TRACKERS = {"tensorboard": tensorboard, "wandb": weights_and_biases}


def find_tracker(name: str) -> Callable:
    """Find a tracker, a function (config, steps, closing) -> log(values, steps), by its name."""
    with error_context(f"report_to {name}"):
        return with_options(*resolve_object("tracker", name, TRACKERS))


def check_trackers(names: Sequence[str]):
    """Refuse a tracker that is not there or installed (ValueError), before anything is loaded."""
    for name in names:
        find_tracker(name)
        if name not in TRACKERS:
            continue
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # a folder wandb/ of its runs is no package
            raise ValueError(f"report_to: {name} is not installed; pip install 'minivlmrl[{name}]'")
