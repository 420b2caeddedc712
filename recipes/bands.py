"""Rows that a model answers right now and then, as a new file of rows: a curriculum by pass rate.

    python -m minivlmrl generate --model FOLDER --data rows.jsonl --num_generations 8
    python recipes/bands.py generate.jsonl 0.1 0.9 > band.jsonl

Rows whose answers earn between 0.1 and 0.9 on average stay as they were; a group of answers that all earn the same
teaches nothing. They must be JSON lines. Leave band.jsonl in their folder: pictures are named relative to it.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from minivlmrl.rewards.text import accuracy


def reward(answer: dict, solution) -> float | None:
    """1.0 for a right answer; None: nothing can say. Of what `evaluate` wrote: answer["rewards"]["iou"]"""
    return accuracy([answer["answer"]], [solution])[0]


def rows_in_band(lines: list[dict], low: float, high: float) -> Iterator[str]:
    """Yield the lines of rows whose mean reward is from low to high (ValueError: they are of no JSON lines)."""
    files = {}  # of rows: their lines
    for line in lines:
        rewards = [reward(answer, line["solution"]) for answer in line["answers"]]
        if None in rewards or not low <= statistics.mean(rewards) <= high:
            continue
        path, _, number = line["where"].rpartition(":")
        if not path.endswith(".jsonl"):
            raise ValueError(f"{line['where']}: rows must be in a .jsonl, one a line")
        if path not in files:
            files[path] = Path(path).read_text("utf-8").split("\n")
        yield files[path][int(number) - 1]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("python recipes/bands.py FILE LOW HIGH > band.jsonl, where FILE is what generate wrote")
    answers, low, high = sys.argv[1:]
    lines = Path(answers).read_text("utf-8").splitlines()
    for row in rows_in_band([json.loads(line) for line in lines], float(low), float(high)):
        print(row)
