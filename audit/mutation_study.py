"""Measure the cost of real bugs: train the default recipe with each bug, and compare held-out accuracy.

    python audit/mutation_study.py --seeds 0 1 2 --json mutation_study.json  # all bugs
    python audit/mutation_study.py --bug no_picture_in_reference  # one run, with options of train

tests/bugs.py defines the bugs. Each bug replaces functions of minivlmrl at run time, so the package itself contains no
code for this study. tests/test_mutation_study.py checks that each bug changes the metrics of a training run.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from minivlmrl_audit.minivlmrl_api import train_recipe

sys.path.insert(0, str(Path(__file__).parent / "tests"))
import bugs

# Disable the trainer's own check that sampler and trainer compute equal log-probabilities, because this check would
# stop a run with some bugs.
OPEN = "--rollout.max_logp_mismatch=.inf"
BUGS = bugs.BUGS
HEALTHY = {"healthy": [], "healthy, num_iterations 2": bugs.TWICE}


def measure(name: str, seed: int) -> dict:
    """Train the default recipe in a new process, and return its held-out accuracies.

    If the process fails, the result has its last error line under "ended" instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = HEALTHY.get(name, ["--bug", name])
        command = [sys.executable, __file__, f"--seed={seed}", f"--output_dir={folder}", "--num_threads=1", *options]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return {"name": name, "seed": seed, "ended": result.stderr.strip().splitlines()[-1][-200:]}
        summary = json.loads((Path(folder) / "summary.json").read_text())
    metrics = {"sampled": "eval/accuracy_sampled", "greedy": "eval/accuracy_greedy", "format": "eval/format_sampled"}
    after = {key: round(summary["after_grpo"][metric], 3) for key, metric in metrics.items()}
    before = round(summary["after_sft"]["eval/accuracy_sampled"], 3)
    return {"name": name, "seed": seed, "after_sft": before, **after}


def costs(rows: list[dict]) -> dict[str, float]:
    """Compute by how much each bug lowers the held-out accuracy, averaged over seeds.

    Each run with a bug is compared with the run without a bug that has the same options and seed.
    """
    accuracies = {(row["name"], row["seed"]): row.get("sampled", math.nan) for row in rows}
    result = {}
    for name, bug in BUGS.items():
        healthy = "healthy, num_iterations 2" if bug.options == bugs.TWICE else "healthy"
        seeds = [seed for other, seed in accuracies if other == name and (healthy, seed) in accuracies]
        losses = [accuracies[healthy, seed] - accuracies[name, seed] for seed in seeds]
        result[name] = round(sum(losses) / max(1, len(losses)), 3)
    return result


def main(arguments: list[str]):
    # allow_abbrev=False, or argparse would take --seed for --seeds
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--bug", choices=[*BUGS], help="run the default recipe with this bug")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="names of the bugs to train with")
    parser.add_argument("--json", type=Path, help="file of results; runs in it are skipped")
    options, overrides = parser.parse_known_args(arguments)
    if options.bug or overrides:
        if options.bug:
            bug = BUGS[options.bug]
            bug.ours(setattr)
            overrides = [*bug.options, OPEN, *overrides]
        return train_recipe(overrides)
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    for seed in options.seeds:
        for name in [*HEALTHY, *BUGS]:
            wanted = options.only is None or name in options.only
            if wanted and not any(row["name"] == name and row["seed"] == seed for row in rows):
                rows.append(measure(name, seed))
                print(rows[-1], file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(costs(rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
