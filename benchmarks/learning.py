"""Train every algorithm on the built-in task with several seeds, and print the accuracies in a table.

    python benchmarks/learning.py --jobs 2                         # everything, three seeds: half an hour on two cores
    python benchmarks/learning.py --only grpo dpo --seeds 0 --json learning.json
    python benchmarks/learning.py --only grpo digits --threads 2

Runs are also recorded in recipes/expected.json, for docs/results.md, unless they have overrides or need files from
another script. Recipes in LONG run only if --only names them.

A table row is one run of train.py, by default on one thread, so results do not depend on the number of cores. `sampled`
and `greedy` are accuracies on held-out images before and after the last stage. `pairs` is the share of held-out pairs
in which the better answer is preferred. `warnings` are explained in docs/metrics.md; a run that learns has none.
`shuffled rewards`, `gray crops` and `any quarter` are controls that must not learn.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402

RECIPES = ROOT / "recipes"


@dataclass
class Entry:
    """Recipe with overrides."""

    name: str
    recipe: str  # file name in recipes/
    overrides: list[str] = field(default_factory=list)
    before: str = ""  # script with arguments to run first, relative to this folder


def grpo(name: str, *overrides: str) -> Entry:
    return Entry(name, "shapes.yaml", [f"--grpo.{text}" for text in overrides])


def zoom(name: str, task: str, environment: str = "Quarters") -> Entry:
    options = [f"--data.task=recipes/zoom.py:{task}", f"--sampling.environment=recipes/zoom.py:{environment}"]
    return Entry(f"zoom, {name}", "zoom.yaml", options)


def shuffled(**weights: float) -> str:
    rewards = {f"recipes/shuffled.py:shuffled(reward={name!r})": weight for name, weight in weights.items()}
    return f"--rewards={json.dumps(rewards)}"


AFTER_SFT = "../train.py {root}/recipes/shapes.yaml --seed={seed} --stages=[sft] --output_dir=sft --num_threads=1"
LORA = ["--model.config=null", "--model.path=sft/checkpoint", "--adapter.r=16", "--grpo.learning_rate=1e-3"]
LORA += ["--adapter.target=[language, vision, merger]"]
PLAN = [
    grpo("grpo"),
    grpo("bnpo", "loss_type=bnpo"),
    grpo("dr_grpo", "loss_type=dr_grpo"),
    grpo("dapo", "loss_type=dapo"),
    grpo("luspo", "loss_type=luspo", "importance_sampling_level=sequence"),
    grpo("cispo", "loss_type=cispo", "epsilon_high=5.0"),
    grpo("sapo", "loss_type=sapo"),
    grpo("vespo", "loss_type=vespo"),
    grpo("rloo", "loss_type=rloo"),
    grpo("gspo", "importance_sampling_level=sequence"),
    grpo("num_iterations 2", "num_iterations=2"),
    Entry("grpo, 8-bit AdamW", "shapes.yaml", ["--optimizer.name=adamw_8bit"]),
    Entry("lora", "shapes.yaml", ["--stages=[grpo]", *LORA], before=AFTER_SFT),
    Entry("shuffled rewards", "shapes.yaml", [shuffled(format=0.5, accuracy=1.0)]),
    Entry("tagless answers", "shapes.yaml", ["--data.answer_format=whole", "--rewards={accuracy: 1.0}"]),
    Entry("ppo", "shapes_ppo.yaml"),
    Entry("dpo", "shapes_dpo.yaml"),
    Entry("mpo", "shapes_mpo.yaml"),
    Entry("reward model, grpo", "shapes_reward_model.yaml"),
    Entry("qwen3-vl, grpo", "shapes.yaml", ["--model.config=recipes/shapes_qwen3_vl_model.json"]),
    Entry("qwen3.5, grpo", "shapes.yaml", ["--model.config=recipes/shapes_qwen3_5_model.json"]),
]
PAID = "--rewards.environment=0.3"
LONG = [
    Entry("digits", "digits.yaml", before="../recipes/digits.py digits"),
    Entry("zoom", "zoom.yaml"),
    zoom("gray crops", "BLIND", "Blind"),
    zoom("any quarter", "LOST", "Lost"),
    zoom("no thought", "SILENT"),
    zoom("dark squares", "OTHERS"),
    zoom("a third informed", "INFORMED"),
    Entry("zoom, shuffled rewards", "zoom.yaml", [shuffled(accuracy=1.0), PAID]),
]


def run(entry: Entry, seed: int, threads: int, overrides: list[str]) -> dict:
    """Run an entry; return its summary.json with the warnings added."""
    with tempfile.TemporaryDirectory() as folder:
        if entry.before:
            script, *words = shlex.split(entry.before.format(root=ROOT, seed=seed))
            command = [sys.executable, str(Path(__file__).parent / script), *words]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, str(ROOT / "train.py"), str(RECIPES / entry.recipe), f"--seed={seed}"]
        command += [f"--output_dir={folder}", f"--num_threads={threads}", *entry.overrides, *overrides]
        cwd = folder if entry.before else ROOT  # overrides have paths relative to this folder
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        warnings = (Path(folder) / "warnings.jsonl").read_text().splitlines()
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return summary | {"warnings": [*map(json.loads, warnings)]}


def row_of(entry: Entry, summary: dict) -> dict:
    *_, before, after = [name for name in summary if name == "start" or name.startswith("after_")]
    # evaluations before and after the last stage; the first reward is the first metric
    names = [name.removesuffix("_sampled") for name in summary["start"] if name.endswith("_sampled")]
    sampled, greedy = ([summary[x][f"{names[0]}_{way}"] for x in (before, after)] for way in ("sampled", "greedy"))
    stages = [stage for stage in summary.values() if isinstance(stage, dict)]
    pairs = [stage["eval/pair_accuracy"] for stage in stages if "eval/pair_accuracy" in stage]
    numbers = {"name": entry.name, "sampled": sampled, "greedy": greedy, "pairs": pairs[-1] if pairs else None}
    return numbers | {"warnings": summary["warnings"]}


def show(row: dict) -> str:
    warnings = [f"{line['stage']} step {line['step']}: {line['warning']}" for line in row["warnings"]]
    cells = [
        row["name"],
        str(row["seed"]),
        *(f"{row[name][0]:.3f} -> {row[name][1]:.3f}" for name in ("sampled", "greedy")),
        "" if row["pairs"] is None else f"{row['pairs']:.3f}",
        "; ".join(warnings) or "none",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = "| run | seed | sampled | greedy | pairs | warnings |\n" + "|---" * 6 + "|"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="names of rows", choices=[entry.name for entry in PLAN + LONG])
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", help="write the numbers to this file as they come")
    parser.add_argument("overrides", nargs="*", help="fields of the recipes, after --: -- --grpo.max_steps=10")
    arguments = parser.parse_args()
    entries = PLAN
    if arguments.only:
        entries = [entry for entry in PLAN + LONG if entry.name in arguments.only]
    runs = list(product(entries, arguments.seeds))
    rows = []
    print(HEAD, flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        summaries = pool.map(lambda job: run(*job, arguments.threads, arguments.overrides), runs)
        for (entry, seed), summary in zip(runs, summaries, strict=True):
            rows.append(row_of(entry, summary) | {"seed": seed})
            print(show(rows[-1]), flush=True)
            if arguments.json:
                Path(arguments.json).write_text(json.dumps({"runs": rows}, indent=2) + "\n")
            if not arguments.overrides and not (entry.before and entry.overrides):
                record(entry, seed, arguments.threads, summary)


def record(entry: Entry, seed: int, threads: int, summary: dict):
    """Add a run to recipes/expected.json, instead of one with the same recipe, overrides, seed and thread count."""
    key = {"recipe": entry.recipe, "overrides": entry.overrides, "seed": seed, "threads": threads}
    results = {name: values for name, values in summary.items() if isinstance(values, dict) and name != "seconds"}
    run = key | {"environment": common.about(), "commit": common.commit(), "results": results}
    path = RECIPES / "expected.json"
    others = [other for other in json.loads(path.read_text()) if any(other[name] != key[name] for name in key)]
    runs = sorted([*others, run], key=lambda run: json.dumps([run[name] for name in key]))
    path.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


if __name__ == "__main__":
    main()
