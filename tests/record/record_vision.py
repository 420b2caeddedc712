"""Random images and videos, with recorded results of transformers' torchvision processors and of qwen-vl-utils.

The tests install neither package, but compare our results with tests/recorded/vision_*.json. In commit 64c7842, a
script in this file wrote these results with torchvision 0.28.0, qwen-vl-utils 0.0.14 and transformers 5.23.0.
"""

import hashlib
import io
import json
import random
from pathlib import Path

import numpy as np
import PIL.Image


def digest(values) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a tensor, or of any value that JSON can represent."""
    content = values.numpy().tobytes() if hasattr(values, "numpy") else json.dumps(values).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def noise(mode, size, seed=0):
    """Return an image with random pixels in any PIL mode; a palette has one transparent color."""
    rng = np.random.RandomState(seed)
    pixels = rng.randint(0, 256, (size[1], size[0], len(PIL.Image.new(mode, (1, 1)).getbands())), dtype=np.uint8)
    if mode == "P":
        image = PIL.Image.fromarray(pixels[:, :, 0] // 64, "L").convert("P")
        image.putpalette(rng.randint(0, 256, 4 * 3, dtype=np.uint8).tobytes())
        image.info["transparency"] = 2
        return image
    return PIL.Image.frombytes(mode, size, pixels.tobytes())


def encoded(image, kind):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def recorded(name):
    """Return the recorded results of "torchvision_0.28.0" or "qwen_vl_utils_0.0.14"."""
    return json.loads((Path(__file__).parents[1] / "recorded" / f"vision_{name}.json").read_text())


def image_cases():
    """Yield random images as (image, processor settings): all modes, sizes from 9 to 700 pixels."""
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
    """Yield random videos as (uint8 frames (T, H, W, 3), processor settings, bounds of the pixels in a frame)."""
    for seed in range(24):
        rng = random.Random(seed)
        least = rng.choice((784, 3136, 20000))
        bounds = {"min_pixels": least, "max_pixels": least * rng.choice((1, 2, 9))}
        shape = (rng.randint(1, 9), rng.randint(9, 200), rng.randint(9, 200), 3)
        frames = np.random.RandomState(seed).randint(0, 256, shape, dtype=np.uint8)
        yield frames, {"patch_size": rng.choice((7, 14))}, bounds


def sampling_cases():
    """Yield random cases of frame sampling as (total_frames, video_fps, options)."""
    rng = random.Random(1)
    for _ in range(2000):
        total = int(2 ** rng.uniform(0, 17))
        rates = 1, 10, 23.976023976023978, 24, 25, 29.97002997002997, 30, 60, 120, rng.uniform(0.1, 240)
        video_fps = rng.choice(rates)
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
    """Yield random cases of resized frames as (frames, height, width, options)."""
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
    """Yield random videos as (uint8 frames (T, H, W, 3), frames per second of the file, processor settings)."""
    for seed, (count, rate) in enumerate([(3, 5), (5, 30), (16, 8), (33, 10), (40, 24), (45, 12), (61, 30), (75, 60)]):
        rng = random.Random(seed)
        shape = (count, 4 * rng.randint(5, 40), 4 * rng.randint(5, 40), 3)
        frames = np.random.RandomState(seed).randint(0, 256, shape, dtype=np.uint8)
        least = 1024 * rng.choice((4, 16, 64))
        yield frames, rate, {"shortest_edge": least, "longest_edge": least * rng.choice((1, 2, 9))}


def film_size_cases():
    """Yield random sizes of videos as (frames, height, width, minimum and maximum of all pixels)."""
    rng = random.Random(3)
    for _ in range(500):
        height = int(2 ** rng.uniform(4, 12))
        width = max(16, int(height * 2 ** rng.uniform(-4, 4)))
        least = 1024 * rng.choice((4, 128, 1024))
        yield rng.randint(2, 768), height, width, least, least * rng.choice((1, 6, 600, 24576))


def attempt(function, *arguments, **options):
    """Return the result of a function, or None if the function raises ValueError or AssertionError."""
    try:
        return function(*arguments, **options)
    except (ValueError, AssertionError):
        return None
