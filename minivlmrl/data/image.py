"""Image file -> RGB -> smart_resize -> flattened patches: bit for bit what transformers' PIL processor makes."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, per RGB channel
STD = (0.26862954, 0.26130258, 0.27577711)
MAX_RATIO = 200
# what Pillow's decoders raise for damaged files, by format
UNREADABLE = (OSError, SyntaxError, ValueError, RuntimeError, PIL.Image.DecompressionBombError)


def load_image(path: str | Path) -> PIL.Image.Image:
    """Read an image file as RGB, turned upright by its EXIF orientation, transparency on white.

    Raises:
        ValueError: the file is missing, cut off, not an image, or has no pixels (named).
    """
    try:
        with PIL.Image.open(path) as image:
            image.load()
            return to_rgb(PIL.ImageOps.exif_transpose(image))
    except UNREADABLE as error:
        raise ValueError(f"{path}: cannot be read as an image ({error})") from error


def to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Convert any PIL image to RGB; what is transparent becomes white."""
    if 0 in image.size:
        raise ValueError(f"image of {image.width} x {image.height} pixels has nothing to show")
    if image.mode == "RGB":
        return image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        canvas = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(canvas, image).convert("RGB")
    return image.convert("RGB")


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Choose the size nearest to the image's whose sides are multiples of `factor` and whose area is in bounds.

    Example: 1092 x 1568 with factor 28 and max_pixels 1003520 gives 812 x 1176.

    Args:
        height, width: pixels.
        factor: patch_size * spatial_merge_size (28 on the hub).
        min_pixels, max_pixels: bounds of the area.
    Returns:
        height, width in pixels.
    Raises:
        ValueError: one side is more than 200 times the other.
    Source: transformers' smart_resize of Qwen2-VL (Python's round, half to even).
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"image of {width} x {height} pixels: its aspect ratio is over {MAX_RATIO}; crop or drop it")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


@dataclass
class ImageProcessor:
    """The image settings of a checkpoint (preprocessor_config.json). Pixels are areas."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 16384

    def __post_init__(self):
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} and max_pixels {self.max_pixels}: need 0 < min <= max")

    @property
    def patch_dim(self) -> int:
        return 3 * self.temporal_patch_size * self.patch_size**2

    def num_tokens(self, grid_thw: tuple[int, int, int]) -> int:
        """Decoder tokens of an image: its patches in merged blocks."""
        return math.prod(grid_thw) // self.merge_size**2

    def __call__(self, image: PIL.Image.Image) -> tuple[Tensor, tuple[int, int, int]]:
        """Resize, normalise and cut into patches.

        Args:
            image: any PIL mode.
        Returns:
            pixel_values (patches, 3 * temporal_patch_size * patch_size^2) float32: blocks of merge_size x merge_size
                patches in raster order, inside a block its patches in raster order, inside a patch (channel, frame,
                row, column); the second frame of an image repeats the first.
            grid_thw: patches in time (1), height and width.
        Raises:
            ValueError: see to_rgb and smart_resize.
        """
        image = to_rgb(image)
        factor = self.patch_size * self.merge_size
        height, width = smart_resize(image.height, image.width, factor, self.min_pixels, self.max_pixels)
        pixels = np.asarray(image.resize((width, height), PIL.Image.Resampling.BICUBIC))  # (height, width, 3) uint8
        # float64 product, then float32 arithmetic: the rounding of transformers' rescale and normalize
        pixels = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
        pixels = (pixels - np.array(MEAN, dtype=np.float32)) / np.array(STD, dtype=np.float32)
        h, w, m, p = height // self.patch_size, width // self.patch_size, self.merge_size, self.patch_size
        #         0 block row, 1 row in block, 2 y, 3 block column, 4 column in block, 5 x, 6 channel
        patches = pixels.reshape(h // m, m, p, w // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches = np.repeat(patches[..., None, :, :], self.temporal_patch_size, axis=5)  # frames before (y, x)
        return torch.from_numpy(patches.reshape(h * w, self.patch_dim)), (1, h, w)
