"""What a recipe is expected to reach: recipes/expected.json, which benchmarks/learning.py writes, one run a line.

`torchrun train.py RECIPE --expect` trains and then compares its summary.json with that file. Where recipe, seed,
threads, CPU and torch are those of a line, every number must be equal to the last bit. Elsewhere floating-point sums
differ, and so do some draws: the numbers after the last stage must lie in a band, from the lowest to the highest run of
the recipe, and beyond these by two standard errors of a share of the held-out rows.
"""

import json
import math
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from minivlmrl import train
from minivlmrl.run.config import RunConfig, load_config, recipes_folder
from minivlmrl.tools.process import run_rank

FILE = "expected.json"
# fields of a recipe that change no number of the summary; seed and threads are columns of the file
FREE = ("seed", "num_threads", "output_dir", "overwrite", "resume", "state_minutes", "state_steps", "keep_states")
FREE += ("log_completions", "show_completions", "keep_best", "report_to", "check_memory", "timeout")


def main(arguments: list[str]):
    """Be one rank of a run that ends with the comparison, which the first rank prints; ends the process."""
    arguments = [argument for argument in arguments if argument != "--expect"]
    try:
        known = find(arguments)
    except ValueError as error:
        sys.exit(str(error))
    first = int(os.environ.get("RANK", 0)) == 0
    run_rank(lambda words: train.main(words) or (report(*known) if first else 0), arguments)


def environment() -> str:
    """What decides the last bits besides the number of threads: the CPU and its instructions, and torch's version."""
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            name = line.partition(": ")[2]
            break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.partition('+')[0]}"


def results(summary: dict) -> dict[str, dict[str, float]]:
    """The evaluations of a summary.json: {"after_sft": {"sampled": 0.4, ...}, ...}."""
    return {name: values for name, values in summary.items() if isinstance(values, dict) and name != "seconds"}


def add_run(path: Path, run: dict):
    """Add a run to the file, in the place of an earlier one of its recipe, overrides, seed and threads."""
    names = ("recipe", "overrides", "seed", "threads")
    runs = json.loads(path.read_text()) if path.is_file() else []
    kept = [other for other in runs if any(other[name] != run[name] for name in names)]
    runs = sorted([*kept, run], key=lambda run: json.dumps([run[name] for name in names]))
    path.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


def find(arguments: list[str], path: Path | None = None) -> tuple[RunConfig, list[dict]]:
    """The recipe of a command line, and the runs of it that the file has.

    Raises:
        ValueError: it has none.
    """
    recipe = arguments[0] if arguments and not arguments[0].startswith("--") else recipes_folder() / "shapes.yaml"
    config = load_config(recipe, [word for word in arguments if word.startswith("--")])
    path = path or recipes_folder() / FILE
    if runs := same_recipe(json.loads(path.read_text()) if path.is_file() else [], config):
        return config, runs
    raise ValueError(f"--expect: {path} has no run of this recipe with these options; leave --expect out")


def report(config: RunConfig, runs: list[dict]) -> int:
    """Print whether the run that has just ended is as expected; returns 0 if it is, else 1."""
    found = results(json.loads((Path(config.output_dir) / "summary.json").read_text()))
    here = {"seed": config.seed, "threads": torch.get_num_threads(), "environment": environment()}
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        here["threads"] = "several processes"
    same = [run for run in runs if all(run[name] == value for name, value in here.items())]
    off = exact(found, same[0]["results"]) if same else []
    if same and not off:
        print("expect: as printed, every number to the last bit")
        return 0
    for line in off or [f"{FILE} has no run with {', '.join(f'{name} {value}' for name, value in here.items())}"]:
        print(f"expect: {line}")
    return int(out_of_band(found, runs, config.data.eval_rows) or bool(off))


def same_recipe(runs: list[dict], config) -> list[dict]:
    """The runs whose recipe and overrides say what the config says, but for fields that change no number."""

    def essence(config) -> dict:
        return {name: value for name, value in asdict(config).items() if name not in FREE}

    files = {run["recipe"]: recipes_folder() / run["recipe"] for run in runs}
    known = [run for run in runs if files[run["recipe"]].is_file()]
    return [run for run in known if essence(load_config(files[run["recipe"]], run["overrides"])) == essence(config)]


def exact(found: dict, expected: dict) -> list[str]:
    """A line for each number that is not the expected one."""
    lines = []
    for stage, values in expected.items():
        for name, value in values.items():
            got = found.get(stage, {}).get(name, math.nan)
            if got != value:
                lines.append(f"{stage} {name} is {got:.4f}, not {value:.4f}: off by {got - value:+.4f}")
    return lines


def out_of_band(found: dict, runs: list[dict], rows: int) -> bool:
    """Print each number after the last stage beside its band; returns whether one is outside."""
    stage, outside = list(runs[0]["results"])[-1], False
    for name in runs[0]["results"][stage]:
        values = [run["results"][stage][name] for run in runs]
        share = min(1.0, max(0.0, sum(values) / len(values)))
        error = 2 * math.sqrt(share * (1 - share) / rows)
        low, high, got = min(values) - error, max(values) + error, found.get(stage, {}).get(name, math.nan)
        inside = low <= got <= high
        words = "in" if inside else f"off by {max(low - got, got - high):.3f} from"
        print(f"expect: {stage} {name} {got:.3f}, {words} the band {low:.3f} to {high:.3f} of {len(runs)} runs")
        outside |= not inside
    return outside
