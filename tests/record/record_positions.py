"""Random prompts with images and videos, whose positions in transformers are recorded.

Positions in videos follow the rule in transformers 4.49 to 4.51, which Qwen and vLLM also use. Later versions of
transformers differ (see rope.py), so test_rope.py compares our positions with
tests/recorded/positions_transformers_4.51.3.json. In commit 64c7842, a script in this file printed these positions
with transformers 4.51.3; version 4.49.0 printed the same positions.
"""

import hashlib
import json
import random

import torch

from tests.helpers import tiny

COUNT = 300


def cases():
    """Yield COUNT prompts as (input_ids, kinds, grids, seconds), with random sequences of text, images and videos."""
    rng = random.Random(0)
    for _ in range(COUNT):
        ids = [rng.randint(3, 280)]
        kinds = []
        grids = []
        seconds = []
        for _ in range(rng.randint(0, 4)):
            kind = rng.choice(["image", "video", "video"])
            t = 1 if kind == "image" else rng.randint(1, 9)
            h = 2 * rng.randint(1, 5)
            w = 2 * rng.randint(1, 5)
            token = tiny.IMAGE if kind == "image" else tiny.VIDEO
            ids += [tiny.VISION_START, *[token] * (t * h * w // 4), tiny.VISION_END]
            ids += [rng.randint(3, 280) for _ in range(rng.randint(0, 5))]
            kinds.append(kind)
            grids.append((t, h, w))
            # seconds per temporal patch (two frames), for sampled rates such as 2, 1.5 or 0.37 frames per second
            seconds.append(2 / rng.choice([2.0, 1.0, 1.5, 4.0, 30 / 7, rng.uniform(0.2, 8)]))
        yield ids, kinds, grids, seconds


def digest(positions: torch.Tensor) -> str:
    return hashlib.sha256(json.dumps(positions.tolist()).encode()).hexdigest()[:16]
