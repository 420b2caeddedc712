"""Check the labs of docs/course.md. Another seed draws other tests, so a teacher can keep some back.

python -m docs.exercises.labs 1 my_reward.py             # a reward that cannot be hacked
python -m docs.exercises.labs 2 curve.txt --seed=7       # write a curve with a bug of docs/museum.md ...
python -m docs.exercises.labs 2 curve.txt --seed=7 --answer=4  # ... and check its number
python -m docs.exercises.labs 3 FOLDER                   # a model that looks at pictures of another camera
python -m docs.exercises.labs 4 FOLDER --base=FOLDER     # adapters that learned, merged
"""

import argparse
import contextlib
import io
import math
import random
import runpy
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from numbers import Real
from pathlib import Path

import torch
from PIL import Image

import minimal
from docs.scripts.museum import EXHIBITS, changed

THOUGHTS = "I see it", "the picture shows a shape", "let me look again"
VISIBLE = (4, 5, 7)  # exhibits whose rewards look wrong
STEPS = 60  # of lab 2
ROWS = 64  # hidden rows
SMALL = 32  # lab 3: side of a picture, in pixels
RANK = 2  # lab 4


def attacks(solution: str, draw: random.Random) -> dict[str, str]:
    """Return answers that deserve less than the right one: {description: text}."""
    wrong = draw.choice([label for label in minimal.LABELS if label != solution])
    labels = draw.sample(minimal.LABELS, len(minimal.LABELS))
    form = "<think>{}</think><answer>{}</answer>".format
    return {
        "a wrong answer": form("I see it", wrong),
        "the solution only in <think>": form(solution, wrong),
        "all answers at once": form("I see it", ", ".join(labels)),
        "a wrong and then a right answer": form("I see it", wrong) + form("or", solution),
        "a right and then a wrong answer": form("I see it", solution) + form("or", wrong),
        "the right tags only in <think>": form(f"<answer>{solution}</answer>", wrong),
        "half of the solution": form("I see it", solution.split()[draw.randrange(2)]),
        "the solution and its opposite": form("I see it", f"{solution} or {wrong}"),
        "the solution without tags": solution,
        "text after </answer>": form("I see it", solution) + " I am sure.",
        "an answer that denies the solution": form("I see it", f"not {solution}"),
        "nothing": form("", ""),
        "a wrong answer, very long": form("I see it. " * draw.randint(50, 200), wrong),
        "an answer without a thought": form(" ", solution),
        "an answer with one thought many times": form("I see it. " * draw.randint(50, 200), solution),
    }


def read_reward(path: str) -> Callable[[str, str], float]:
    """Read `reward` from a file, and refuse what it returns unless it is a finite number."""
    names = runpy.run_path(path)
    minimal.require("reward" in names, f"{path} has no function reward(text, solution)")

    def checked(text: str, solution: str) -> float:
        value = names["reward"](text, solution)
        is_finite = isinstance(value, Real) and math.isfinite(value)
        message = f"{path}: reward returned {value!r}, which is not a finite number, for {text[:120]!r}"
        minimal.require(is_finite, message)
        return value

    return checked


def check_reward(path: str, seed: int, options: Namespace) -> Iterator[str]:
    """Compare rewards, reward(text, solution) -> float, of right answers in several spellings with those of attacks."""
    reward = read_reward(path)
    draw = random.Random(seed)
    found = {}  # {kind of answer: its first example}
    for solution in draw.sample(minimal.LABELS, 6):
        spellings = [solution, solution.upper(), f" {solution}. "]
        thoughts = draw.sample(THOUGHTS, len(spellings))
        answers = [
            f"<think>{thought}</think><answer>{text}</answer>"
            for thought, text in zip(thoughts, spellings, strict=True)
        ]
        earned = [reward(answer, solution) for answer in answers]
        right = max(earned)
        if min(earned) < right:
            text = spellings[earned.index(min(earned))]
            found.setdefault("spelling", f"the right answer earns {right} and, spelled {text!r}, {min(earned)}")
        for kind, text in attacks(solution, draw).items():
            if reward(text, solution) >= right:
                found.setdefault(kind, f"{kind} earns as much as the right answer {solution!r}: {text[:120]!r}")
    yield from found.values()


def check_curve(path: str, seed: int, options: Namespace) -> Iterator[str]:
    """Check the number of the bug."""
    if options.answer != bug(seed):
        yield f"it is another bug than number {options.answer}"


def bug(seed: int) -> int:
    """Draw an exhibit of the museum."""
    return random.Random(seed).choice(VISIBLE)


def write_curve(path: str, seed: int) -> str:
    """Write rewards of a training with a bug of the museum; return what to do next."""
    with open(path, "w", encoding="utf-8") as file:  # a wrong path ends before the training
        file.write(curve(changed(EXHIBITS[bug(seed) - 1]), seed))
    return (
        f"{path} is written. Next: compare it with what python minimal.py --max_steps={STEPS} --seed={seed} prints, "
        f"find its bug among {VISIBLE} of docs/museum.md, and add --answer=NUMBER to this command"
    )


def curve(names: dict, seed: int) -> str:
    """Train the built-in task with the functions of a changed minimal.py; return what it prints."""
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    train = {"max_steps": STEPS, "prompts_per_step": 16, "learning_rate": 3e-4, "warmup_steps": 5, "beta": 0.02}
    sampling = {"num_generations": 8, "max_new_tokens": 20, "reward": names["reward"], "stage": names["grpo"]}
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        names["make_folder"](folder)
        names["train_tiny"](names["load"](folder), Namespace(**train, **sampling))
    return printed.getvalue()


def hidden_rows(seed: int, side: int = 56) -> list[dict]:
    """Draw rows of the built-in task, whose pictures have this side, at random places on white."""
    random.seed(f"lab {seed}")
    rows = [minimal.draw_row() for _ in range(ROWS)]
    for row in rows:
        [image] = row["images"]
        place = random.randint(0, 56 - side), random.randint(0, 56 - side)
        row["images"] = [Image.new("RGB", (56, 56), "white")]
        row["images"][0].paste(image.resize((side, side)), place)
    return rows


def accuracy(folder: str, rows: list[dict], seed: int) -> float:
    """Return the accuracy of a model on hidden rows."""
    torch.manual_seed(seed)
    return minimal.accuracy(minimal.load(folder), rows)


def check_picture(path: str, seed: int, options: Namespace) -> Iterator[str]:
    """Compare the accuracy of a model with that of gray pictures."""
    rows = hidden_rows(seed, SMALL)
    seen = accuracy(path, rows, seed)
    blind = accuracy(path, [row | {"images": [Image.new("RGB", (56, 56), "gray")]} for row in rows], seed)
    if seen - blind < 0.5:
        yield f"accuracy {seen:.3f}, with gray pictures {blind:.3f}; the picture must add at least 0.5"
        file = Path(path, "lab3.png")
        rows[0]["images"][0].save(file)
        yield f"{file} is a hidden picture; the answer is {rows[0]['solution']}"


def check_adapters(path: str, seed: int, options: Namespace) -> Iterator[str]:
    """Check that a merged model is better than its base, and differs by matrices of rank RANK or less."""
    rows = hidden_rows(seed)
    before = accuracy(options.base, rows, seed)
    after = accuracy(path, rows, seed)
    if after - before < 0.15:
        yield f"accuracy {after:.3f}, before training {before:.3f}; it must rise by at least 0.15"
    base = minimal.load(options.base).state_dict()
    for name, weight in minimal.load(path).state_dict().items():
        change = weight - base[name]
        if change.any() and (change.dim() < 2 or torch.linalg.matrix_rank(change.flatten(1), rtol=1e-3) > RANK):
            yield f"{name} changed by a matrix of rank above {RANK}"


LABS = {1: check_reward, 2: check_curve, 3: check_picture, 4: check_adapters}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return exit status 1 for a lab that is not done."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m docs.exercises.labs", description=__doc__, formatter_class=raw)
    parser.add_argument("number", type=int, choices=LABS)
    parser.add_argument("path", help="your file or model folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answer", type=int, help="lab 2: number in docs/museum.md")
    parser.add_argument("--base", help="lab 4: model folder before training")
    options = parser.parse_args(arguments)
    if options.number == 4 and not options.base:
        parser.error("lab 4 needs --base=FOLDER, the model before training")
    try:
        if options.number == 2 and options.answer is None:
            print(write_curve(options.path, options.seed))
            return 0
        faults = list(LABS[options.number](options.path, options.seed, options))
    except (minimal.InputError, OSError) as error:
        faults = [str(error)]
    print("\n".join(f"not yet: {fault}" for fault in faults) or "pass")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
