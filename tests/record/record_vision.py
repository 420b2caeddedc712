"""Images and videos, drawn from seeds, of which transformers' torchvision processors and qwen-vl-utils were asked.

Neither is installed by the tests, so test_image.py and test_video.py hold ours against tests/recorded/vision_*.json,
which this file's script of commit 64c7842 wrote with torchvision 0.28.0, qwen-vl-utils 0.0.14 and transformers 5.23.0.
"""

import hashlib
import io
import json
import random
from pathlib import Path

import numpy as np
import PIL.Image


def digest(values) -> str:
    """Of a tensor, or of anything that JSON can write."""
    content = values.numpy().tobytes() if hasattr(values, "numpy") else json.dumps(values).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def noise(mode, size, seed=0):
    """A random picture of any mode; palettes get one see-through colour."""
    rng = np.random.RandomState(seed)
    channels = len(PIL.Image.new(mode, (1, 1)).getbands())
    pixels = rng.randint(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    if mode == "P":
        image = PIL.Image.fromarray(pixels[:, :, 0] // 64, "L").convert("P")
        image.putpalette(rng.randint(0, 256, 4 * 3, dtype=np.uint8).tobytes())
        image.info["transparency"] = 2
        return image
    return PIL.Image.frombytes(mode, size, pixels.tobytes())


def encoded(image, kind):
    """The bytes of an image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def recorded(name):
    """What was recorded of "torchvision_0.28.0" or "qwen_vl_utils_0.0.14"."""
    return json.loads((Path(__file__).parents[1] / "recorded" / f"vision_{name}.json").read_text())


def image_cases():
    """(image, settings of the processor): every mode, sizes from 9 to 700 pixels, up- and downscaled."""
    for seed in range(48):
        rng = random.Random(seed)
        mode = ("RGB", "L", "RGBA", "P", "LA", "1")[seed % 6]
        patch = rng.choice((7, 14))
        least = rng.choice((784, 3136, 100352))
        settings = {"patch_size": patch, "min_pixels": least, "max_pixels": least * rng.choice((1, 9, 40))}
        if seed % 4 == 3:
            settings["image_mean"] = [0.5, 0.25, 0.125]
            settings["image_std"] = [0.3, 0.7, 1.0]
        top = rng.choice((60, 300, 700))
        yield noise(mode, (rng.randint(9, top), rng.randint(9, top)), seed), settings


def video_cases():
    """(frames (T, H, W, 3) uint8, settings of the processor, bounds of a frame)."""
    for seed in range(24):
        rng = random.Random(seed)
        least = rng.choice((784, 3136, 20000))
        bounds = {"min_pixels": least, "max_pixels": least * rng.choice((1, 2, 9))}
        shape = (rng.randint(1, 9), rng.randint(9, 200), rng.randint(9, 200), 3)
        frames = np.random.RandomState(seed).randint(0, 256, shape, dtype=np.uint8)
        yield frames, {"patch_size": rng.choice((7, 14))}, bounds


def resize_cases():
    """(height, width, factor, min_pixels, max_pixels)."""
    rng = random.Random(0)
    for _ in range(2000):
        height = int(2 ** (rng.uniform(4, 12) if rng.random() < 0.9 else rng.uniform(0, 4)))
        width = max(1, int(height * 2 ** rng.choice((rng.uniform(-2, 2), rng.uniform(-8, 8)))))
        factor = 2 * rng.choice((7, 14, 16))
        least = rng.choice((factor**2, 3136, 50176))
        yield height, width, factor, least, max(factor**2, least * rng.choice((1, 3, 40, 4096)))


def sampling_cases():
    """(total_frames, video_fps, options)."""
    rng = random.Random(1)
    for _ in range(2000):
        total = int(2 ** rng.uniform(0, 17))
        video_fps = rng.choice(
            (1, 10, 23.976023976023978, 24, 25, 29.97002997002997, 30, 60, 120, rng.uniform(0.1, 240))
        )
        options = {}
        if rng.random() < 0.3:
            options["nframes"] = rng.randint(1, min(2 * total, 1000))
        else:
            draw = {"fps": rng.uniform(0.05, 40), "min_frames": rng.randint(1, 64), "max_frames": rng.randint(1, 900)}
            options = {name: value for name, value in draw.items() if rng.random() < 0.5}
        for name in ("video_start", "video_end"):
            if rng.random() < 0.25:
                options[name] = rng.uniform(0, 1.2 * total / video_fps)
        yield total, video_fps, options


def frame_size_cases():
    """(frames, height, width, options)."""
    rng = random.Random(2)
    for _ in range(2000):
        height = int(2 ** rng.uniform(4, 12))
        width = max(16, int(height * 2 ** rng.uniform(-4, 4)))
        options = {}
        token = 28 * 28
        if rng.random() < 0.4:
            options["min_pixels"] = rng.choice((4, 16, 64, 128, 256)) * token
        if rng.random() < 0.4:
            options["max_pixels"] = rng.choice((4, 64, 256, 400, 768, 1000)) * token
        if rng.random() < 0.4:
            options["total_pixels"] = rng.randint(100, 50_000) * token
        if rng.random() < 0.1:
            options |= {"resized_height": rng.randint(20, 900), "resized_width": rng.randint(20, 900)}
        yield 2 * rng.randint(1, 384), height, width, options


def film_cases():
    """(frames (T, H, W, 3) uint8, frames a second of their file, settings of the processor)."""
    for seed, (count, rate) in enumerate([(3, 5), (5, 30), (16, 8), (33, 10), (40, 24), (45, 12), (61, 30), (75, 60)]):
        rng = random.Random(seed)
        shape = (count, 4 * rng.randint(5, 40), 4 * rng.randint(5, 40), 3)
        frames = np.random.RandomState(seed).randint(0, 256, shape, dtype=np.uint8)
        least = 1024 * rng.choice((4, 16, 64))
        yield frames, rate, {"shortest_edge": least, "longest_edge": least * rng.choice((1, 2, 9))}


def film_size_cases():
    """(frames, height, width, least and most pixels of all frames)."""
    rng = random.Random(3)
    for _ in range(500):
        height = int(2 ** rng.uniform(4, 12))
        width = max(16, int(height * 2 ** rng.uniform(-4, 4)))
        least = 1024 * rng.choice((4, 128, 1024))
        yield rng.randint(2, 768), height, width, least, least * rng.choice((1, 6, 600, 24576))


def attempt(function, *arguments, **options):
    """What a function returns, None where it refuses."""
    try:
        return function(*arguments, **options)
    except (ValueError, AssertionError):
        return None
