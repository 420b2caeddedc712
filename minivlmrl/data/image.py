"""Convert images to normalized patches for the vision tower, bitwise equal to transformers.

Example: an image with 100 x 60 pixels (width x height) is resized to 112 x 56, and cut into 8 x 4 patches with 14 x 14
pixels. A patch has 3 colors x 2 identical frames x 14 x 14 normalized values. 2 x 2 patches become one image token, so
8 x 4 patches become 8 tokens.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from PIL.ExifTags import Base as ImageIFD
from PIL.Image import Image, Resampling
from torch import Tensor

from minivlmrl.errors import UserError

Grid = tuple[int, int, int]  # number of patches in time, height and width


def load_image(image: Image) -> Image:
    """Decode an opened image file as RGB, rotated according to its EXIF orientation.

    Raises:
        UserError: the aspect ratio exceeds 200, or the colors are unknown (see to_rgb).
    """
    check_ratio(image.width, image.height)  # check before decoding: very long images would take gigabytes
    return to_rgb(PIL.ImageOps.exif_transpose(to_8_bits(image)))


def to_rgb(image: Image) -> Image:
    """Convert a PIL image to RGB; transparent pixels become white."""
    if 0 in image.size:
        raise UserError(f"the image has {image.width} x {image.height} pixels, but it must have at least 1 x 1")
    if image.mode in ("I", "F"):
        raise UserError(
            f"the pixels are 32-bit numbers (mode {image.mode}), so the values of black and white are not known; save "
            "the image with 8 bits per color"
        )
    image = to_8_bits(image)
    if image.has_transparency_data:
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def to_8_bits(image: Image) -> Image:
    """Convert 16-bit grayscale to 8 bits; Pillow would make all values above 255 white."""
    if not image.mode.startswith("I;16"):
        return image
    tags = getattr(image, "tag_v2", {})  # in TIFF files, pixels may have only 12 bits, or white may be 0
    pixels = np.asarray(image)
    gray = (pixels >> tags.get(ImageIFD.BitsPerSample, (16,))[0] - 8).astype(np.uint8)
    if tags.get(ImageIFD.PhotometricInterpretation) == 0:
        gray = 255 - gray
    gray = PIL.Image.fromarray(np.where(pixels == image.info.get("transparency"), np.uint8(255), gray))
    gray.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return gray


def check_ratio(width: int, height: int):
    """Raise UserError if the aspect ratio exceeds 200, as in transformers."""
    if max(height, width) > 200 * min(height, width):
        raise UserError(
            f"the image has {width} x {height} pixels, but its aspect ratio must be at most 200; "
            "crop or remove the image"
        )


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: float) -> tuple[int, int]:
    """Return an image's resized height and width, in pixels.

    The new area is between min_pixels and max_pixels; the aspect ratio changes only by rounding.

    Args:
        factor: the new height and width are multiples of this; 28 for Qwen2.5-VL.

    Example: with factor 28 and max_pixels 1003520, height 1092 and width 1568 become 812 and 1176.
    Raises:
        UserError: the aspect ratio exceeds 200, or max_pixels is less than min_pixels or one token.
    Source: smart_resize in transformers' Qwen2-VL.
    """
    check_ratio(width, height)
    if max_pixels < max(min_pixels, factor**2):
        raise UserError(
            f"max_pixels is {max_pixels}, but it must be at least min_pixels, which is "
            f"{min_pixels}, and at least one token of {factor} x {factor} pixels; set both bounds"
        )
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def patchify(frames: np.ndarray, patch_size: int, temporal_patch_size: int, merge_size: int) -> tuple[np.ndarray, Grid]:
    """Split image or video frames into patches, in the order that the vision tower expects.

    Args:
        frames: (T, 3, H, W), where patch_size * merge_size divides H and W. The last frame is repeated until T is a
            multiple of temporal_patch_size; an image is one frame.
    Returns:
        patches (t * h * w, 3 * temporal_patch_size * patch_size^2) and image_grid_thw (t, h, w). Blocks of merge_size x
        merge_size patches are in raster order, as are the patches in a block. Values in a patch are ordered (channel,
        frame, y, x).
    """
    missing = -len(frames) % temporal_patch_size
    frames = np.concatenate([frames] + [frames[-1:]] * missing)
    t = len(frames) // temporal_patch_size
    h = frames.shape[2] // patch_size
    w = frames.shape[3] // patch_size
    axes = frames.reshape(
        t, temporal_patch_size, 3,  # axes: temporal patches, frames per patch, color channels
        h // merge_size, merge_size, patch_size,  # axes in height: blocks, patches per block, pixels per patch
        w // merge_size, merge_size, patch_size,  # axes in width: blocks, patches per block, pixels per patch
    )  # fmt: skip
    patches = axes.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(t * h * w, -1), (t, h, w)


def resize_frames(frames: Iterable[Image], height: int, width: int, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Resize RGB frames of equal size with Pillow (bicubic), and normalize the color channels.

    Args:
        mean, std: (3, 1), per color channel, for pixel values from 0 to 1.
    Returns:
        (T, 3, height, width) float32.
    """
    resized = np.stack([np.asarray(frame.resize((width, height), Resampling.BICUBIC)) for frame in frames])
    gray_levels = (np.arange(256) / 255).astype(np.float32)
    return look_up((gray_levels - mean) / std, resized)


def look_up(normalized: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Normalize uint8 pixels with a lookup table.

    Args:
        normalized: (3, 256) normalized value for each color channel and uint8 value.
        pixels: (T, H, W, 3) uint8.
    Returns:
        (T, 3, H, W), dtype of `normalized`.
    """
    channels = [normalized[c].take(pixels[..., c]) for c in range(3)]
    return np.stack(channels, axis=1)


@dataclass
class ImageProcessor:
    """Convert images to patches, with a checkpoint's image settings."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56  # bounds on the image area after resizing, in pixels
    max_pixels: int = 28 * 28 * 16384
    # CLIP's mean and standard deviation, for pixel values from 0 to 1
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    resize: Callable[..., np.ndarray] = resize_frames
    videos: Any = None  # video processor for Qwen3-VL, None for Qwen2.5-VL
    dtype: torch.dtype = torch.float32  # patch dtype; bfloat16 halves the bytes copied to the GPU

    @property
    def factor(self) -> int:
        """Side of the image square for one token, in pixels: 14 * 2 = 28 by default."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Values per patch: 3 colors * 2 frames * 14 * 14 pixels = 1176 for Qwen2.5-VL."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def num_tokens(self, image_grid_thw: Grid) -> int:
        """Return the number of image tokens, one per block of merge_size x merge_size patches."""
        return math.prod(image_grid_thw) // self.merge_size**2

    def __call__(self, image: Image, **options: int) -> tuple[Tensor, Grid]:
        """Resize an image, normalize its colors and split it into patches.

        Args:
            options: min_pixels and max_pixels override the processor's bounds for this image; resized_height and
                resized_width override the image size before smart_resize.
        Returns:
            pixel_values (patches, patch_dim) in `dtype`, and image_grid_thw (t, h, w); see patchify.
        """
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        if "resized_height" in options:
            height = options["resized_height"]
            width = options["resized_width"]
        else:
            width, height = image.size
            bounds |= options
        return self.patches([image], *smart_resize(height, width, self.factor, **bounds))

    def patches(self, frames: Sequence[Image], height: int, width: int) -> tuple[Tensor, Grid]:
        """Resize image or video frames; return normalized patches and image_grid_thw (t, h, w)."""
        mean = np.array(self.image_mean, np.float32)[:, None]  # (3, 1)
        std = np.array(self.image_std, np.float32)[:, None]
        # convert frames one at a time, because RGB copies of all frames could fill the memory
        resized = self.resize(map(to_rgb, frames), height, width, mean, std)
        patches, image_grid_thw = patchify(resized, self.patch_size, self.temporal_patch_size, self.merge_size)
        return torch.from_numpy(patches).to(self.dtype), image_grid_thw
