"""Compute pass@k and majority voting from a file that `generate` or `evaluate` wrote, with several answers per row.

    python -m minivlmrl generate --model FOLDER --data test.jsonl --num_generations 8
    python recipes/pass_at_k.py generate.jsonl

pass@k is the probability that at least one of k answers, sampled without replacement, is correct: 1 - C(n - c, k) /
C(n, k) for c correct answers among n (Chen et al. 2021, arXiv 2107.03374). majority is 1 if the most frequent answer is
correct; if several answers are equally frequent, the first one counts. Rows without a solution are ignored.
"""

import json
import math
import statistics
import sys
from collections import defaultdict

from minivlmrl.rewards.text import accuracy, normalize


def judge(answer: dict, solution) -> float | None:
    """Return 1.0 for a correct answer, or None if it cannot be judged.

    For boxes, you can return float(answer["rewards"]["iou"] >= 0.5) instead.
    """
    return accuracy([answer["answer"]], [solution])[0]


def summarise(lines: list[dict]) -> dict[str, float]:
    """Compute pass@k for k = 1, 2, 4, ... and majority, averaged over rows."""
    values = defaultdict(list)
    for line in lines:
        judged = [judge(answer, line["solution"]) for answer in line["answers"]]
        if None in judged:
            continue
        n = len(judged)
        wrong = judged.count(0.0)
        for k in (2**i for i in range(n.bit_length())):
            values[f"pass@{k}"].append(1 - math.comb(wrong, k) / math.comb(n, k))
        texts = [normalize(answer["answer"] or "") for answer in line["answers"]]
        most_frequent = max(texts, key=texts.count)
        values["majority"].append(judged[texts.index(most_frequent)])
    return {name: statistics.mean(row_values) for name, row_values in values.items()}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        summary = summarise([json.loads(line) for line in file])
    for name, value in summary.items():
        print(f"{name:<12}{value:.3f}")
