"""Write arithmetic problems for recipes/sums.yaml: sums_train.jsonl, sums_eval.jsonl and sums_new.jsonl.

    python recipes/sums.py FOLDER

sums_new.jsonl has two kinds of problems without training rows. No problem occurs twice.
"""

import argparse
import json
import random
from pathlib import Path

# {kind: (problem template, number ranges, function for the solution)}
KINDS = {
    "three numbers": ("What is {} + {} + {}?", [(11, 99)] * 3, lambda a, b, c: a + b + c),
    "difference": ("What is {} - {}?", [(300, 900), (101, 299)], lambda a, b: a - b),
    "pens": ("A pen costs {} cents. How many cents do {} pens cost?", [(12, 60), (3, 9)], lambda a, b: a * b),
    "product and sum": ("What is {} * {} + {}?", [(4, 20), (3, 9), (3, 40)], lambda a, b, c: a * b + c),
    "product": ("What is {} * {}?", [(12, 99), (3, 9)], lambda a, b: a * b),
    "minutes": ("How many minutes are {} hours and {} minutes?", [(2, 9), (3, 58)], lambda a, b: 60 * a + b),
}
TRAINED = list(KINDS)[:4]


def main(folder: Path):
    rng, written = random.Random(0), set()
    for name, kinds, count in (("eval", TRAINED, 256), ("new", list(KINDS)[4:], 128), ("train", TRAINED, 1000)):
        rows = []
        while len(rows) < count:
            kind = kinds[len(rows) % len(kinds)]
            problem, ranges, solve = KINDS[kind]
            numbers = [rng.randint(*bounds) for bounds in ranges]
            problem = f"{problem.format(*numbers)} Answer with the number only."
            if problem not in written:
                rows.append({"problem": problem, "solution": str(solve(*numbers)), "kind": kind})
                written.add(problem)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"sums_{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
