"""Write handwritten digits from scikit-learn as images and JSON Lines files, for recipes/digits.yaml.

python recipes/digits.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import PIL.Image

HELD_OUT = 297  # evaluation rows
DEMONSTRATIONS = 500  # SFT rows
WRONG = 0.2  # fraction of demonstrations with a random label
SIZE = 42  # image side in pixels: 9 image tokens with 14 x 14 pixels


def write_digits(folder: str | Path):
    """Write images, eval.jsonl, train.jsonl and demonstrations.jsonl."""
    from sklearn.datasets import load_digits

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    pictures, digits = load_digits(return_X_y=True)
    rows = []
    for number, (levels, digit) in enumerate(zip(pictures, digits, strict=True)):
        # scikit-learn: 0 to 16, white on black
        gray_levels = 255 - levels.reshape(8, 8) * 15
        picture = PIL.Image.fromarray(gray_levels.astype(np.uint8))
        picture.resize((SIZE, SIZE), PIL.Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "problem": "Which digit?", "solution": str(digit)})
    rng.shuffle(rows)
    demonstrations = []
    for row in rows[HELD_OUT : HELD_OUT + DEMONSTRATIONS]:
        shown_digit = row["solution"] if rng.random() >= WRONG else str(rng.randrange(10))
        completion = f"<think>it is {shown_digit}</think><answer>{shown_digit}</answer>"
        demonstrations.append({**row, "completion": completion})
    files = {"eval": rows[:HELD_OUT], "train": rows[HELD_OUT:], "demonstrations": demonstrations}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


if __name__ == "__main__":
    write_digits(sys.argv[1])
