"""Select rows by pass rate, as a curriculum: keep rows that a model answers correctly only sometimes.

    python -m minivlmrl generate --model FOLDER --data rows.jsonl --num_generations 8
    python recipes/bands.py generate.jsonl 0.1 0.9 > band.jsonl

Rows whose answers have a mean reward between 0.1 and 0.9 are kept unchanged. The remaining rows help little, because a
group whose rewards are all equal does not contribute a gradient. The rows must be in a .jsonl file. Write band.jsonl to
the same folder, because image paths are relative to the file.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from minivlmrl.rewards.text import accuracy


def reward(answer: dict, solution) -> float | None:
    """Return 1.0 for a correct answer, or None if it cannot be judged.

    For a file that `evaluate` wrote, you can also return a recorded reward, for example
    answer["rewards"]["iou"].
    """
    return accuracy([answer["answer"]], [solution])[0]


def rows_in_band(lines: list[dict], low: float, high: float) -> Iterator[str]:
    """Yield the lines for all rows whose mean reward lies between low and high.

    Raises:
        ValueError: if the rows are not in a .jsonl file.
    """
    files = {}  # path of a rows file -> its lines
    for line in lines:
        rewards = [reward(answer, line["solution"]) for answer in line["answers"]]
        if None in rewards or not low <= statistics.mean(rewards) <= high:
            continue
        path, _, number = line["where"].rpartition(":")
        if not path.endswith(".jsonl"):
            raise ValueError(f"{line['where']}: the rows must be in a .jsonl file, one per line; convert the file")
        if path not in files:
            files[path] = Path(path).read_text("utf-8").split("\n")
        yield files[path][int(number) - 1]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python recipes/bands.py FILE LOW HIGH > band.jsonl, where FILE was written by generate")
    answers, low, high = sys.argv[1:]
    lines = Path(answers).read_text("utf-8").splitlines()
    for row in rows_in_band([json.loads(line) for line in lines], float(low), float(high)):
        print(row)
