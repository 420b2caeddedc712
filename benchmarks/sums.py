"""Train recipes/sums.yaml with several seeds and a control, and ask unrelated questions before and after training.

    python benchmarks/sums.py vlm work --seeds 0 1 --json docs/curves/sums.json    # half an hour a run on one core

`vlm` is a folder written by recipes/from_text_model.py. `work` keeps all outputs, and finished runs are not repeated.
In the control run, rewards are shuffled in every step.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import common  # noqa: E402
from recipes import sums  # noqa: E402

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


def call(command: list[str]) -> dict:
    """Run a minivlmrl command on one thread; return CPU seconds, and peak memory over all commands so far."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "minivlmrl", *command], cwd=ROOT, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": round(seconds), "peak_gib": round(after.ru_maxrss / 2**20, 1)}


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def train(model: Path, work: Path, folder: Path, seed: int, options: list[str]) -> dict:
    """Train a model unless its folder is complete; return curves and cost."""
    if not (folder / "run.json").exists():
        files = [f"--data.{name}_file={work / f'sums_{name}.jsonl'}" for name in ("train", "eval")]
        command = ["train", "recipes/sums.yaml", f"--model.path={model}", f"--output_dir={folder}", f"--seed={seed}"]
        cost = call([*command, "--num_threads=1", *files, *options])
        (folder / "run.json").write_text(json.dumps(cost))
    evaluations = {line["step"]: line for line in read_lines(folder / "evaluations.jsonl")}
    metrics = read_lines(folder / "metrics.jsonl")
    return {
        "steps": list(evaluations),
        **{way: [line[f"eval/accuracy_{way}"] for line in evaluations.values()] for way in ("sampled", "greedy")},
        "reward": [line["rewards/accuracy/mean"] for line in metrics if "rewards/accuracy/mean" in line],
        "length": [line["completions/mean_length"] for line in metrics],
        **json.loads((folder / "run.json").read_text()),
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    model, work = options.model.resolve(), options.work.resolve()
    sums.main(work)
    rows = [{"problem": problem, "solution": solution} for problem, solution in QUESTIONS.items()]
    (work / "sums_questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = {**common.about(), "commit": common.commit(), "before": ask(model, work, "before"), "runs": []}
    for seed in options.seeds:
        for name, changes in RUNS.items():
            if name != "grpo" and seed != options.seeds[0]:
                continue
            folder = work / f"{name.replace(' ', '_')}_{seed}"
            run = {"run": name, "seed": seed, **train(model, work, folder, seed, changes)}
            if name == "grpo":
                run |= ask(folder / "checkpoint", work, folder.name)
            results["runs"].append(run)
            options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
