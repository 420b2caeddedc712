"""Train a recipe and compare its results with recorded runs (recipes/expected.json, written by benchmarks/learning.py).

    python benchmarks/expect.py [RECIPE] [--section.name=value ...]           # one process
    torchrun --nproc_per_node=2 benchmarks/expect.py [RECIPE] [--section.name=value ...]

The script trains like train.py, then prints the last stage's results with expected bands. Other processors and thread
counts round sums differently, and results drift apart over many steps. So results may differ from recorded ones, but
must not be below their bands.

A band extends from the lowest to the highest recorded result, plus two standard errors on both sides. The standard
error is that of an accuracy on held-out rows (Agresti and Coull: with two more correct and two more wrong rows, so that
it is not 0 if all runs are at 1.000). About one training run in ten fails, and a band with a failed run would hide
regressions, so the band leaves out the lowest of ten runs. One correct run in ten may then be below its band: try
another seed.
"""

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

from minivlmrl.commands.train import parse_arguments
from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.run.loop import run_training
from minivlmrl.run.process import run_rank

FILE = "expected.json"
# options that do not change results, except by rounding or chance
FREE = {
    "seed", "num_threads", "output_dir", "resume", "state_minutes", "state_steps", "log_completions",
    "best_metric", "report_to", "check_memory", "timeout", "eval_steps", "save_steps",
}  # fmt: skip


def main(arguments: list[str]):
    try:
        config, runs = find(arguments)
    except ValueError as error:
        sys.exit(str(error))

    def train_and_compare() -> int:
        code = run_training(config)
        if code == 0 and int(os.environ.get("RANK", 0)) == 0:
            code = report(config, runs)
        return code

    run_rank(train_and_compare)


def results(summary: dict) -> dict[str, dict[str, float]]:
    """Return the evaluations in a summary.json: {"after_sft": {"eval/accuracy_sampled": 0.4, ...}, ...}."""
    return {name: values for name, values in summary.items() if isinstance(values, dict) and name != "seconds"}


def add_run(path: Path, run: dict):
    """Add a run to the file, replacing one with the same recipe, overrides, seed and thread count."""
    names = ("recipe", "overrides", "seed", "threads")
    runs = json.loads(path.read_text()) if path.is_file() else []
    kept = [other for other in runs if any(other[name] != run[name] for name in names)]
    runs = sorted([*kept, run], key=lambda run: json.dumps([run[name] for name in names]))
    path.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


def find(arguments: list[str], path: Path | None = None) -> tuple[RunConfig, list[dict]]:
    """Load the recipe for a command line, and recorded runs with the same options.

    Raises:
        ValueError: there is no such run.
    """
    config = parse_arguments(arguments)
    path = path or recipes_folder() / FILE
    runs = []
    for run in json.loads(path.read_text()):
        run_config = load_config(recipes_folder() / run["recipe"], run["overrides"])
        if essence(run_config) == essence(config):
            runs.append(run)
    if not runs:
        raise ValueError(f"{path} has no run of this recipe with these options; train with train.py instead")
    return config, runs


def essence(config: RunConfig) -> dict:
    """Return the options that influence the results, except for the seed."""
    return {name: value for name, value in asdict(config).items() if name not in FREE}


def report(config: RunConfig, runs: list[dict]) -> int:
    """Compare a finished run with recorded runs; return 0 if it is in or above its bands, otherwise 1."""
    found = results(json.loads((Path(config.output_dir) / "summary.json").read_text()))
    return int(print_band(found, runs, config.data.eval_rows))


def print_band(found: dict, runs: list[dict], rows: int) -> bool:
    """Print the last stage's results with their bands; return True if one is below its band."""
    stage = list(runs[0]["results"])[-1]
    some_below = False
    for name, got in found[stage].items():
        values = sorted(run["results"][stage][name] for run in runs if name in run["results"][stage])
        share = (rows * sum(values) / len(values) + 2) / (rows + 4)
        error = 2 * math.sqrt(share * (1 - share) / (rows + 4))
        low = max(0.0, values[len(values) // 10] - error)
        high = min(1.0, values[-1] + error)
        position = "inside"
        hint = ""
        if got < low:
            position = "below"
            others_below = sum(value < low for value in values)
            hint = f", {others_below} of which are below it too: try another seed"
            some_below = True
        if got > high:
            position = "above"
            hint = ": better than expected, which is no failure"
        band = f"the band {low:.3f} to {high:.3f} of {len(values)} runs"
        print(f"expect: {stage} {name} {got:.3f} is {position} {band}{hint}")
    return some_below


if __name__ == "__main__":
    main(sys.argv[1:])
