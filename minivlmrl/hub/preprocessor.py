"""preprocessor_config.json <-> ImageProcessor."""

from collections.abc import Iterable
from dataclasses import make_dataclass
from typing import Annotated, Literal

import numpy as np
import PIL.Image
import torch

from minivlmrl.hub.recipe_values import build, naming
from minivlmrl.image import ImageProcessor, look_up, resize_frames, smart_resize


def torch_resize_frames(
    frames: Iterable[PIL.Image.Image], height: int, width: int, mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """Resize RGB frames and normalise them, see image.resize_frames, with torch's kernel.

    Gives the values of transformers' torchvision processor to the bit. The default, pil, is the
    filter that checkpoints were trained with; docs/exact.md says how far they differ.
    """
    size = (height, width)
    resized = []
    for frame in frames:
        # uint8 in and out: the kernel rounds between its two passes, as it would not in float32
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
        pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
        resized.append(pixels[0].permute(1, 2, 0).numpy())
    scale = np.float32(1 / (1 / 255))  # transformers' way to write 255, folded into mean and std
    grey_levels = np.arange(256, dtype=np.float32)
    return look_up((grey_levels - mean * scale) / (std * scale), np.stack(resized))


RESIZE = {"pil": resize_frames, "torch": torch_resize_frames}  # by data.resize
MAX_MIN_PIXELS = 2**25  # an image of so many is 2 GB as patches while they are made

Count = Annotated[int, ">= 1"]
Mean = Annotated[float, "(-1e6, 1e6)"]
Std = Annotated[float, "[1e-6, 1e6)"]  # float32 has to divide by it
# Fast resizes with torch. So does transformers 5's plain name where torchvision is; not here.
TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil", "Qwen2VLImageProcessorFast")
TYPES += ("Qwen2_5_VLImageProcessor",)
# settings that change pixels and have one value here: those that we write, and two more
FIXED = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
FIXED |= {"rescale_factor": 1 / 255, "resample": 3}  # bicubic
# as in ImageProcessor
SAME_NAMES = ("image_mean", "image_std", "patch_size", "temporal_patch_size", "merge_size")
KEYS = {"image_processor_type": Literal[TYPES], "size": dict}
KEYS |= {name: Literal[value] for name, value in FIXED.items()}
KEYS |= dict.fromkeys(("do_center_crop", "do_pad"), Literal[False])
KEYS |= dict.fromkeys((*SAME_NAMES[2:], "min_pixels", "max_pixels"), Count)
KEYS |= {"image_mean": tuple[Mean, Mean, Mean], "image_std": tuple[Std, Std, Std]}
# null is missing
Settings = make_dataclass("Settings", [(name, hint | None, None) for name, hint in KEYS.items()])


def read_image_processor(
    content: dict, where: str, min_pixels: int | None = None, max_pixels: int | None = None
):
    """Make an image processor of a preprocessor_config.json (ValueError names a wrong field).

    Pixel bounds override the file's; those that neither gives are of transformers' class.
    """
    settings = build(Settings, content, where, json=True)
    size = {name: value for name, value in (settings.size or {}).items() if value is not None}
    if not set(size) <= {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise ValueError(f"{where}: size is {size!r}, it must be shortest_edge and longest_edge")
    bounds = []
    for name, override, edge, default in (
        ("min_pixels", min_pixels, "shortest_edge", 56 * 56),
        ("max_pixels", max_pixels, "longest_edge", 28 * 28 * 1280),
    ):
        values = override, getattr(settings, name), size.get(edge), size.get(name), default
        bounds.append(next(value for value in values if value is not None))
    same = {name: value for name in SAME_NAMES if (value := getattr(settings, name)) is not None}
    resize = RESIZE["torch" if str(settings.image_processor_type).endswith("Fast") else "pil"]
    processor = ImageProcessor(**same, min_pixels=bounds[0], max_pixels=bounds[1], resize=resize)
    with naming(where if min_pixels is None and max_pixels is None else "data"):
        # no image of one token could keep other areas
        smart_resize(*[processor.factor] * 3, *bounds)
        if bounds[0] > MAX_MIN_PIXELS:
            cure = "patches of an image would fill the memory"
            raise ValueError(f"min_pixels {bounds[0]} is over {MAX_MIN_PIXELS}; {cure}")
    return processor


def write_image_processor(processor: ImageProcessor) -> dict:
    """Make a preprocessor_config.json that transformers 4.49 to 5.23 and vLLM read."""
    least, most = processor.min_pixels, processor.max_pixels
    fast = "Fast" if processor.resize is RESIZE["torch"] else ""
    return {
        "image_processor_type": f"Qwen2VLImageProcessor{fast}",
        **FIXED,
        **{name: getattr(processor, name) for name in SAME_NAMES},
        **{"min_pixels": least, "max_pixels": most},
        "size": {"shortest_edge": least, "longest_edge": most},  # the newer name of the same
    }
