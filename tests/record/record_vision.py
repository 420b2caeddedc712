"""Records what transformers' torchvision processors and qwen-vl-utils make of images and videos.

Neither is installed by the tests, so test_image.py and test_video.py hold ours against tests/recorded/vision_*.json:

    pip install --target /tmp/oracles --no-deps torchvision==0.28.0
    pip install --target /tmp/utils --no-deps qwen-vl-utils==0.0.14
    python tests/record/record_vision.py torchvision /tmp/oracles tests/recorded/vision_torchvision_0.28.0.json
    python tests/record/record_vision.py qwen_vl_utils /tmp/oracles /tmp/utils \\
        tests/recorded/vision_qwen_vl_utils_0.0.14.json
    python tests/record/record_vision.py qwen3_vl /tmp/oracles tests/recorded/vision_qwen3_vl_5.23.0.json

(requests and packaging have to be there; transformers brings them). The cases are drawn here from a seed, and the
tests draw the same ones. On torch for the CPU torchvision only imports once its compiled operators are declared, which
is done below; resizing and normalising use none of them.
"""

import hashlib
import io
import json
import random
import sys
import types
from itertools import islice
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import PIL.Image
import torch


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
        patch, least = rng.choice((7, 14)), rng.choice((784, 3136, 100352))
        settings = {"patch_size": patch, "min_pixels": least, "max_pixels": least * rng.choice((1, 9, 40))}
        if seed % 4 == 3:
            settings["image_mean"], settings["image_std"] = [0.5, 0.25, 0.125], [0.3, 0.7, 1.0]
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
        options, token = {}, 28 * 28
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


def import_torchvision(folder):
    """Import it and transformers; returns their versions."""
    sys.path.insert(0, folder)
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision
    import transformers

    torchvision.library_of_the_operators = library  # they vanish with it
    return {"transformers": transformers.__version__, "torchvision": torchvision.__version__}


def record_torchvision():
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    images, videos = [], []
    for image, settings in image_cases():
        made = Qwen2VLImageProcessor(**settings)(images=[image], return_tensors="pt")
        images.append([made["image_grid_thw"][0].tolist(), digest(made["pixel_values"])])
    for frames, settings, bounds in video_cases():
        processor = Qwen2VLVideoProcessor(**settings, **bounds, cap_pixels_per_frame=False)
        made = processor(videos=[frames], return_tensors="pt")
        videos.append([made["video_grid_thw"][0].tolist(), digest(made["pixel_values_videos"])])
    return {"images": images, "videos": videos}


def record_qwen3_vl():
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
    from transformers.video_utils import VideoMetadata

    stock, samples, films = Qwen3VLVideoProcessor(), [], []
    for total, video_fps, options in islice(sampling_cases(), 500):
        metadata = VideoMetadata(total_num_frames=total, fps=video_fps)
        indices = stock.sample_frames(metadata, fps=options.get("fps")).tolist()
        samples.append([len(indices), digest(indices)])
    sizes = [
        attempt(smart_resize, nframes, height, width, 2, 32, least, most)
        for nframes, height, width, least, most in film_size_cases()
    ]
    for frames, rate, size in film_cases():
        metadata = [{"total_num_frames": len(frames), "fps": float(rate), "duration": len(frames) / rate}]
        made = Qwen3VLVideoProcessor(size=size, cap_pixels_per_frame=False)(
            videos=[frames], video_metadata=metadata, return_metadata=True, return_tensors="pt"
        )
        indices = [int(index) for index in made["video_metadata"][0].frames_indices]
        films.append([indices, made["video_grid_thw"][0].tolist(), digest(made["pixel_values_videos"])])
    return {"sampling": samples, "sizes": sizes, "films": films}


def attempt(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except (ValueError, AssertionError):
        return None


def record_qwen_vl_utils(utils_folder):
    sys.path.insert(0, utils_folder)
    sys.modules.setdefault("requests", types.ModuleType("requests"))  # only for URLs
    from qwen_vl_utils import vision_process as utils

    decord = sys.modules["decord"] = MagicMock()
    reader = decord.VideoReader.return_value  # of any length; it only notes which frames it is asked for
    reader.get_batch.return_value.asnumpy.return_value = np.zeros((1, 1, 1, 3))
    samples, frame_sizes = [], []
    for total, video_fps, options in sampling_cases():
        reader.__len__.return_value, reader.get_avg_fps.return_value = total, video_fps
        made = attempt(utils._read_video_decord, {"video": "", **options})
        [asked] = reader.get_batch.call_args.args if made else [None]
        samples.append(made and [len(asked), digest(asked), made[-1]])

    def note_size(video, size, **_):
        frame_sizes[-1] = size
        return torch.zeros(1)

    utils.transforms.functional.resize = note_size
    for nframes, height, width, options in frame_size_cases():
        video = torch.zeros(1, 1, 1, 1).expand(nframes, 3, height, width)
        utils.get_video_reader_backend = lambda: "case"
        utils.VIDEO_READER_BACKENDS["case"] = lambda ele, read=(video, {}, 1.0): read
        frame_sizes.append(None)
        attempt(utils.fetch_video, {"video": "case", **options})
    return {"sampling": samples, "frame_sizes": frame_sizes}


if __name__ == "__main__":
    name, folder, *folders, path = sys.argv[1:]
    recorded = {"command": f"python tests/record/record_vision.py {' '.join(sys.argv[1:])}"}
    recorded |= import_torchvision(folder)
    recorded |= {"torchvision": record_torchvision, "qwen_vl_utils": record_qwen_vl_utils, "qwen3_vl": record_qwen3_vl}[
        name
    ](*folders)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(recorded, file, separators=(",", ":"))
        file.write("\n")
