"""Train recipes/sums.yaml with several seeds and a control, and ask unrelated questions before and after training.

    python benchmarks/sums.py vlm work --seeds 0 1 --json docs/curves/sums.json    # half an hour a run on one core

`vlm` is a folder written by recipes/from_text_model.py. `work` keeps all outputs, and finished runs are not repeated.
In the control run, rewards are shuffled in every step.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from benchmarks.common import call, read_lines  # noqa: E402
from recipes import sums  # noqa: E402

SHUFFLED = ["--rewards={recipes/shuffled.py:shuffled: 1.0}", "--data.eval_rewards=[accuracy]"]
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
        if not out.with_suffix(".summary.json").exists():  # `evaluate` writes its summary last
            command = ["evaluate", f"--model={model}", f"--data={rows}", f"--out={out}", "--recipe=recipes/sums.yaml"]
            call([*command, "--num_threads=1", *["--sampling.max_new_tokens=48"] * (part == "questions")])
        for row, line in zip(read_lines(rows), read_lines(out), strict=True):
            [answer] = line["answers"]
            if part == "questions":
                text = answer["text"].removesuffix("<|im_end|>")
                found[row["problem"]] = {"answer": text, "right": bool(re.search(row["solution"], text))}
            else:
                correct[row["kind"]].append(answer["rewards"]["accuracy"])
    kinds = {kind: sum(values) / len(values) for kind, values in correct.items()}
    return {"kinds": kinds, "questions": found}


def main():
    parser = common.study_options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    model, work = options.model, options.work
    sums.main(work)
    rows = [{"problem": problem, "solution": solution} for problem, solution in QUESTIONS.items()]
    (work / "sums_questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"--data.{kind}_file={work / f'sums_{kind}.jsonl'}" for kind in ("train", "eval")]

    def runs() -> Iterator[dict]:
        for seed in options.seeds:
            folder = work / f"grpo_{seed}"
            run = common.train("sums", model, folder, f"--seed={seed}", *files)
            yield {"run": "grpo", "seed": seed, **run, **ask(folder / "checkpoint", work, folder.name)}
        seed = options.seeds[0]
        run = common.train("sums", model, work / f"shuffled_rewards_{seed}", f"--seed={seed}", *files, *SHUFFLED)
        yield {"run": "shuffled rewards", "seed": seed, **run}

    common.collect(options.json, runs(), before=ask(model, work, "before"))


if __name__ == "__main__":
    main()
