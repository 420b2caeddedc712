"""How large the model sees one image or video: options of a message part, as in qwen-vl-utils.

They are checked here, where rows are read; ImageProcessor and Video apply them.
"""

from dataclasses import dataclass
from typing import Annotated

from minivlmrl.config.options import RowOptions
from minivlmrl.config.parsing import build
from minivlmrl.config.types import MinPixels

Whole = Annotated[int, "[1, 1e15)"]


@dataclass
class ImageOptions:
    """Options of an image."""

    # bounds of the area (of a frame)
    min_pixels: MinPixels | None = None
    max_pixels: Whole | None = None
    resized_height: Whole | None = None  # instead of the image's own size
    resized_width: Whole | None = None

    def __post_init__(self):
        if (self.resized_height is None) != (self.resized_width is None):
            raise ValueError("resized_height and resized_width belong together: give both")


@dataclass
class VideoOptions(ImageOptions):
    """Options of a video: how large its frames are, and which of a file, see data/video.py."""

    total_pixels: Whole | None = None  # upper bound of all frames together
    fps: Annotated[float, "(0, 1e15)"] | None = None
    nframes: Whole | None = None
    min_frames: Whole | None = None
    max_frames: Whole | None = None
    video_start: Annotated[float, "[0, 1e15)"] | None = None  # seconds
    video_end: Annotated[float, "[0, 1e15)"] | None = None


OPTIONS = {"image": ImageOptions, "video": VideoOptions}
SAMPLING_OPTIONS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")


def media_options(options: RowOptions) -> dict[str, dict]:
    """Return by kind what is asked of every image and video; a row's own options win."""
    image = {}
    if isinstance(options.resize, tuple):
        image = {"resized_height": options.resize[0], "resized_width": options.resize[1]}
    return {"image": image, "video": check_options("video", options.video)}


def check_options(kind: str, options: dict[str, float | None]) -> dict[str, float]:
    """Return the options of an image or video that are not None (ValueError names a wrong one)."""
    if not options:
        return {}
    checked = vars(build(OPTIONS[kind], options, f"options of the {kind}"))
    return {name: value for name, value in checked.items() if value is not None}
