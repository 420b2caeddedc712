"""Write rows for recipes/look.yaml: sums of handwritten digits, such as "<image>+<image>=?".

    python recipes/look.py FOLDER
    python recipes/look.py FOLDER --signs    # also differences, and the larger of two; --aloud repeats the digits first

The digits are scikit-learn's 1,797 pictures. look_demonstrations.jsonl has 480 problems about 64 labeled pictures.
look_train.jsonl has sums of two from 1,500 pictures, whose labels are otherwise unknown. look_eval.jsonl has sums and
single digits from the other 297 pictures. Its last rows are controls: the same sums with blank pictures, and with the
next row's pictures. With --signs, training rows have no difference, which is held out; with --aloud, a demonstration is
the problem in numbers, then the answer on a line of its own.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import PIL.Image

SIZE = 28  # image side in pixels: one token with 14 x 14 patches
HELD_OUT = 297  # evaluation pictures
# problems to demonstrate; {} is a picture
TEMPLATES = "{}=?", "{}+{}=?", "{}+NUMBER=?", "{}+{}=?"
SIGNS = {"digit": "{}=?", "sum": "{}+{}=?", "difference": "{}-{}=?", "larger": "max({},{})=?"}


def picture(levels: np.ndarray) -> PIL.Image.Image:
    """Draw dark on light; levels: (64,), 0 to 16."""
    gray = (255 - levels.reshape(8, 8) * 15).astype(np.uint8)
    return PIL.Image.fromarray(gray).resize((SIZE, SIZE), PIL.Image.Resampling.BICUBIC)


def main(folder: Path, num_labeled: int = 64, signs: bool = False, aloud: bool = False):
    """Write pictures and three JSON Lines files; num_labeled: pictures in demonstrations."""
    from sklearn.datasets import load_digits

    rng = random.Random(0)
    (folder / "digits").mkdir(parents=True, exist_ok=True)
    levels, labels = load_digits(return_X_y=True)
    for number, level in enumerate(levels):
        picture(level).save(folder / f"digits/{number}.png")
    picture(np.zeros(64)).save(folder / "digits/blank.png")
    order = rng.sample(range(len(labels)), len(labels))
    held_out, known = order[:HELD_OUT], order[HELD_OUT:]

    def row(template: str, chosen: list[int], answer: str = "solution", **columns) -> dict:
        numbers = template.removesuffix("=?").format(*[labels[number] for number in chosen])  # such as 7+5
        solution = str(eval(numbers))
        return {
            "images": [f"digits/{number}.png" for number in chosen],
            "problem": template.format(*["<image>"] * len(chosen)),
            answer: f"{numbers}\n{solution}" if aloud and answer == "completion" else solution,
            **columns,
        }

    def write(name: str, rows: list[dict]):
        text = "".join(json.dumps(line) + "\n" for line in rows)
        (folder / f"look_{name}.jsonl").write_text(text, encoding="utf-8")

    templates = [*SIGNS.values()] if signs else TEMPLATES
    demonstrations = []
    for number in range(480):
        template = templates[number % len(templates)].replace("NUMBER", str(rng.randint(1, 9)))
        chosen = rng.sample(known[:num_labeled], template.count("{}"))
        demonstrations.append(row(template, chosen, "completion"))
    write("demonstrations", demonstrations)
    rewarded = [SIGNS["sum"], SIGNS["larger"]] if signs else [SIGNS["sum"]]
    write("train", [row(rewarded[i % len(rewarded)], rng.sample(known, 2)) for i in range(2000)])

    sums = [row("{}+{}=?", rng.sample(held_out, 2), kind="sum") for _ in range(320)]
    digits = [row("{}=?", [number], kind="digit") for number in held_out[:128]]
    blank = [{**line, "images": ["digits/blank.png"] * 2, "kind": "blank"} for line in sums[:64]]
    exchanged = [{**sums[i], "images": sums[i + 1]["images"], "kind": "exchanged"} for i in range(64)]
    others = [
        row(SIGNS[kind], rng.sample(held_out, 2), kind=kind) for kind in ("difference", "larger") for _ in range(160)
    ]
    write("eval", sums + digits + (others if signs else blank + exchanged))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--signs", action="store_true")
    parser.add_argument("--aloud", action="store_true")
    options = parser.parse_args()
    main(options.folder, signs=options.signs, aloud=options.aloud)
