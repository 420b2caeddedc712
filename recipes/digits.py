"""Write scikit-learn's handwritten digits as a user's rows: pictures, demonstrations, training and held-out rows.

python recipes/digits.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import PIL.Image

# SIZE in pixels: 9 image tokens of 14 x 14
HELD_OUT = 297
DEMONSTRATIONS = 500
WRONG = 0.2
SIZE = 42


def write_digits(folder: str | Path):
    """Write the files that recipes/digits.yaml reads; a fifth of the demonstrations says a digit drawn at random."""
    from sklearn.datasets import load_digits

    folder, draw = Path(folder), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    pictures, digits = load_digits(return_X_y=True)
    rows = []
    for number, (pixels, digit) in enumerate(zip(pictures, digits, strict=True)):
        picture = PIL.Image.fromarray((255 - pixels.reshape(8, 8) * 15).astype(np.uint8))
        picture.resize((SIZE, SIZE), PIL.Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "problem": "Which digit?", "solution": str(digit)})
    draw.shuffle(rows)
    demonstrations = []
    for row in rows[HELD_OUT : HELD_OUT + DEMONSTRATIONS]:
        said = row["solution"] if draw.random() >= WRONG else str(draw.randrange(10))
        demonstrations.append(row | {"completion": f"<think>it is {said}</think><answer>{said}</answer>"})
    files = {"eval": rows[:HELD_OUT], "train": rows[HELD_OUT:], "demonstrations": demonstrations}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


if __name__ == "__main__":
    write_digits(sys.argv[1])
