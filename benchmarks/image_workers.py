"""How long a step waits for its images: JPEGs of a megapixel, with and without threads that make the next prompts.

python benchmarks/image_workers.py [PROMPTS] [SECONDS]

A step has PROMPTS (8) rows and is a pause of SECONDS (1.0), in which the CPU is free, as where a GPU computes.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import torch

from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.image import ImageProcessor
from minivlmrl.rows import Processor
from minivlmrl.run.batches import Batches, DataSection
from minivlmrl.scale.ranks import World
from minivlmrl.tasks import shapes

IMAGES, STEPS, SIZE = 16, 8, (1152, 864)


def write_photos(folder: Path) -> FileDataset:
    """Write noisy JPEGs of a megapixel and rows that ask about them."""
    noise = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = noise.integers(0, 256, (SIZE[1] // 8, SIZE[0] // 8, 3), dtype=np.uint8)
        PIL.Image.fromarray(coarse).resize(SIZE, PIL.Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")
    rows = [json.dumps({"image": f"{number}.jpg", "problem": "What?"}) for number in range(IMAGES)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return FileDataset(folder / "rows.jsonl")


def main(prompts: int = 8, seconds: float = 1.0):
    """Print the share of each step that is waiting."""
    with tempfile.TemporaryDirectory() as folder:
        rows = write_photos(Path(folder))
        for workers in (0, 1, 2, 4):
            algorithm = SimpleNamespace(
                config=SimpleNamespace(prompts_per_step=prompts), stage="grpo", steps_per_rollout=1,
                run=SimpleNamespace(seed=0, data=DataSection(image_workers=workers)),
                world=World(0, 1, torch.device("cpu")), processor=Processor(shapes.tokenizer(), ImageProcessor()),
            )  # fmt: skip
            batches, waited = Batches(rows, algorithm), []
            for _ in range(STEPS):
                begin = time.perf_counter()
                next(batches)
                waited.append(time.perf_counter() - begin)
                time.sleep(seconds)
            mean = sum(waited[1:]) / (STEPS - 1)  # nothing is ahead of the first step
            print(f"{workers} workers: a step waits {mean:.3f} s, {mean / (mean + seconds):.1%} of it", flush=True)


if __name__ == "__main__":
    main(*(kind(text) for kind, text in zip((int, float), sys.argv[1:], strict=False)))
