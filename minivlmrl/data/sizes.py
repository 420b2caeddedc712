"""How large the model sees one image or video: options of a message part, as in qwen-vl-utils.

min_pixels and max_pixels, bounds of the area (of a frame), replace the processor's; resized_height and resized_width
replace the image's own size, and then only the processor's bounds hold. total_pixels bounds all frames of a video.
"""

from collections.abc import Collection

from minivlmrl.image import ImageProcessor

MAX_MIN_PIXELS = 2**25  # 2 GB as patches while they are made
BOUNDS = ("min_pixels", "max_pixels")
IMAGE_OPTIONS = (*BOUNDS, "resized_height", "resized_width")
VIDEO_OPTIONS = (*IMAGE_OPTIONS, "total_pixels")
SAMPLING_OPTIONS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")  # see data/video.py
OPTIONS = {"image": IMAGE_OPTIONS, "video": (*VIDEO_OPTIONS, *SAMPLING_OPTIONS)}


def read_options(
    processor: ImageProcessor, height: int, width: int, options: dict[str, int | None]
) -> tuple[int, int, tuple[int, int]]:
    """Apply the IMAGE_OPTIONS of one image: height, width, (min_pixels, max_pixels) that smart_resize is given."""
    options = check_options(options, IMAGE_OPTIONS)
    if "resized_height" in options:
        height, width, options = options["resized_height"], options["resized_width"], {}
    bounds = options.get("min_pixels", processor.min_pixels), options.get("max_pixels", processor.max_pixels)
    check_bounds(*bounds, processor.factor, options)
    return height, width, bounds


def check_options(options: dict[str, float | None], known: Collection[str]) -> dict[str, float]:
    """Return the options of one image or video without those that are None (ValueError names the wrong one)."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"option {name!r} is not one of {', '.join(known)}")
        number(name, value, zero=name in SAMPLING_OPTIONS, whole=name not in SAMPLING_OPTIONS)
    if ("resized_height" in given) != ("resized_width" in given):
        raise ValueError("resized_height and resized_width belong together: give both or neither")
    return given


def check_bounds(min_pixels: int, max_pixels: int, factor: int, given: Collection[str] = BOUNDS):
    """Refuse areas that no image of tokens `factor` pixels wide could keep; one that is not `given` is a default."""
    number("min_pixels", min_pixels, whole=True)
    number("max_pixels", max_pixels, whole=True)
    if min_pixels > max_pixels:
        names = [name if name in given else f"the default {name}" for name in BOUNDS]
        cure = "".join(f"; give {name} too" for name in BOUNDS if name not in given)
        raise ValueError(f"{names[0]} {min_pixels} and {names[1]} {max_pixels}: need 0 < min <= max{cure}")
    if max_pixels < factor**2:
        raise ValueError(f"max_pixels {max_pixels} is less than one token, {factor} x {factor} pixels")
    if min_pixels > MAX_MIN_PIXELS:
        raise ValueError(f"min_pixels {min_pixels} is over {MAX_MIN_PIXELS}; patches of an image would fill the memory")


def number(name: str, value: float, zero: bool = False, whole: bool = False) -> float:
    """Return an option that is a number above 0, or 0 if that is allowed too."""
    good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not good or not 0 <= value < 1e15 or (value == 0 and not zero):
        kind = f"{'whole ' if whole else ''}number {'from 0 on' if zero else 'above 0'}"
        raise ValueError(f"{name} {value!r:.40}: need a {kind}, below 1e15")
    return value
