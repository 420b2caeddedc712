"""Train every algorithm on the built-in task with several seeds, and add the results to a file.

    python benchmarks/learning.py --json recipes/expected.json    # everything, three seeds: an hour on one core
    python benchmarks/learning.py --only grpo dpo --seeds 0 --json learning.json
    python benchmarks/learning.py --only grpo --json short.json -- --grpo.max_steps=10    # with other options

A run has one thread, so results do not depend on the number of cores, and runs in the file are not repeated.
Evaluations are those of held-out images. A run that learns has no warnings (docs/metrics.md); `shuffled rewards` is a
control that must not learn.
"""

import json
import sys
import tempfile
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


def train(recipe: str, overrides: list[str], seed: int, threads: int) -> dict:
    """Train a recipe; return the evaluations and warnings of the run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [*overrides, f"--seed={seed}", f"--output_dir={folder}", f"--num_threads={threads}"]
        common.call(["train", f"recipes/{recipe}", *options])
        summary = common.read(folder / "summary.json")
        warnings = common.read_lines(folder / "warnings.jsonl")
    results = {stage: values for stage, values in summary.items() if isinstance(values, dict) and stage != "seconds"}
    return {"environment": common.provenance(), "results": results, "warnings": warnings}


def main():
    parser = common.study_options(__doc__, arms=PLAN, seeds=range(3))
    parser.add_argument("overrides", nargs="*", help="options of all runs, after --")
    options = parser.parse_args()
    keys = []
    for name, seed in product(options.only, options.seeds):
        recipe, overrides = PLAN[name]
        keys.append({"recipe": recipe, "overrides": overrides + options.overrides, "seed": seed, "threads": 1})
    common.study(options.json, keys, train)


if __name__ == "__main__":
    main()
