"""Write rows for recipes/two_steps.yaml: two-step arithmetic problems, with few demonstrations.

    python recipes/two_steps.py FOLDER

two_steps_train.jsonl and two_steps_eval.jsonl have different problems. two_steps_think.jsonl and
two_steps_direct.jsonl demonstrate a third set, with and without steps.
"""

import json
import random
import sys
from pathlib import Path

PENS = "{n} pens cost {a} cents each, and a cup costs {b} cents. How many cents do the pens and the cup cost?"
# (problem template, sign of the second step: + or -)
KINDS = [
    ("What is {a} * {n} + {b}?", 1),
    (PENS, 1),
    ("You have {b} cents and buy {n} pens for {a} cents each. How many cents are left?", -1),
]


def problem(rng: random.Random, kind: int) -> tuple[str, str, str]:
    """Return a problem, its two written steps and its solution."""
    text, sign = KINDS[kind]
    a, n = rng.randint(11, 29), rng.randint(3, 9)
    b = rng.randint(11, 99) if sign > 0 else rng.randint(270, 500)
    product = a * n
    first = f"{a} * {n} = {product}"
    if sign > 0:
        return text.format(a=a, n=n, b=b), f"{first}. {product} + {b} = {product + b}.", str(product + b)
    return text.format(a=a, n=n, b=b), f"{first}. {b} - {product} = {b - product}.", str(b - product)


def main(folder: Path):
    rng, written = random.Random(0), set()

    def write(name: str, lines: list[dict]):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"two_steps_{name}.jsonl").write_text(text, encoding="utf-8")

    def draw(count: int) -> list[tuple[str, str, str]]:
        drawn = []
        while len(drawn) < count:
            row = problem(rng, len(drawn) % len(KINDS))
            if row[0] not in written:
                drawn.append(row)
                written.add(row[0])
        return drawn

    demonstrated = draw(32)
    think = [f"<think>{steps}</think><answer>{solution}</answer>" for _, steps, solution in demonstrated]
    for name, answers in (("think", think), ("direct", [solution for _, _, solution in demonstrated])):
        pairs = zip(demonstrated, answers, strict=True)
        write(name, [{"problem": text, "completion": answer} for (text, _, _), answer in pairs])
    for name, count in (("eval", 96), ("train", 600)):
        write(name, [{"problem": text, "solution": solution} for text, _, solution in draw(count)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
