"""Does a policy look? Curves of `data.eval_blind`: the default run, and one whose prompts guess the answer.

    python benchmarks/eval_blind.py              # two runs of a minute or two; prints their curves and sentences

In the second run a prompt for GRPO, and a held-out one, ends with a guess, "What is it? red square", which is right 8
times in 10; demonstrations have none.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from minivlmrl.data.conversations import conversation  # noqa: E402
from minivlmrl.rows import Dataset, Row  # noqa: E402
from minivlmrl.tasks import shapes  # noqa: E402

RIGHT = 0.8  # share of guesses


class Guessed(Sequence):
    """Rows of the task with a guess in the prompt."""

    def __init__(self, rows: Dataset):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row, rng = self.rows[index], random.Random(f"guess/{self.rows.seed}/{index}")
        label = row.columns["solution"]
        if rng.random() >= RIGHT:
            label = rng.choice([other for other in shapes.LABELS if other != label])
        return replace(row, messages=conversation(f"{shapes.PROBLEM} {label}", {"image": 1}))


def datasets(data, seed: int) -> tuple[dict[str, Dataset], Dataset]:
    training, held_out = shapes.datasets(data, seed)
    return training | {"prompts": Guessed(training["prompts"])}, Guessed(held_out)


TASK = replace(shapes.TASK, datasets=datasets)


def run(*overrides: str) -> list[dict]:
    """Evaluations and sentences of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "recipes" / "shapes.yaml"), *overrides]
        command += [f"--output_dir={folder}", "--num_threads=1", "--data.eval_blind=true", "--eval_steps=20"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        files = [Path(folder) / f"{name}.jsonl" for name in ("evaluations", "warnings")]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def main():
    for name, overrides in (("shapes", []), ("with a guess", [f"--data.task={__file__}:TASK"])):
        evaluations, warnings = run(*overrides)
        print(f"\n{name}\n| stage | step | sampled | grey | swapped |\n" + "|---" * 5 + "|")
        for line in evaluations:
            numbers = " | ".join(f"{line[key]:.3f}" for key in ("sampled", "grey", "swapped"))
            print(f"| {line['stage']} | {line['step']} | {numbers} |")
        print(
            "\n".join(f"{line['stage']} step {line['step']}: {line['warning']}" for line in warnings) or "no sentence"
        )


if __name__ == "__main__":
    main()
