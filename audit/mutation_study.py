"""Measure the cost of real bugs: train the default recipe with each bug, and compare held-out accuracy.

    python audit/mutation_study.py --seeds 0 1 2 --json mutation_study.json   # all costs; adds missing runs
    python audit/mutation_study.py --bug no_picture_in_reference      # one run with a bug, with any options of train.py

tests/bugs.py has the bugs: each replaces parts of the package while it runs, and nothing of this is in the package
itself. tests/test_mutation_study.py shows that each changes what training computes.
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

OPEN = "--rollout.max_logp_mismatch=.inf"  # or the trainer stops where its sampler differs: it finds some by itself
BUGS = {name: bug for name, bug in bugs.BUGS.items() if bug.ours}
HEALTHY = {"healthy": [], "healthy, num_iterations 2": bugs.TWICE}


def measure(name: str, seed: int) -> dict:
    """Run the default recipe in a process of its own."""
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
    """Average over seeds what a bug takes from the held-out accuracy of the healthy run with its options."""
    accuracies = {(row["name"], row["seed"]): row.get("sampled", math.nan) for row in rows}
    result = {}
    for name, bug in BUGS.items():
        healthy = "healthy, num_iterations 2" if bug.options == bugs.TWICE else "healthy"
        losses = []
        for (row_name, seed), accuracy in accuracies.items():
            if row_name == name and (healthy, seed) in accuracies:
                losses.append(accuracies[healthy, seed] - accuracy)
        result[name] = round(sum(losses) / max(1, len(losses)), 3)
    return result


def main(arguments: list[str]):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)  # --seed is no --seeds
    parser.add_argument("--bug", choices=[*BUGS], help="run the default recipe with this bug")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--json", type=Path, help="numbers as they come; what it has is not run again")
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
