"""Compare two groups of runs with several seeds each: a paired difference per metric.

Runs with the same seed form a pair. The 95 % interval of the mean difference is that of Student's t with n - 1 degrees
of freedom, for n pairs.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from minivlmrl.config.loading import flat, read_yaml
from minivlmrl.config.types import Plain
from minivlmrl.errors import UserError, truncate
from minivlmrl.files import RUN_CONFIG, file_inside
from minivlmrl.run.metrics import EVALUATIONS, METRICS, SPEED_STEPS
from minivlmrl.run.rollout_log import read_metrics

# 97.5 % quantiles of Student's t for 1 to 9 degrees of freedom
QUANTILES = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262
TRAINING = "reward", "loss", "kl", "entropy", "completions/mean_length"  # training metrics to compare


@dataclass
class Run:
    """Metrics: {metric: {step over all stages: value}}."""

    folder: Path
    stages: list[str]
    options: dict[str, Plain]
    curves: dict[str, dict[int, float]]


def read_run(folder: Path) -> Run:
    """Read metrics and options from a run folder."""
    if not (folder / METRICS).is_file() or not (folder / RUN_CONFIG).is_file():
        raise UserError(f"{folder} has no {METRICS} and {RUN_CONFIG}; pass the output_dir of a run")
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    first_steps: dict[str, int] = {}  # {stage: steps in the stages before it}
    for number, line in enumerate(read_metrics(file_inside(folder, METRICS)), 1):
        first_steps.setdefault(line["stage"], number - 1)
        for name, value in line.items():
            if value is not None and (name in TRAINING or name.endswith("/mean")):
                curves[name][number] = value
    for line in read_metrics(file_inside(folder, EVALUATIONS)):
        step = line.pop("step") + first_steps.get(line.pop("stage"), 0)
        for name, value in line.items():
            if value is not None:
                curves[name][step] = value
    return Run(folder, [*first_steps], flat(read_yaml(folder / RUN_CONFIG)), curves)


def last_value(run: Run, name: str, step: int) -> float:
    """Return a metric at a step; for training, the mean over ten steps."""
    if name.startswith("eval/"):
        return run.curves[name][step]
    return fmean(value for at, value in run.curves[name].items() if step - SPEED_STEPS < at <= step)


def difference(pairs: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Return mean and half width of the 95 % interval of second - first; None for fewer than two pairs."""
    differences = [second - first for first, second in pairs]
    degrees = len(differences) - 1
    if degrees < 1:
        return None
    z = 1.959964
    # Cornish-Fisher expansion, exact to 1e-3 from 10 degrees on
    expansion = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    quantile = QUANTILES[degrees - 1] if degrees <= len(QUANTILES) else expansion
    return fmean(differences), quantile * stdev(differences) / math.sqrt(len(differences))


def compare(groups: list[list[Run]]) -> list[tuple[str, str, str, str]]:
    """Return (metric and step, mean and range per group, difference) for metrics in all runs."""
    runs = [run for group in groups for run in group]
    rows = []
    for name in shared_metrics(runs):
        step = max(set.intersection(*({*run.curves[name]} for run in runs)))
        values = [{run.options["seed"]: last_value(run, name, step) for run in group} for group in groups]
        seeds = sorted(values[0].keys() & values[1].keys())
        found = difference([(values[0][seed], values[1][seed]) for seed in seeds])
        text = f"no interval: {len(seeds)} seeds in common, and at least 2 are needed"
        if found:
            mean, half = found
            shown = "" if abs(mean) > half else ": these seeds do not show a difference"
            text = f"{mean:+.3f} ± {half:.3f} over {len(seeds)} seeds{shown}"
        ranges = [f"{fmean(v.values()):.3f} ({min(v.values()):.3f} to {max(v.values()):.3f})" for v in values]
        rows.append((f"{name}, step {step}", *ranges, text))
    return rows


def shared_metrics(runs: list[Run]) -> list[str]:
    """Return metrics with a common step in all runs, held-out ones first."""
    names = [name for name in runs[0].curves if all(name in run.curves for run in runs)]
    common = [name for name in names if set.intersection(*({*run.curves[name]} for run in runs))]
    if not common:
        raise UserError("the runs share no step of a metric; compare runs with the same eval_steps or max_steps")
    return sorted(common, key=lambda name: (not name.startswith("eval/"), name))


def differing_options(groups: list[list[Run]]) -> list[str]:
    """Return options differing between groups, such as "grpo.beta: 0.0, 0.04".

    If the last stages have different names, their sections are compared: "grpo|mine.beta: 0.0, 0.04".
    """
    runs = [group[0] for group in groups]
    values = [{name: str(value) for name, value in run.options.items()} for run in runs]
    for stages in zip(*(run.stages[::-1] for run in runs), strict=False):
        if stages[0] not in runs[1].stages and stages[1] not in runs[0].stages:
            values = [
                join_sections(options, stage, other, "|".join(stages))
                for options, stage, other in zip(values, stages, stages[::-1], strict=True)
            ]
    first, second = values
    names = sorted({*first.items()} ^ {*second.items()})
    return [
        f"{name}: {truncate(first.get(name, 'absent'), 60, str)}, {truncate(second.get(name, 'absent'), 60, str)}"
        for name in dict.fromkeys(name for name, _ in names)
        if name not in ("seed", "output_dir", "resume")
    ]


def join_sections(options: dict[str, str], stage: str, other: str, joined: str) -> dict[str, str]:
    """Rename a stage section, and drop one used only by the other run."""
    found = {}
    for name, value in options.items():
        section, dot, option = name.partition(".")
        if section != other or not dot:
            found[f"{joined}.{option}" if section == stage and dot else name] = value
    return found


def print_comparison(first: list[Path], second: list[Path]):
    """Print a difference per metric, and options that differ."""
    groups = [[read_run(folder) for folder in folders] for folders in (first, second)]
    for group in groups:
        seeds = [run.options.get("seed") for run in group]
        if len({*seeds}) < len(seeds):
            raise UserError(f"two runs beside {group[0].folder} have the same seed; the seeds are {seeds}")
    for name, *means, text in compare(groups):
        print(f"{name}\n  A {means[0]}\n  B {means[1]}\n  B - A {text}")
    print(f"options that differ: {'; '.join(differing_options(groups)) or 'none'}")
