"""Metrics of a run as it goes: lines of files, the same for the same seed, and a progress bar."""

import importlib.util
import math
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minivlmrl.hub.folder import json_text, read_lines
from minivlmrl.run.alarms import Alarms, check_mismatch, looks_away
from minivlmrl.run.completions import CompletionsLog, Logged
from minivlmrl.scale.ranks import World

METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
EVALUATIONS, WARNINGS = "evaluations.jsonl", "warnings.jsonl"
FILES = METRICS, TIMINGS, EVALUATIONS, WARNINGS
# of micro-batches; of all other metrics the mean counts
OVER_STEP = {"rollout/logp_mismatch": max, "loss": sum}
Means = tuple[dict[str, float], float]  # and how many tokens or pairs they are over


class MetricsLog(ExitStack):
    """Writes, on the first rank, lines of files, a bar, completions and trackers.

    Its files begin with what a resumed run had written when its state was saved.
    """

    def __init__(self, config, world: World, progress):
        super().__init__()
        self.world, self.steps = world, progress.steps
        self.files = {}
        self.trackers = []
        self.bar = None
        # of the resumed stage
        self.alarms = None
        self.alarmed = progress.logs.get("alarms")
        self.completions = CompletionsLog(config, world, progress)
        if world.is_main:
            for name in FILES:
                path = Path(config.output_dir, name)
                file = self.files[name] = self.enter_context(path.open("wb"))
                file.write(progress.logs.get(name, "").encode())
                file.flush()
            names = dict.fromkeys(config.report_to)
            self.trackers = [TRACKERS[name](config, self.steps, self) for name in names]

    def write(self, name: str, line: dict):
        """Add a line to a file."""
        self.files[name].write(f"{json_text(line)}\n".encode())
        self.files[name].flush()

    def track(self, values: dict[str, float]):
        """Send values to the trackers, after this many steps of all stages."""
        for log in self.trackers:
            log(values, self.steps)

    def stage(self, algorithm, optimizer, done: int = 0, seconds: float = 0.0):
        """Begin a stage with a new bar; `done` steps took `seconds` before the run was resumed."""
        self.algorithm, self.name = algorithm, algorithm.stage
        self.alarms = Alarms(algorithm, optimizer)
        if done and self.alarmed:
            self.alarms.restore(self.alarmed)
        bar = progress_bar(self.name, algorithm.config.max_steps, bool(self.files), done)
        self.bar = self.enter_context(bar)  # so that what ends a run has a line of its own
        self.begin = time.perf_counter() - seconds
        self.last = seconds
        self.mark()

    def mark(self):
        """Note what the files hold after a step, or before the first of a stage."""
        self.ends = {name: file.tell() for name, file in self.files.items()}

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return time.perf_counter() - self.begin

    def written(self) -> dict[str, str]:
        """What the files held at the last mark, and the alarms know, for the state of the run.

        A resumed run makes evaluations since then again.
        """
        texts = ((name, Path(file.name).read_bytes()) for name, file in self.files.items())
        logs = {name: text[: self.ends[name]].decode() for name, text in texts}
        return logs | ({"alarms": self.alarms.state()} if logs and self.alarms else {})

    def step(self, number: int, metrics: dict[str, float], step):
        """Record one optimizer step; warn of what is about to go wrong."""
        check_mismatch(self.algorithm.run, metrics)
        self.steps += 1
        if not self.files:
            return
        for file in self.files.values():
            if not Path(file.name).exists():
                raise ValueError(f"{file.name}: deleted while the run writes it; the run ends")
        line = {"stage": self.name, "step": number}
        seconds = self.seconds
        self.write(METRICS, line | metrics)
        self.track({name: value for name, value in metrics.items() if math.isfinite(value)})
        tokens = sum(len(batch.group.input_ids) for batch in step.micro_batches)
        took = seconds - self.last
        timing = {"seconds": seconds, "step_time": took, "tokens_per_second": tokens / took}
        self.write(TIMINGS, line | timing | peak_memory())
        self.last = seconds
        self.show(number, metrics, took)
        self.completions.step(self.algorithm, step, number)
        for warning in self.alarms.step(metrics, step.rollout):
            self.write(WARNINGS, line | {"warning": warning})
            tqdm.write(f"step {number + 1}: {warning}", file=sys.stderr)
        self.mark()

    def show(self, number: int, metrics: dict[str, float], took: float):
        """Advance the bar; without a terminal print a line, in a notebook one in ten steps."""
        names = ["loss", "rewards/accuracies"]
        if "reward" in metrics:
            means = [name for name in metrics if re.fullmatch("rewards/.*/mean", name)]
            names = ["reward", *means[:3], "completions/mean_length", "kl"]
        short = {
            re.sub("^(rewards|completions)/|/mean$", "", name): f"{metrics[name]:.3f}"
            for name in names
            if name in metrics
        }
        self.bar.set_postfix(dict(list(short.items())[:3]), refresh=False)  # the bar needs room
        self.bar.update()
        every = 10 if "ipykernel" in sys.modules else 1  # a notebook keeps all lines
        if self.bar.disable and (number % every == 0 or number + 1 == self.bar.total):
            said = (f"{name}={value}" for name, value in short.items())
            print(f"{self.name} {number + 1}/{self.bar.total}", *said, f"{took:.2f} s", flush=True)

    def evaluation(self, stage: str, done: int, values: dict[str, float], seconds: float, rows=1):
        """Record what held-out rows say after `done` steps; its `seconds` are not the stage's."""
        if self.bar is not None:
            self.begin += seconds
        if not self.files:
            return
        line = {"stage": stage, "step": done}
        self.write(EVALUATIONS, line | values)
        self.track(curves(values))
        shown = " ".join(f"{name.replace(' ', '_')}={value:.3f}" for name, value in values.items())
        tqdm.write(f"held-out, {stage} {done}: {shown} ({seconds:.1f} s)")
        if "grey" not in values:
            return
        if warning := looks_away(read_lines(Path(self.files[EVALUATIONS].name), Logged), rows):
            self.write(WARNINGS, line | {"warning": warning})
            tqdm.write(f"step {done}: {warning}", file=sys.stderr)

    def end_stage(self) -> float:
        """Close the bar; seconds since the stage began."""
        self.bar.close()
        return self.seconds


def progress_bar(name: str, total: int, is_main: bool, done: int = 0, leave: bool = True) -> tqdm:
    """A bar that stays on the first rank's terminal; without a terminal there is none."""
    hidden = not is_main or not sys.stderr.isatty()
    options = {"disable": hidden, "mininterval": 0.5, "dynamic_ncols": True}
    return tqdm(total=total, initial=done, desc=name, leave=leave, **options)


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
            merged[name] = sum(metrics[name] * weight for metrics, weight in parts) / (total or 1)
    return merged, total


def tensorboard(config, steps: int, closing: ExitStack) -> Callable:
    """Write the run's folder tensorboard/, without later steps of an attempt before a resume.

    Returns:
        log(values, steps), as every tracker; `closing` closes it.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(config.output_dir) / "tensorboard"
    if not steps:
        shutil.rmtree(folder, ignore_errors=True)
    writer = closing.enter_context(SummaryWriter(str(folder), purge_step=steps))

    def log(values: dict[str, float], steps: int):
        for name, value in values.items():
            writer.add_scalar(name, value, steps)

    for line in read_lines(folder.with_name(METRICS), Logged)[-1:]:  # evaluations of it come again
        log({n: x for n, x in line.items() if n not in ("stage", "step") and x is not None}, steps)
    return log


def weights_and_biases(config, steps: int, closing: ExitStack) -> Callable:
    """Send to the project minivlmrl (WANDB_MODE=offline: wandb/); a resume is another run there."""
    import wandb

    folder = Path(config.output_dir)
    run = wandb.init(project="minivlmrl", name=folder.name, dir=str(folder), config=asdict(config))
    closing.callback(run.finish)
    return lambda values, steps: run.log(values, step=steps)


TRACKERS = {"tensorboard": tensorboard, "wandb": weights_and_biases}


def curves(evaluation: dict[str, float]) -> dict[str, float]:
    """Name values of an evaluation as curves: {"iou greedy": 0.5} -> {"eval/iou_greedy": 0.5}."""
    return {f"eval/{name.replace(' ', '_')}": value for name, value in evaluation.items()}


def check_trackers(names: list[str]):
    """Refuse a tracker whose package is not installed (ValueError), before anything is loaded."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder wandb/ of its runs is no package
            raise ValueError(f"report_to: {name} is not installed; pip install 'minivlmrl[{name}]'")
