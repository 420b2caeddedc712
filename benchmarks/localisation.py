"""What recipes/localisation.yaml learns, seed by seed, against three controls from the same SFT checkpoint.

    python benchmarks/localisation.py --jobs 2 --json localisation.json

    sft             what the later rows begin with
    grpo            the recipe's second stage: reward 0.5 for the form, 1.0 for the IoU
    sft continued   more steps on the same noisy demonstrations, for as many seconds as grpo took
    shuffled        grpo with its rewards permuted over the batch: a control that must learn nothing

Mean IoU over held-out pictures of the likeliest answer (greedy) and of one drawn at temperature 1 (sampled); acc_0_5 is
the share of boxes with an IoU of at least 0.5; unseen the pictures with a box that no training picture has. Each run
has one thread, so that its numbers do not depend on the number of cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "localisation.yaml"
COLUMNS = ("greedy", "sampled", "acc_0_5 greedy", "acc_0_5 sampled", "unseen greedy", "unseen sampled", "format")


def run(folder: Path, seed: int, *overrides: str) -> dict:
    """One run of train.py; its summary.json."""
    command = [sys.executable, str(ROOT / "train.py"), str(RECIPE), f"--seed={seed}", f"--output_dir={folder}"]
    result = subprocess.run([*command, "--num_threads=1", *overrides], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return json.loads((folder / "summary.json").read_text())


def compare(seed: int, overrides: list[str]) -> list[dict]:
    """The rows of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        base = run(Path(folder) / "sft", seed, "--stages=[sft]", *overrides)
        begin = ["--model.config=null", f"--model.path={Path(folder) / 'sft' / 'checkpoint'}", *overrides]
        trained = run(Path(folder) / "grpo", seed, *begin, "--stages=[grpo]")
        seconds, begun = trained["seconds"]["grpo"], base["seconds"]["sft"]
        steps = len((Path(folder) / "sft" / "metrics.jsonl").read_text().splitlines())
        more = max(1, round(steps * seconds / begun))
        longer = ["--stages=[sft]", f"--sft.max_steps={more}", "--sft.learning_rate=1e-3", "--sft.warmup_steps=0"]
        longer += ["--sft.lr_scheduler_type=constant"]
        continued = run(Path(folder) / "continued", seed, *begin, *longer)
        shuffled = run(Path(folder) / "shuffled", seed, *begin, "--stages=[grpo]", "--grpo.shuffle_rewards=true")
    return [
        {"seed": seed, "row": "sft", "seconds": begun, "constant box": base["chance"], **base["after_sft"]},
        {"seed": seed, "row": "grpo", "seconds": seconds, **trained["after_grpo"]},
        {"seed": seed, "row": "sft continued", "seconds": continued["seconds"]["sft"], **continued["after_sft"]},
        {"seed": seed, "row": "shuffled", "seconds": shuffled["seconds"]["grpo"], **shuffled["after_grpo"]},
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--json", help="write the numbers to this file as they come")
    parser.add_argument("overrides", nargs="*", help="fields of the recipe, after --: -- --grpo.max_steps=10")
    arguments = parser.parse_args()
    rows = []
    print("| seed | stage | " + " | ".join(COLUMNS) + " | seconds |\n" + "|---" * (len(COLUMNS) + 3) + "|", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for some in pool.map(lambda seed: compare(seed, arguments.overrides), arguments.seeds):
            for row in some:
                numbers = (f"{row[name]:.3f}" if name in row else "" for name in COLUMNS)
                print(
                    f"| {row['seed']} | {row['row']} | " + " | ".join(numbers) + f" | {row['seconds']:.0f} |",
                    flush=True,
                )
            rows += some
            if arguments.json:
                Path(arguments.json).write_text(json.dumps({"runs": rows}, indent=2) + "\n")
    print(f"constant box: mean IoU {rows[0]['constant box']:.3f}")


if __name__ == "__main__":
    main()
