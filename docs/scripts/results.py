"""Write the tables in docs/results.md whose numbers are in recipes/expected.json and docs/curves.

python -m docs.scripts.make_pages    # after benchmarks/learning.py or grpo_step.py
"""

import json

from benchmarks.learning import PLAN
from docs.scripts.it_learns import read, write_tables
from docs.scripts.picture import DOCS

PAGE = DOCS / "results.md"
LOSSES = ["bnpo", "dapo", "dr_grpo", "luspo", "cispo", "vespo", "sapo", "rloo", "gspo"]
LEARNED = {  # {row: runs in benchmarks/learning.py}
    "control: [random rewards](../recipes/shuffled.py)": ["shuffled rewards"],
    "grpo": ["grpo"],
    ", ".join(LOSSES): LOSSES,
    "num_iterations 2": ["num_iterations 2"],
    "grpo, 8-bit AdamW": ["grpo, 8-bit AdamW"],
    "answers without tags": ["tagless answers"],
    "ppo": ["ppo"],
    "dpo": ["dpo"],
    "mpo": ["mpo"],
    "reward model, then grpo": ["reward model, grpo"],
    "Qwen3-VL": ["qwen3-vl, grpo"],
    "Qwen3.5": ["qwen3.5, grpo"],
}
NO_LOGS = [
    "| grpo in bfloat16 | 3 | 0.883 to 0.934 (log not kept) |",
    "| LoRA (rank 16, learning rate 1e-3) | 3 | 0.898 to 0.934 (log not kept) |",
    "| LoRA on NF4 | 3 | 0.887 to 0.914 (log not kept) |",
]
PARTS = ["step", "sampling", "reference", "forward", "backward", "update"]


def runs_of(name: str) -> list[dict]:
    """Return the recorded one-thread runs of a row in benchmarks/learning.py."""
    [entry] = [entry for entry in PLAN if entry.name == name]
    expected = json.loads((DOCS.parent / "recipes" / "expected.json").read_text(encoding="utf-8"))
    same = [run for run in expected if (run["recipe"], run["overrides"]) == (entry.recipe, entry.overrides)]
    return [run for run in same if run["threads"] == 1]


def accuracy(values: dict[str, float]) -> float:
    return next(x for name, x in values.items() if "accuracy" in name and name.endswith("_sampled"))


def learning_rows() -> list[str]:
    """Return the table rows about algorithms: seeds, and the range of the accuracy after the last stage."""
    grpo = [accuracy(run["results"]["after_sft"]) for run in runs_of("grpo")]
    found = {"after SFT": (len(grpo), grpo)}
    for row, names in LEARNED.items():
        runs = [run for name in names for run in runs_of(name)]
        last = [accuracy([*run["results"].values()][-1]) for run in runs]
        found[row] = len({run["seed"] for run in runs}), last
    return [f"| {row} | {n} | {min(x):.3f} to {max(x):.3f} |" for row, (n, x) in found.items()] + NO_LOGS


def speed_rows() -> list[str]:
    """Return the table rows about a GRPO step: CPU seconds, and TRL's relative to minivlmrl's, also per part."""
    rows = []
    for case in read("grpo_step")["cases"]:
        ours, trl, installed = (case["sides"][side] for side in ("minivlmrl", "TRL", "TRL, as installed"))
        cells = [f"{case[name]}" for name in ("prompt_tokens", "prompts", "new_tokens")]
        cells += [f"{case['skipped']:.0%}", f"{ours['step']:.2f}", f"{trl['step']:.2f}"]
        cells += [f"{trl[part] / ours[part]:.1f}" for part in PARTS]
        rows.append(f"| {' | '.join([*cells, format(installed['step'] / ours['step'], '.1f')])} |")
    return rows


TABLES = {"run": learning_rows, "tokens per prompt": speed_rows}


def page() -> str:
    """Return the page with new tables."""
    return write_tables(PAGE, TABLES)
