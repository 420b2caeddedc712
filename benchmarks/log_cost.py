"""What writing completions.jsonl costs: its share of a run of the default recipe, and of the page at the end.

python benchmarks/log_cost.py [--grpo.max_steps=20 ...]
"""

import sys
import tempfile
import time
from pathlib import Path

from minivlmrl import train
from minivlmrl.run import results
from minivlmrl.run.completions import CompletionsLog


def timed(function, spent: dict[str, float], name: str):
    """The function, which adds its seconds to spent[name]."""

    def call(*arguments):
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin

    return call


def main(overrides: list[str]):
    """Train, and print the shares."""
    spent: dict[str, float] = {}
    CompletionsLog.step = timed(CompletionsLog.step, spent, "completions.jsonl")
    results.write_page = timed(results.write_page, spent, "page.html")
    train.train = timed(train.train, spent, "training")
    with tempfile.TemporaryDirectory() as folder:
        recipe = str(Path(__file__).resolve().parents[1] / "recipes" / "shapes.yaml")
        train.main([recipe, f"--output_dir={folder}", "--data.eval_rows=8", *overrides])
    training = spent.pop("training")
    for name, seconds in spent.items():
        print(f"{name}: {seconds:.3f} s, {seconds / training:.2%} of {training:.1f} s of training")


if __name__ == "__main__":
    main(sys.argv[1:])
