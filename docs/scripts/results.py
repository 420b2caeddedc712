"""Write the tables in docs/results.md whose numbers are in recipes/expected.json and docs/curves.

python -m docs.scripts.make_pages    # after benchmarks/learning.py, grpo_step.py or tests.parity.trl_runs
"""

import json
import math
from itertools import chain

from benchmarks.learning import PLAN
from docs.scripts.it_learns import read, write_tables
from docs.scripts.picture import BLUES, DOCS, FAINT, INK, ORANGES, SOFT, Picture

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
# runs/sft: python train.py --stages=[sft] --output_dir=runs/sft --num_threads=1
LORA = [
    "--stages=[grpo]", "--model.config=null", "--model.path=runs/sft/checkpoint", "--adapter.r=16",
    "--adapter.target=[language, vision, merger]", "--grpo.learning_rate=1e-3",
]  # fmt: skip
OPTIONS = {  # {row: options of `benchmarks/learning.py --only grpo -- OPTIONS`}
    "grpo in bfloat16": ["--model.compute_dtype=bfloat16"],
    "LoRA (rank 16, learning rate 1e-3)": LORA,
    "LoRA on NF4": [*LORA, "--adapter.quantize=nf4"],
}
PARTS = ["step", "sampling", "reference", "forward", "backward", "update"]


def runs_of(name: str) -> list[dict]:
    """Return the recorded one-thread runs of a row in OPTIONS or benchmarks/learning.py."""
    expected = json.loads((DOCS.parent / "recipes" / "expected.json").read_text(encoding="utf-8"))
    plan = ("shapes.yaml", OPTIONS[name]) if name in OPTIONS else PLAN[name]
    same = [run for run in expected["runs"] if (run["recipe"], run["overrides"]) == plan]
    return [run for run in same if run["threads"] == 1]


def accuracy(values: dict[str, float]) -> float:
    return next(x for name, x in values.items() if "accuracy" in name and name.endswith("_sampled"))


def learning_rows() -> list[str]:
    """Return the table rows about algorithms: seeds, and the range of the accuracy after the last stage."""
    grpo = [accuracy(run["results"]["after_sft"]) for run in runs_of("grpo")]
    found = {"after SFT": (len(grpo), grpo)}
    for row, names in [*LEARNED.items(), *((row, [row]) for row in OPTIONS)]:
        runs = [run for name in names for run in runs_of(name)]
        last = [accuracy([*run["results"].values()][-1]) for run in runs]
        found[row] = len({run["seed"] for run in runs}), last
    return [f"| {row} | {n} | {min(x):.3f} to {max(x):.3f} |" for row, (n, x) in found.items()]


def speed_rows() -> list[str]:
    """Return the table rows about a GRPO step: CPU seconds, and TRL's relative to minivlmrl's, also per part."""
    rows = []
    files = "grpo_step", "grpo_step_512", "grpo_step_0_5b"
    for case in chain.from_iterable(read(file)["runs"] for file in files):
        ours, trl, installed = (case["sides"][side] for side in ("minivlmrl", "TRL", "TRL, as installed"))
        cells = [f"{case[name]}" for name in ("prompt_tokens", "prompts", "new_tokens")]
        cells += [f"{case['skipped']:.0%}", f"{ours['step']:.2f}", f"{trl['step']:.2f}"]
        cells += [f"{trl[part] / ours[part]:.1f}" for part in PARTS]
        rows.append(f"| {' | '.join([*cells, format(installed['step'] / ours['step'], '.1f')])} |")
    return rows


# {what TRL does: name in DESIGNS of tests/parity/trl_runs.py}
DESIGNS = {
    "head, norms, rewards and advantages in float32": "head, norms and rewards in float32",
    "a warm-up that begins with learning rate 0": "a warm-up that begins at 0",
    "no weight decay for biases and norms": "no decay of biases and norms",
    "completions shuffled across a rollout's steps": "completions shuffled over the steps",
    "division by the rollout's mean tokens per step": "tokens of an average step",
    "training on the newline after the end token": "newline after the answer",
    "a mean over micro-batch means": "means of micro-batches",
    "all seven": "all",
    "none of them": "",
}
TRAINERS = {"grpo": BLUES[1], "dpo": ORANGES[1], "sft": INK}


def weight_differences(kept: str) -> dict[str, list[float]]:
    """Return the largest difference of a weight after each step, {trainer: differences}."""
    return {run["trainer"]: run["weights"] for run in read("trl_runs")["runs"] if run.get("kept") == kept}


def trl_rows() -> list[str]:
    """Return the table rows about fifty steps of TRL: the largest weight difference after any step."""
    rows = []
    for row, design in DESIGNS.items():
        found = weight_differences(design)
        cells = [f"{max(found[kind]):.0e}".replace("e-0", "e-") if kind in found else "" for kind in TRAINERS]
        rows.append(f"| {row} | {' | '.join(cells)} |")
    return rows


def draw_trl_steps() -> str:
    """Draw the largest weight difference over the steps, with all designs of TRL (thin) and with none."""
    picture = Picture(710, 430, "Weights of TRL and minivlmrl over 50 steps")
    picture.text(70, 28, "Largest difference between a weight of TRL and ours", 16, INK, "start", bold=True)

    def height(exponent: float) -> float:
        return round(370 - 18.75 * (exponent + 17), 1)

    for exponent in range(-17, 0, 2):
        picture.line([(70, height(exponent)), (530, height(exponent))], FAINT)
        picture.text(62, height(exponent) + 4, f"1e{exponent}", 12, SOFT, "end")
    for step in (1, 10, 20, 30, 40, 50):
        picture.text(70 + 9.2 * step, 390, f"{step}", 12, SOFT)
    picture.text(300, 412, "optimizer steps", 12, SOFT)
    for label, kept, thick in (("TRL as it is", "all", 1), ("TRL with seven changes", "", 2.5)):
        top = 0.0
        for kind, differences in weight_differences(kept).items():
            points = [(70 + 9.2 * i, height(math.log10(x))) for i, x in enumerate(differences, 1)]
            picture.line(points, TRAINERS[kind], thick)
            top = top or points[-1][1]
        picture.text(542, top - 22, label, 12, INK, "start", bold=True)
        for number, (kind, color) in enumerate(TRAINERS.items()):
            picture.text(542, top - 4 + 16 * number, kind.upper(), 12, color, "start")
    return picture.svg()


TABLES = {"run": learning_rows, "tokens per prompt": speed_rows, "what TRL does": trl_rows}
PICTURES = {"images/trl_steps.svg": draw_trl_steps}


def page() -> str:
    """Return the page with new tables."""
    return write_tables(PAGE, TABLES)
