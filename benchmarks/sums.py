"""Train recipes/sums.yaml with several seeds and a control, and ask unrelated questions before and after training.

    python benchmarks/sums.py vlm work --seeds 0 1 --json docs/curves/sums.json    # half an hour a run on one core

`vlm` is a folder written by recipes/from_text_model.py. `work` keeps all outputs, and finished runs are not repeated.
Each seed has a control run, in which rewards are shuffled in every step.
"""

import json
import re
import sys
from collections import defaultdict
from functools import partial
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from recipes import sums  # noqa: E402

# {run: options}
RUNS = {
    "grpo": [],
    "shuffled rewards": ["--rewards={recipes/shuffled.py:shuffled: 1.0}", "--data.eval_rewards=[accuracy]"],
}
# {question: regular expression for a correct answer}, without arithmetic, chosen before the first run
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What color do you get if you mix blue and yellow?": "[Gg]reen",
    "Which planet is the largest in the solar system?": "Jupiter",
    "Write a Python function that returns the square of a number.": r"def \w+\(",
    "How do you say 'good morning' in Spanish?": "[Bb]uenos",
    "What is the opposite of hot?": "[Cc]old",
    "Which keyword defines a function in Python?": r"\bdef\b",
    "What is the chemical formula of water?": "H2O|H₂O",
    "How many legs does a spider have?": r"[Ee]ight|\b8\b",
    "Who wrote Romeo and Juliet?": "Shakespeare",
}


def ask(model: Path, work: Path, name: str) -> dict:
    """Answer held-out rows, new kinds of rows and QUESTIONS greedily; output file names start with `name`."""
    found = {}
    correct = defaultdict(list)
    for part in ("eval", "new", "questions"):
        rows, out = work / f"sums_{part}.jsonl", work / f"{name}_{part}.jsonl"
        longer = ["--sampling.max_new_tokens=48"] if part == "questions" else []
        common.evaluate(model, rows, out, "--recipe=recipes/sums.yaml", *longer)
        for row, line in zip(common.read_lines(rows), common.read_lines(out), strict=True):
            [answer] = line["answers"]
            if part == "questions":
                text = answer["text"].removesuffix("<|im_end|>")
                found[row["problem"]] = {"answer": text, "right": bool(re.search(row["solution"], text))}
            else:
                correct[row["kind"]].append(answer["rewards"]["accuracy"])
    kinds = {kind: sum(values) / len(values) for kind, values in correct.items()}
    return {"kinds": kinds, "questions": found}


def train(model: Path, work: Path, run: str, seed: int) -> dict:
    """Train, and answer with the trained model."""
    folder = work / f"{run.replace(' ', '_')}_{seed}"
    options = [f"--seed={seed}", f"--model.path={model}", *common.data_files(work, "sums"), *RUNS[run]]
    found = common.train("sums", folder, *options)
    return {**found, **ask(folder / "checkpoint", work, folder.name)}


def main():
    options = common.study_options(__doc__, "model", "work", seeds=range(5)).parse_args()
    model, work = options.model, options.work
    work.mkdir(parents=True, exist_ok=True)
    sums.main(work)
    rows = [{"problem": problem, "solution": solution} for problem, solution in QUESTIONS.items()]
    (work / "sums_questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [{"run": run, "seed": seed} for seed, run in product(options.seeds, RUNS)]
    common.study(options.json, keys, partial(train, model, work), before=ask(model, work, "before"))


if __name__ == "__main__":
    main()
