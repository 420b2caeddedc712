"""Convert preprocessor_config.json to an ImageProcessor and back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import PIL.Image
import torch

from minivlmrl.config.options import ImageOptions, VideoOptions
from minivlmrl.config.parsing import build, check_values
from minivlmrl.config.types import Count, MinPixels, Plain
from minivlmrl.data.image import ImageProcessor, look_up, resize_frames, smart_resize
from minivlmrl.errors import UserError, error_context
from minivlmrl.json_files import read_json


def torch_resize_frames(
    frames: Iterable[PIL.Image.Image], height: int, width: int, mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """Resize and normalize RGB frames with torch, bitwise equal to transformers' torchvision processor."""
    resized = []
    for frame in frames:
        # resize uint8 pixels, as transformers does: torch rounds them after resizing each dimension
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
        pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        resized.append(pixels[0].permute(1, 2, 0).numpy())
    scale = np.float32(1 / (1 / 255))  # as in transformers, which divides mean and std by rescale_factor = 1 / 255
    gray_levels = np.arange(256, dtype=np.float32)
    return look_up((gray_levels - mean * scale) / (std * scale), np.stack(resized))


# {library: resize function}
RESIZE = {"pil": resize_frames, "torch": torch_resize_frames}

Mean = Annotated[float, "(-1e6, 1e6)"]
Std = Annotated[float, "[1e-6, 1e6)"]  # image_std is a divisor, so not 0
# transformers class names; names that end in "Fast" select resizing with torch, other names with Pillow
ProcessorType = Literal[
    "Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil", "Qwen2VLImageProcessorFast", "Qwen2_5_VLImageProcessor"
]
# {image processor setting: only supported value}
FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "resample": 3,  # bicubic
}
# {option in data.video: its name in video_preprocessor_config.json}
SAMPLING = {"fps": "fps", "nframes": "num_frames", "min_frames": "min_frames", "max_frames": "max_frames"}
FPS = 2.0  # default frames per second
# default bounds on the frame area, in tokens of 28 * 28 pixels
MIN_FRAME_TOKENS, MAX_FRAME_TOKENS = 128, 768


@dataclass
class Size:
    """Bounds on the image area in pixels, under their old and new names in transformers.

    A fixed image size is not supported.
    """

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
    """Fields read from preprocessor_config.json."""

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


def read_image_processor(content: dict, where: str, min_pixels: int | None = None, max_pixels: int | None = None):
    """Build an ImageProcessor from preprocessor_config.json.

    Args:
        min_pixels, max_pixels: override the image area bounds in the file; defaults as in transformers.
    """
    settings = build(ImageSettings, content, where, json=True)
    size = settings.size or Size()
    low = min_pixels or settings.min_pixels or size.shortest_edge or size.min_pixels or 56 * 56
    high = max_pixels or settings.max_pixels or size.longest_edge or size.max_pixels or 28 * 28 * 1280
    given = {name: value for name, value in patch_settings(settings).items() if value is not None}
    processor = ImageProcessor(
        **given,
        min_pixels=low,
        max_pixels=high,
        resize=RESIZE["torch" if str(settings.image_processor_type).endswith("Fast") else "pil"],
    )
    with error_context("data" if min_pixels or max_pixels else where):
        # smart_resize raises UserError if max_pixels is less than min_pixels or the area of one token
        side = processor.factor
        smart_resize(side, side, side, low, high)
    return processor


def patch_settings(holder: ImageSettings | ImageProcessor) -> dict:
    """Return settings with the same name in preprocessor_config.json and ImageProcessor."""
    return {
        name: getattr(holder, name)
        for name in ("image_mean", "image_std", "patch_size", "temporal_patch_size", "merge_size")
    }


def write_image_processor(processor: ImageProcessor, options: dict[str, int]) -> dict:
    """Build a preprocessor_config.json for transformers 4.49 to 5.23 and vLLM.

    Args:
        options: recipe section data.image. A fixed size is written as min_pixels and max_pixels, because
            preprocessor_config.json has no fixed size.
    """
    low, high = area_bounds(processor, options, (processor.min_pixels, processor.max_pixels))
    suffix = "Fast" if processor.resize is RESIZE["torch"] else ""
    return {
        "image_processor_type": f"Qwen2VLImageProcessor{suffix}",
        **FIXED,
        **patch_settings(processor),
        "min_pixels": low,
        "max_pixels": high,
        "size": {"shortest_edge": low, "longest_edge": high},  # in newer transformers: min_pixels and max_pixels
    }


def area_bounds(processor: ImageProcessor, options: dict[str, Any], bounds: tuple[int, int]) -> tuple[int, int]:
    """Return (min_pixels, max_pixels) from `options`, else from `bounds`."""
    if "resized_height" in options:
        height, width = smart_resize(
            options["resized_height"],
            options["resized_width"],
            processor.factor,
            processor.min_pixels,
            processor.max_pixels,
        )
        return height * width, height * width + 1  # max_pixels exceeds the area, so rounding cannot shrink the image
    return options.get("min_pixels", bounds[0]), options.get("max_pixels", bounds[1])


def write_video_processor(processor: ImageProcessor, options: dict[str, float]) -> dict:
    """Build a video_preprocessor_config.json from data.video; {} if there are no options."""
    if not options:
        return {}
    area = processor.factor**2
    low, high = area_bounds(processor, options, (MIN_FRAME_TOKENS * area, MAX_FRAME_TOKENS * area))
    content = {
        "video_processor_type": "Qwen2VLVideoProcessor",  # resizes frames to the same size as video.frame_size()
        **FIXED,
        **patch_settings(processor),
        "size": {"shortest_edge": low, "longest_edge": high},
        **write_sampling(options),
    }
    if "total_pixels" in options:  # divide total_pixels by 0.9, because transformers uses 90 % of max_video_tokens
        content |= {"cap_pixels_per_frame": True, "max_video_tokens": round(options["total_pixels"] / 0.9 / area)}
    return content


def write_sampling(options: dict[str, float]) -> dict:
    """Convert frame sampling options to their names in video_preprocessor_config.json."""
    given: dict[str, Any] = {SAMPLING[name]: value for name, value in options.items() if name in SAMPLING}
    if "num_frames" in given:
        given["fps"] = None  # without this null, transformers adds a default fps, which conflicts with num_frames
    return given and {"do_sample_frames": True, "fps": FPS, **given}


def check_options(kind: str, options: Mapping[str, float | None]) -> dict[str, Plain]:
    """Check image or video options such as max_pixels, and drop those with value None."""
    return check_values(ImageOptions if kind == "image" else VideoOptions, options, f"options of the {kind}")


def read_sampling(settings: dict) -> dict[str, float]:
    """Return frame sampling options such as fps from video_preprocessor_config.json."""
    return check_options("video", {name: settings.get(key) for name, key in SAMPLING.items()})


def image_settings(folder: Path) -> tuple[Path, dict]:
    """Read the image settings in a model folder: (file, settings).

    Transformers 5 writes processor_config.json, older versions preprocessor_config.json.
    """
    file = folder / "preprocessor_config.json"
    newer = folder / "processor_config.json"
    if file.is_file() or not newer.is_file():
        return file, read_json(file)
    settings = read_json(newer).get("image_processor")
    if not isinstance(settings, dict):
        raise UserError(
            f"{newer} does not have the field image_processor, an object with patch_size. Use the "
            "files that belong to the model."
        )
    return newer, settings


def video_settings(folder: Path) -> tuple[Path, dict]:
    newer = folder / "processor_config.json"
    file = folder / "video_preprocessor_config.json"
    settings = read_json(newer).get("video_processor") if newer.is_file() else None
    if isinstance(settings, dict):
        return newer, settings
    return (file, read_json(file)) if file.is_file() else image_settings(folder)
