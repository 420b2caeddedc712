"""How large the model sees one image or video: options of a message part, as in qwen-vl-utils.

They are checked here, where rows are read; ImageProcessor and Video apply them. min_pixels and
max_pixels bound the area (of a frame); resized_height and resized_width replace the image's size;
total_pixels bounds all frames of a video.
"""

from collections.abc import Collection

from minivlmrl.hub.preprocessor import MAX_MIN_PIXELS

IMAGE_OPTIONS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
VIDEO_OPTIONS = (*IMAGE_OPTIONS, "total_pixels")
# see data/video.py
SAMPLING_OPTIONS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
OPTIONS = {"image": IMAGE_OPTIONS, "video": (*VIDEO_OPTIONS, *SAMPLING_OPTIONS)}


def check_options(options: dict[str, float | None], known: Collection[str]) -> dict[str, float]:
    """Return the options of an image or video that are not None (ValueError names a wrong one)."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"option {name!r} is not one of {', '.join(known)}")
        number(name, value, zero=name in SAMPLING_OPTIONS, whole=name not in SAMPLING_OPTIONS)
    if given.get("min_pixels", 0) > MAX_MIN_PIXELS:
        raise ValueError(f"min_pixels {given['min_pixels']} is over {MAX_MIN_PIXELS}")
    if ("resized_height" in given) != ("resized_width" in given):
        raise ValueError("resized_height and resized_width belong together: give both or neither")
    return given


def number(name: str, value: float, zero: bool = False, whole: bool = False) -> float:
    """Return an option that is a number above 0, or 0 if that is allowed too."""
    good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not good or not 0 <= value < 1e15 or (value == 0 and not zero):
        kind = f"{'whole ' if whole else ''}number {'from 0 on' if zero else 'above 0'}"
        raise ValueError(f"{name} {value!r:.40}: need a {kind}, below 1e15")
    return value
