"""Image -> RGB -> smart_resize -> flattened patches: bit for bit what transformers' processors make."""

import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.ImageOps
import torch
from torch import Tensor

from minivlmrl.data.fetch import open_source

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, per RGB channel
STD = (0.26862954, 0.26130258, 0.27577711)
MAX_RATIO = 200
# An image may claim as many pixels as Pillow opens by default: 12000 x 9000 passes, 20000 x 20000 does not. As RGB
# these are half a GiB; without a limit a file of a few kilobytes could ask for any amount.
MAX_IMAGE_PIXELS = 178_956_970
BOUNDS = ("min_pixels", "max_pixels")
IMAGE_OPTIONS = (*BOUNDS, "resized_height", "resized_width")
# settings of a preprocessor_config.json that change pixels and of which we have one value
FIXED_SETTINGS = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "do_center_crop": False,
    "do_pad": False, "rescale_factor": 1 / 255, "resample": int(PIL.Image.Resampling.BICUBIC),
}  # fmt: skip
# image_processor_type -> resize. Before transformers 5 only Fast meant torchvision's kernels; since then the plain name
# means them where torchvision is installed and Pillow's where it is not, and we read it in its older sense.
RESIZE_OF_TYPE = {
    "Qwen2VLImageProcessor": "pil", "Qwen2VLImageProcessorPil": "pil", "Qwen2_5_VLImageProcessor": "pil",
    "Qwen2VLImageProcessorFast": "torch",
}  # fmt: skip


def load_image(
    source: str | Path | bytes | PIL.Image.Image, folder: str | Path | None = None, allow_url: bool = False
) -> PIL.Image.Image:
    """Read an image as RGB, turned upright by its EXIF orientation, transparency on white.

    Upright, because transformers' load_image turns it too, and whoever drew boxes on a photo saw it upright;
    qwen-vl-utils ignores the orientation.

    Args:
        source: path, file:// URL, data URI (base64), http(s) URL, the bytes of a file, or an image.
        folder: what a relative path is relative to.
        allow_url: download http(s) URLs.
    Raises:
        ValueError: it is missing, cut off, not an image, has no pixels or over MAX_IMAGE_PIXELS of them, or is a URL
            and those are not allowed (named).
    """
    if isinstance(source, PIL.Image.Image):
        name, file = f"image of {source.width} x {source.height} pixels", None
    else:
        name, file = open_source(source, folder, allow_url)
    try:
        if file is None:
            return to_rgb(PIL.ImageOps.exif_transpose(source))
        with warnings.catch_warnings():  # Pillow warns from half of our limit on
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            with PIL.Image.open(file) as image:
                _check_before_decoding(image)
                image.load()
                return to_rgb(PIL.ImageOps.exif_transpose(image))
    except PIL.UnidentifiedImageError as error:
        raise ValueError(f"{name}: cannot be read as an image (none of the formats that Pillow knows)") from error
    except Exception as error:  # damaged files make Pillow's decoders raise anything: struct.error, IndexError, ...
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{name}: cannot be read as an image ({reason})") from error


def _check_before_decoding(image: PIL.Image.Image):
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels are over {MAX_IMAGE_PIXELS}; scale it down")
    if image.format == "EPS":  # Pillow would run Ghostscript, and it the program that an EPS file is
        raise ValueError("EPS files are programs; convert it to PNG")


def to_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Convert any PIL image to RGB; what is transparent becomes white."""
    if 0 in image.size:
        raise ValueError(f"image of {image.width} x {image.height} pixels has nothing to show")
    if image.mode == "RGB" and "transparency" not in image.info:
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
    Source: transformers' smart_resize of Qwen2-VL (Python's round, half to even). That of qwen-vl-utils differs for
        sides under factor / 2, which it counts as `factor` first, and can return 0.
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


def patchify(
    frames: np.ndarray, patch_size: int, temporal_patch_size: int, merge_size: int
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut frames into patches, in the order in which the vision tower reads them.

    Args:
        frames (T, H, W, 3): H and W multiples of patch_size * merge_size. If temporal_patch_size does not divide T, the
            last frame is repeated, so an image is one frame shown twice.
    Returns:
        patches (t * h * w, 3, temporal_patch_size * patch_size^2) of the same dtype: blocks of merge_size x merge_size
            patches in raster order, inside a block its patches in raster order, inside a patch (channel, frame, row,
            column).
        image_grid_thw: patches in time, height and width.
    """
    n, m, p = temporal_patch_size, merge_size, patch_size
    frames = np.concatenate([frames, *[frames[-1:]] * (-len(frames) % n)])
    t, h, w = len(frames) // n, frames.shape[1] // p, frames.shape[2] // p
    #                       0  1  2 block row, 3 row in block, 4 y, 5 block column, 6 column in block, 7 x, 8 channel
    patches = frames.reshape(t, n, h // m, m, p, w // m, m, p, 3).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return patches.reshape(t * h * w, 3, n * p * p), (t, h, w)


@dataclass
class ImageProcessor:
    """The image settings of a checkpoint (preprocessor_config.json). Pixels are areas.

    `resize` names the bicubic filter. "pil", the default, is Pillow's: to the bit what transformers without torchvision
    and qwen-vl-utils make with the same Pillow, so what the checkpoints were trained with. "torch" is torch's uint8
    kernel: to the bit what transformers' torchvision ("fast") processor makes, for comparing with a server that uses
    it. They differ by at most two grey levels, on about 1 % of the values. There is one exception: where the height
    shrinks more than the width, Pillow 13 (not 12) resizes the height first, and rounds in between; then up to a third
    of the values of a soft picture differ by one or two, and noise by up to 25.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 16384
    image_mean: tuple[float, float, float] = MEAN
    image_std: tuple[float, float, float] = STD
    resize: str = "pil"

    def __post_init__(self):
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            positive_int(name, getattr(self, name))
        check_bounds(self.min_pixels, self.max_pixels, self.factor)
        self.image_mean = _three_numbers("image_mean", self.image_mean)
        self.image_std = _three_numbers("image_std", self.image_std)
        if min(self.image_std) < 1e-6:  # float32 has to divide by it
            raise ValueError(f"image_std {self.image_std}: need three numbers above 0")
        if self.resize not in ("pil", "torch"):
            raise ValueError(f"resize {self.resize!r} is neither 'pil' nor 'torch'")

    @classmethod
    def from_dict(
        cls, settings: dict, min_pixels: int | None = None, max_pixels: int | None = None, resize: str | None = None
    ) -> "ImageProcessor":
        """Read the content of a preprocessor_config.json; the arguments override it.

        Pixel bounds that it does not give are those of transformers' class, so that both make the same patches.
        Settings that change pixels and that we do not have are refused; the others do nothing in transformers either.

        Raises:
            ValueError: a field has the wrong type or a value that is not supported (named).
        """
        if not isinstance(settings, dict):
            raise ValueError(f"image settings are an object, not {type(settings).__name__}")
        for name, value in FIXED_SETTINGS.items():
            if settings.get(name) not in (None, value):
                raise ValueError(f"{name} {settings[name]!r} is not supported, only {value!r}")
        kind = settings.get("image_processor_type") or "Qwen2VLImageProcessor"
        if not isinstance(kind, str) or kind not in RESIZE_OF_TYPE:
            raise ValueError(f"image_processor_type {kind!r} is not one of {', '.join(RESIZE_OF_TYPE)}")
        least, most = _pixel_bounds(settings, min_pixels, max_pixels)
        names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
        given = {name: settings[name] for name in names if settings.get(name) is not None}
        return cls(**given, min_pixels=least, max_pixels=most, resize=resize or RESIZE_OF_TYPE[kind])

    def to_dict(self) -> dict:
        """Write a preprocessor_config.json that transformers 4.49 to 5.23 and vLLM read."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor" + ("Fast" if self.resize == "torch" else ""),
            **{name: value for name, value in FIXED_SETTINGS.items() if value is not False},
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},  # the newer name of the same
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "merge_size": self.merge_size,
        }

    @property
    def factor(self) -> int:
        """Side of a decoder token, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        return 3 * self.temporal_patch_size * self.patch_size**2

    def num_tokens(self, image_grid_thw: tuple[int, int, int]) -> int:
        """Decoder tokens of an image: its patches in merged blocks."""
        return math.prod(image_grid_thw) // self.merge_size**2

    def __call__(self, image: PIL.Image.Image, **options: int) -> tuple[Tensor, tuple[int, int, int]]:
        """Resize, normalise and cut into patches.

        Args:
            image: any PIL mode.
            options: of this image alone (None counts as not given), as in qwen-vl-utils: min_pixels and max_pixels in
                place of the processor's; or resized_height and resized_width in place of the image's own size, and
                then only the processor's bounds hold.
        Returns:
            pixel_values (patches, 3 * temporal_patch_size * patch_size^2) float32: see patchify.
            image_grid_thw: patches in time (1), height and width.
        Raises:
            ValueError: an option is unknown or of the wrong type; see also to_rgb and smart_resize.
        """
        options = check_options(options, IMAGE_OPTIONS)
        image = to_rgb(image)
        return self.patches([image], *self.resized_size(image.height, image.width, **options))

    def resized_size(self, height: int, width: int, **options: int) -> tuple[int, int]:
        """Choose height and width after resizing; for the options see __call__."""
        if "resized_height" in options:
            height, width, options = options["resized_height"], options["resized_width"], {}
        least, most = options.get("min_pixels", self.min_pixels), options.get("max_pixels", self.max_pixels)
        check_bounds(least, most, self.factor, options)
        return smart_resize(height, width, self.factor, least, most)

    def patches(
        self, frames: Iterable[PIL.Image.Image], height: int, width: int
    ) -> tuple[Tensor, tuple[int, int, int]]:
        """Resize RGB frames to one size; their normalised patches and image_grid_thw."""
        resized = np.stack([self._resize(frame, height, width) for frame in frames])
        values, image_grid_thw = patchify(resized, self.patch_size, self.temporal_patch_size, self.merge_size)
        table, pixel_values = self._normalised(), np.empty(values.shape, np.float32)
        for channel in range(3):
            pixel_values[:, channel] = table[channel].take(values[:, channel])
        return torch.from_numpy(pixel_values.reshape(-1, self.patch_dim)), image_grid_thw

    def _resize(self, image: PIL.Image.Image, height: int, width: int) -> np.ndarray:
        if self.resize == "pil":
            return np.asarray(image.resize((width, height), PIL.Image.Resampling.BICUBIC))  # (height, width, 3) uint8
        # uint8 in and out: the kernel rounds between its two passes, so resizing in float32 would give other values
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        pixels = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        return pixels[0].permute(1, 2, 0).numpy()

    def _normalised(self) -> np.ndarray:
        """(3, 256) float32: what a grey level becomes, rounded as either of transformers' processors rounds."""
        mean, std = (np.array(x, dtype=np.float32)[:, None] for x in (self.image_mean, self.image_std))
        if self.resize == "pil":
            return ((np.arange(256) * (1 / 255)).astype(np.float32) - mean) / std  # float64 product, then float32
        scale = np.float32(1 / (1 / 255))  # transformers' way to write 255, folded into mean and std
        return (np.arange(256, dtype=np.float32) - mean * scale) / (std * scale)


def positive_int(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} {value!r}: need a whole number above 0")
    return value


def check_bounds(min_pixels: int, max_pixels: int, factor: int, options: Collection[str] = BOUNDS):
    """Raise ValueError for bounds that no image could keep.

    Args:
        min_pixels, max_pixels: areas.
        factor: side of a decoder token, in pixels.
        options: which of the bounds the image asks for itself; another is a default, and the error says so.
    """
    least, most = positive_int("min_pixels", min_pixels), positive_int("max_pixels", max_pixels)
    if not least <= most:
        names = [name if name in options else f"the default {name}" for name in BOUNDS]
        cure = "".join(f"; give {name} too" for name in BOUNDS if name not in options)
        raise ValueError(f"{names[0]} {least} and {names[1]} {most}: need 0 < min <= max{cure}")
    if most < factor**2:
        raise ValueError(f"max_pixels {most} is less than one token, {factor} x {factor} pixels")
    if least > MAX_IMAGE_PIXELS:
        raise ValueError(f"min_pixels {least} is over {MAX_IMAGE_PIXELS}")


def check_options(options: dict, known: Sequence[str]) -> dict:
    """Size options of one image or video without those that are None (ValueError names the wrong one)."""
    for name in options:
        if name not in known:
            raise ValueError(f"option {name!r} is not one of {', '.join(known)}")
    given = {name: positive_int(name, value) for name, value in options.items() if value is not None}
    if ("resized_height" in given) != ("resized_width" in given):
        raise ValueError("resized_height and resized_width belong together: give both or neither")
    return given


def _three_numbers(name: str, values: Sequence[float]) -> tuple[float, float, float]:
    if not isinstance(values, list | tuple) or len(values) != 3:
        raise ValueError(f"{name} {values!r}: need a list of three numbers, one per RGB channel")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
            raise ValueError(f"{name} {values!r}: need a list of three numbers, one per RGB channel")
    return tuple(values)


def _pixel_bounds(settings: dict, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
    """The bounds of a preprocessor_config.json, which has them at the top, under `size`, or not at all."""
    size = settings.get("size")
    size = {} if size is None else size
    names = {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}
    if not isinstance(size, dict) or not {name for name in size if size[name] is not None} <= names:
        raise ValueError(f"size {size!r}: need shortest_edge and longest_edge, the least and largest area in pixels")
    least = (min_pixels, settings.get("min_pixels"), size.get("shortest_edge"), size.get("min_pixels"), 56 * 56)
    most = (max_pixels, settings.get("max_pixels"), size.get("longest_edge"), size.get("max_pixels"), 28 * 28 * 1280)
    return next(x for x in least if x is not None), next(x for x in most if x is not None)
