"""Compare two groups of runs, with several seeds each: a paired difference per metric.

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
    """Stages, options and metrics of a run."""

    folder: Path
    stages: list[str]
    options: dict[str, Plain]
    curves: dict[str, dict[int, float]]  # {metric: {step: value}}; steps are counted over all stages


def read_run(folder: Path) -> Run:
    """Read metrics and options from a run folder."""
    if not (folder / METRICS).is_file() or not (folder / RUN_CONFIG).is_file():
        raise UserError(f"{folder} has no {METRICS} and {RUN_CONFIG}; pass the output_dir of a run")
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    first_steps: dict[str, int] = {}  # {stage: steps in all earlier stages}
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
    """Return a metric at a step; average training metrics over the last ten steps."""
    curve = run.curves[name]
    if name.startswith("eval/"):
        return curve[step]
    return fmean(value for at, value in curve.items() if step - SPEED_STEPS < at <= step)


def difference(pairs: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Return mean and 95 % interval half width for second - first, None for fewer than two pairs."""
    differences = [second - first for first, second in pairs]
    degrees = len(differences) - 1
    if degrees < 1:
        return None
    z = 1.959964
    # Cornish-Fisher expansion of the quantile, exact to 1e-3 from 10 degrees on
    first_term = (z**3 + z) / (4 * degrees)
    second_term = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    expansion = z + first_term + second_term
    quantile = QUANTILES[degrees - 1] if degrees <= len(QUANTILES) else expansion
    return fmean(differences), quantile * stdev(differences) / math.sqrt(len(differences))


def compare(groups: list[list[Run]]) -> list[tuple[str, str, str, str]]:
    """Compare shared metrics; return rows (metric and step, mean and range in A, in B, difference)."""
    runs = [run for group in groups for run in group]
    rows = []
    for name in shared_metrics(runs):
        step = max(common_steps(runs, name))
        values = []  # one {seed: metric} per group
        ranges = []
        for group in groups:
            of_seed = {run.options["seed"]: last_value(run, name, step) for run in group}
            numbers = of_seed.values()
            values.append(of_seed)
            ranges.append(f"{fmean(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})")
        first, second = values
        seeds = sorted(first.keys() & second.keys())
        found = difference([(first[seed], second[seed]) for seed in seeds])
        text = f"no interval: {len(seeds)} seeds in common, and at least 2 are needed"
        if found:
            mean, half = found
            shown = "" if abs(mean) > half else ": these seeds do not show a difference"
            text = f"{mean:+.3f} ± {half:.3f} over {len(seeds)} seeds{shown}"
        rows.append((f"{name}, step {step}", *ranges, text))
    return rows


def common_steps(runs: list[Run], name: str) -> set[int]:
    """Return the steps at which all runs have a metric."""
    return set.intersection(*({*run.curves.get(name, ())} for run in runs))


def shared_metrics(runs: list[Run]) -> list[str]:
    """Return metrics with a common step in all runs, evaluation metrics first."""
    common = [name for name in runs[0].curves if common_steps(runs, name)]
    if not common:
        raise UserError("the runs share no step of a metric; compare runs with the same eval_steps or max_steps")
    return sorted(common, key=lambda name: (not name.startswith("eval/"), name))


def differing_options(groups: list[list[Run]]) -> list[str]:
    """Return options with different values in the two groups, such as "grpo.beta: 0.0, 0.04".

    If the last stages have different names, such as grpo and mine, they are compared as "grpo|mine.beta: 0.0, 0.04".
    """
    (a, *_), (b, *_) = groups
    first = {name: str(value) for name, value in a.options.items()}
    second = {name: str(value) for name, value in b.options.items()}
    for stage, other in zip(a.stages[::-1], b.stages[::-1], strict=False):
        if stage not in b.stages and other not in a.stages:
            joined = f"{stage}|{other}"
            first = join_sections(first, stage, other, joined)
            second = join_sections(second, other, stage, joined)
    changed = sorted({*first.items()} ^ {*second.items()})
    lines = []
    for name in dict.fromkeys(name for name, _ in changed):
        if name not in ("seed", "output_dir", "resume"):
            texts = [truncate(options.get(name, "absent"), 60, str) for options in (first, second)]
            lines.append(f"{name}: {', '.join(texts)}")
    return lines


def join_sections(options: dict[str, str], stage: str, other: str, joined: str) -> dict[str, str]:
    """Rename the section `stage` in a run's options to `joined`, and drop the section `other`."""
    found = {}
    for name, value in options.items():
        section, dot, option = name.partition(".")
        if dot and section == other:
            continue
        new_name = f"{joined}.{option}" if dot and section == stage else name
        found[new_name] = value
    return found


def print_comparison(first: list[Path], second: list[Path]):
    """Print the difference for every shared metric, and all differing options."""
    groups = [[read_run(folder) for folder in folders] for folders in (first, second)]
    for group in groups:
        seeds = [run.options.get("seed") for run in group]
        if len({*seeds}) < len(seeds):
            raise UserError(f"two runs beside {group[0].folder} have the same seed; the seeds are {seeds}")
    ends = sorted({max(step for curve in run.curves.values() for step in curve) for group in groups for run in group})
    if len(ends) > 1:
        steps = ", ".join(map(str, ends))
        print(f"The runs end at steps {steps}: each metric is compared at the last step that all runs share.")
    for name, *means, text in compare(groups):
        print(f"{name}\n  A {means[0]}\n  B {means[1]}\n  B - A {text}")
    print(f"options that differ: {'; '.join(differing_options(groups)) or 'none'}")
