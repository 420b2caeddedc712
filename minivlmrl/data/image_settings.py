"""preprocessor_config.json <-> ImageProcessor."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import PIL.Image
import torch

from minivlmrl.config.parsing import build, error_context
from minivlmrl.data.image import ImageProcessor, look_up, resize_frames, smart_resize


def torch_resize_frames(
    frames: Iterable[PIL.Image.Image], height: int, width: int, mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """Resize RGB frames and normalise them, see image.resize_frames, with torch's kernel.

    Gives the values of transformers' torchvision processor to the bit. The default, pil, is the
    filter that checkpoints were trained with; docs/numerical_parity.md says how far they differ.
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


RESIZE = {"pil": resize_frames, "torch": torch_resize_frames}  # by data.resize_backend

Count = Annotated[int, ">= 1"]
# an image of the largest is 2 GB as patches while they are made
MinPixels = Annotated[int, f"[1, {2**25}]; patches of a larger image would fill the memory"]
Mean = Annotated[float, "(-1e6, 1e6)"]
Std = Annotated[float, "[1e-6, 1e6)"]  # float32 has to divide by it
# Fast resizes with torch. So does transformers 5's plain name where torchvision is; not here.
ProcessorType = Literal[
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorPil",
    "Qwen2VLImageProcessorFast",
    "Qwen2_5_VLImageProcessor",
]
# settings that change pixels and have one value here, as we write them
FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "resample": 3,  # bicubic
}
# fields of ImageProcessor with the same name
SAME_NAMES = ("image_mean", "image_std", "patch_size", "temporal_patch_size", "merge_size")


@dataclass
class Size:
    """Bounds of the area of an image, by their newer and older names, and what must be null."""

    shortest_edge: MinPixels | None = None
    longest_edge: Count | None = None
    min_pixels: MinPixels | None = None
    max_pixels: Count | None = None
    height: None = None
    width: None = None
    max_height: None = None
    max_width: None = None


@dataclass
class ImageSettings:
    """What a preprocessor_config.json may say; null is missing."""

    image_processor_type: ProcessorType | None = None
    size: Size | None = None
    do_resize: Literal[True] | None = None
    do_rescale: Literal[True] | None = None
    do_normalize: Literal[True] | None = None
    do_convert_rgb: Literal[True] | None = None
    rescale_factor: Literal[1 / 255] | None = None  # pyright: ignore[reportInvalidTypeForm]  # a float
    resample: Literal[3] | None = None
    do_center_crop: Literal[False] | None = None
    do_pad: Literal[False] | None = None
    patch_size: Count | None = None
    temporal_patch_size: Count | None = None
    merge_size: Count | None = None
    min_pixels: MinPixels | None = None
    max_pixels: Count | None = None
    image_mean: tuple[Mean, Mean, Mean] | None = None
    image_std: tuple[Std, Std, Std] | None = None


def read_image_processor(
    content: dict, where: str, min_pixels: int | None = None, max_pixels: int | None = None
):
    """Make an image processor of a preprocessor_config.json (ValueError names a wrong field).

    Pixel bounds override the file's; those that neither gives are of transformers' class.
    """
    settings = build(ImageSettings, content, where, json=True)
    size = settings.size or Size()
    low = min_pixels or settings.min_pixels or size.shortest_edge or size.min_pixels or 56 * 56
    high = (
        max_pixels or settings.max_pixels or size.longest_edge or size.max_pixels or 28 * 28 * 1280
    )
    given = {name: value for name, value in patch_settings(settings).items() if value is not None}
    resize = RESIZE["torch" if str(settings.image_processor_type).endswith("Fast") else "pil"]
    processor = ImageProcessor(**given, min_pixels=low, max_pixels=high, resize=resize)
    with error_context("data" if min_pixels or max_pixels else where):
        # bounds that an image of one token does not keep, no image does
        side = processor.factor
        smart_resize(side, side, side, low, high)
    return processor


def patch_settings(holder: ImageSettings | ImageProcessor) -> dict:
    """Return mean, deviation and sizes of patches."""
    return {name: getattr(holder, name) for name in SAME_NAMES}


def write_image_processor(processor: ImageProcessor) -> dict:
    """Make a preprocessor_config.json that transformers 4.49 to 5.23 and vLLM read."""
    low = processor.min_pixels
    high = processor.max_pixels
    suffix = "Fast" if processor.resize is RESIZE["torch"] else ""
    return {
        "image_processor_type": f"Qwen2VLImageProcessor{suffix}",
        **FIXED,
        **patch_settings(processor),
        "min_pixels": low,
        "max_pixels": high,
        "size": {"shortest_edge": low, "longest_edge": high},  # the newer name of the same
    }
