"""What the default recipe learns, seed by seed, and what it learns from shuffled rewards (a control: nothing).

    python benchmarks/learning.py --seeds 0 1 2 --json learning.json

Each row is one run of train.py with recipes/shapes.yaml; sampled, greedy and format are shares of its held-out rows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(seed: int, overrides: list[str]) -> dict:
    """One run of the recipe; its summary.json."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), f"--seed={seed}", f"--output_dir={folder}", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "summary.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shuffled", type=int, nargs="*", default=[0], help="seeds of the control runs")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("overrides", nargs="*", help="fields of the recipe, after --: -- --grpo.max_steps=10")
    arguments = parser.parse_args()
    plan = [("true rewards", seed, []) for seed in arguments.seeds]
    plan += [("shuffled rewards", seed, ["--grpo.shuffle_rewards=true"]) for seed in arguments.shuffled]
    rows = []
    header = ("rewards", "seed", "sampled before -> after", "greedy before -> after", "format", "sft s", "grpo s")
    print(("{:<18}{:>5}{:>26}{:>26}{:>9}{:>8}{:>8}").format(*header))
    for name, seed, overrides in plan:
        summary = run(seed, overrides + arguments.overrides)
        before, after, seconds = summary["after_sft"], summary["after_grpo"], summary["seconds"]
        print(
            f"{name:<18}{seed:>5}{before['sampled']:>16.3f} -> {after['sampled']:.3f} "
            f"{before['greedy']:>16.3f} -> {after['greedy']:.3f} {after['format']:>8.3f}"
            f"{seconds['sft']:>8.1f}{seconds['grpo']:>8.1f}",
            flush=True,
        )
        rows.append({"rewards": name, "seed": seed, **summary})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"runs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
