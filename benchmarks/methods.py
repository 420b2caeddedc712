"""Compare the methods of recipes/methods with GRPO over seeds, on rows of which half can be answered blind.

    python benchmarks/methods.py --json docs/curves/methods.json            # five seeds, runs not yet in the file
    python benchmarks/methods.py --json docs/curves/methods.json --only vppo --seeds 0 1

For each seed, SFT runs once, and every method continues from its weights with the options of GRPO: same rows, same
seed, same number of sampled completions.

Criterion, written before the runs: a method helps if the 95 % interval of the paired difference to GRPO over seeds
(Student's t) of the held-out accuracy with pictures, greedy, lies above 0. It sees more if the same holds for the
accuracy with pictures minus that with gray pictures. Everything else is called "not shown".
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "recipes/methods"
STEPS = 40
COMMON = [
    "shapes.yaml",
    f"--data.task={FOLDER}/half_blind.py:TASK",
    "--data.eval_rows=128",
    "--data.eval_without_images=true",
    "--num_threads=1", "--checkpoint_minutes=0", "--log_completions=0", f"--grpo.max_steps={STEPS}",
    "--grpo.prompts_per_step=8", "--grpo.micro_batch_size=8", "--grpo.learning_rate=6e-4",
]  # fmt: skip
METHODS = {
    "grpo": ["--stages=[grpo]"],
    "vppo": [f"--stages=[{FOLDER}/vppo.py:VPPO]"],
    "papo": [f"--stages=[{FOLDER}/papo.py:PAPO]"],
    "pgpo": [f"--stages=[{FOLDER}/pgpo.py:PGPO]"],
    "noisy_rollout": [
        "--stages=[grpo]", f"--sampling.engine={FOLDER}/noisy_rollout.py:NoisyRollout(steps={STEPS})",
        "--rollout.max_logp_mismatch=.inf",
    ],
    "pairwise": ["--stages=[grpo]", f"--grpo.advantages={FOLDER}/functions.py:pairwise"],
    "nsr": ["--stages=[grpo]", f"--grpo.advantages={FOLDER}/functions.py:nsr(right=1.5)"],
}  # fmt: skip
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # {number of seeds: quantile of Student's t}


def train(seed: int, folder: Path, options: list[str]) -> dict:
    """Train, and return the last evaluation and the mean training reward of each step."""
    command = [sys.executable, "train.py", *COMMON, f"--seed={seed}", f"--output_dir={folder}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    lines = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "evaluations")}
    last = json.loads(lines["evaluations"][-1])
    names = {"accuracy": "eval/accuracy_greedy", "blind": "eval/accuracy_gray_image"}
    values = {short: last[name] for short, name in names.items()}
    return values | {"reward": [round(json.loads(line).get("reward", 0.0), 4) for line in lines["metrics"]]}


def compare(runs: dict[str, dict], method: str) -> str:
    """Return a line with means, and the paired difference to GRPO with its interval."""
    seeds = [key.partition("/")[2] for key in runs if key.startswith(f"{method}/") and f"grpo/{key[-1]}" in runs]
    texts = [f"{method:14} {len(seeds)} seeds"]
    for name, value in (
        ("accuracy", lambda run: run["accuracy"]),
        ("blind", lambda run: run["blind"]),
        ("seen", lambda run: run["accuracy"] - run["blind"]),
    ):
        own = [value(runs[f"{method}/{seed}"]) for seed in seeds]
        differences = [x - value(runs[f"grpo/{seed}"]) for x, seed in zip(own, seeds, strict=True)]
        text = f"{name} {statistics.fmean(own):.3f}" if own else name
        if len(seeds) in T_95 and method != "grpo":
            half = T_95[len(seeds)] * statistics.stdev(differences) / len(seeds) ** 0.5
            mean = statistics.fmean(differences)
            verdict = "more" if mean - half > 0 else "less" if mean + half < 0 else "not shown"
            text += f" ({mean:+.3f} +- {half:.3f}: {verdict})"
        texts.append(text)
    return ", ".join(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file with finished runs, which are not repeated")
    parser.add_argument("--only", nargs="*", default=[*METHODS], choices=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int, default=range(5))
    options = parser.parse_args()
    runs = json.loads(options.json.read_text()) if options.json.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for seed, method in product(options.seeds, options.only):
            if f"{method}/{seed}" in runs:
                continue
            start = Path(folder, f"sft{seed}")
            if not start.exists():
                train(seed, start, ["--stages=[sft]"])
            model = ["--model.config=null", f"--model.path={start}/checkpoint"]
            runs[f"{method}/{seed}"] = train(seed, Path(folder, f"{method}{seed}"), [*model, *METHODS[method]])
            options.json.write_text(json.dumps(runs, indent=1) + "\n")
            print(
                f"{method}/{seed}", {name: runs[f"{method}/{seed}"][name] for name in ("accuracy", "blind")}, flush=True
            )
    for method in METHODS:
        print(compare(runs, method))


if __name__ == "__main__":
    main()
