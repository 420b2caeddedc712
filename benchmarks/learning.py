"""Train every algorithm on the built-in task with several seeds, and add the results to a file.

    python benchmarks/learning.py --jobs 2                         # everything, three seeds: half an hour on two cores
    python benchmarks/learning.py --only grpo dpo --seeds 0 --json learning.json
    python benchmarks/learning.py --only grpo --json short.json -- --grpo.max_steps=10    # with other options

A run is one call of train.py, by default on one thread, so results do not depend on the number of cores. Evaluations
are those of held-out images. A run that learns has no warnings (docs/metrics.md); `shuffled rewards` is a control that
must not learn.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402


def shapes(*options: str) -> tuple[str, list[str]]:
    return "shapes.yaml", [f"--{option}" for option in options]


SHUFFLED = {
    f"recipes/shuffled.py:shuffled(reward={name!r})": weight for name, weight in (("format", 0.5), ("accuracy", 1.0))
}
# {name: (recipe, options)}
PLAN = {
    "grpo": shapes(),
    **{name: shapes(f"grpo.loss_type={name}") for name in ("bnpo", "dr_grpo", "dapo", "sapo", "vespo", "rloo")},
    "luspo": shapes("grpo.loss_type=luspo", "grpo.importance_sampling_level=sequence"),
    "cispo": shapes("grpo.loss_type=cispo", "grpo.epsilon_high=5.0"),
    "gspo": shapes("grpo.importance_sampling_level=sequence"),
    "num_iterations 2": shapes("grpo.num_iterations=2"),
    "grpo, 8-bit AdamW": shapes("optimizer.name=adamw_8bit"),
    "shuffled rewards": shapes(f"rewards={json.dumps(SHUFFLED)}"),
    "tagless answers": shapes("data.answer_format=whole", "rewards={accuracy: 1.0}"),
    "ppo": ("shapes_ppo.yaml", []),
    "dpo": ("shapes_dpo.yaml", []),
    "mpo": ("shapes_mpo.yaml", []),
    "reward model, grpo": ("shapes_reward_model.yaml", []),
    "qwen3-vl, grpo": shapes("model.config=recipes/shapes_qwen3_vl_model.json"),
    "qwen3.5, grpo": shapes("model.config=recipes/shapes_qwen3_5_model.json"),
}


def run(name: str, seed: int, threads: int, more: list[str]) -> dict:
    """Train an entry of PLAN; return the evaluations and warnings of the run."""
    recipe, overrides = PLAN[name]
    key = {"recipe": recipe, "overrides": overrides + more, "seed": seed, "threads": threads}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", f"recipes/{recipe}", *overrides, *more]
        command += [f"--seed={seed}", f"--output_dir={folder}", f"--num_threads={threads}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "summary.json").read_text())
        warnings = common.read_lines(Path(folder) / "warnings.jsonl")
    results = {stage: values for stage, values in summary.items() if isinstance(values, dict) and stage != "seconds"}
    about = {"environment": common.about(), "commit": common.commit()}
    return {**key, **about, "results": results, "warnings": warnings}


def record(run: dict, file: Path):
    """Add a run to a file, instead of one with the same recipe, overrides, seed and thread count."""

    def key(run: dict) -> str:
        return json.dumps([run[name] for name in ("recipe", "overrides", "seed", "threads")])

    recorded = json.loads(file.read_text()) if file.exists() else []
    runs = sorted([run, *(other for other in recorded if key(other) != key(run))], key=key)
    file.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=PLAN, default=[*PLAN], metavar="NAME")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path, default=ROOT / "recipes" / "expected.json")
    parser.add_argument("overrides", nargs="*", help="options of all runs, after --")
    arguments = parser.parse_args()
    pairs = list(product(arguments.only, arguments.seeds))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = pool.map(lambda pair: run(*pair, arguments.threads, arguments.overrides), pairs)
        for (name, seed), found in zip(pairs, runs, strict=True):
            record(found, arguments.json)
            print(f"{name}, seed {seed}: {found['results']}, warnings: {found['warnings'] or 'none'}", flush=True)


if __name__ == "__main__":
    main()
