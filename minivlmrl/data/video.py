"""Resize video frames like qwen-vl-utils, and split them into patches; extras/video_files.py reads the files.

For Qwen3-VL, extras/families/qwen3_vl.Videos samples and resizes frames.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import PIL.Image
from torch import Tensor

from minivlmrl.data.image import Grid, ImageProcessor, check_ratio, smart_resize
from minivlmrl.data.image_settings import FPS, MAX_FRAME_TOKENS, MIN_FRAME_TOKENS, check_options
from minivlmrl.data.media import MAX_IMAGE_PIXELS, Source, fetch_image, open_image
from minivlmrl.errors import UserError
from minivlmrl.load_extra import load_extra

FRAME_FACTOR = 2  # sample a multiple of 2 frames
TOTAL_TOKENS = 115_200  # default total_pixels, in tokens of 28 * 28 pixels
# maximum pixels in all sampled frames: 6 GiB as RGB
MAX_VIDEO_PIXELS = 2**31


@dataclass
class Video:
    """Frames sampled from a video, with their frame rate."""

    frames: Sequence[PIL.Image.Image]  # all frames have the same size
    fps: float  # sampled frames per second
    # frame times in seconds, None = constant frame rate
    seconds: Sequence[float] | None = None

    def __post_init__(self):
        check_options("video", {"fps": self.fps})
        if not self.frames or 0 in self.frames[0].size:
            raise UserError("the video must have frames with at least 1 x 1 pixels, but has none")
        first = self.frames[0]
        for number, frame in enumerate(self.frames):
            if frame.size != first.size:
                raise UserError(
                    f"all frames must have the same size, but frame {number} has {frame.width} x "
                    f"{frame.height} pixels and frame 0 has {first.width} x {first.height}"
                )

    def read(self, _processor: ImageProcessor) -> "Video":
        return self

    def gray(self) -> "Video":
        return replace(self, frames=[PIL.Image.new("RGB", self.frames[0].size, "gray")] * len(self.frames))

    def patches(self, processor: ImageProcessor, **options: int) -> tuple[Tensor, Grid, float | list[float]]:
        """Resize frames, and split them into patches.

        With `RESIZE["torch"]`, patches are bitwise equal to transformers' Qwen2VLVideoProcessor; with pil,
        frames are resized like images in transformers.

        Returns:
            pixel_values, image_grid_thw (see image.patchify), and seconds between temporal patches; for Qwen3-VL, whose
            prompts have timestamps, the time of each temporal patch
        """
        depth = processor.temporal_patch_size
        num_frames = len(self.frames)
        frame_width, frame_height = self.frames[0].size
        height, width = frame_size(processor, num_frames, frame_height, frame_width, **options)
        check_size(math.ceil(num_frames / depth) * depth, width, height)
        pixel_values, image_grid_thw = processor.patches(self.frames, height, width)
        if processor.videos is None:
            return pixel_values, image_grid_thw, depth / self.fps
        seconds = self.seconds or [i / self.fps for i in range(num_frames)]
        ends = [(first, min(first + depth, num_frames) - 1) for first in range(0, num_frames, depth)]
        return pixel_values, image_grid_thw, [(seconds[first] + seconds[last]) / 2 for first, last in ends]


@dataclass
class VideoFile:
    """Video file that is read later, because the model family decides which frames to sample."""

    load: Callable[..., Video]  # function that reads this file; takes load_video's frame_factor and defaults

    def read(self, processor: ImageProcessor) -> Video:
        if processor.videos is None:
            return self.load()
        return self.load(frame_factor=1, defaults=processor.videos.sampling)

    def gray(self) -> "VideoFile":
        return VideoFile(lambda **options: self.load(**options).gray())

    def patches(self, processor: ImageProcessor, **options: int) -> tuple:
        return self.read(processor).patches(processor, **options)


def load_video(source: Source | list, folder=None, frame_factor=FRAME_FACTOR, defaults=None, **sampling) -> Video:
    """Load sampled frames from a video.

    Args:
        source: video file, given as in media.fetch_image, or a list of images to use as frames.
        defaults: frame sampling options for a video file, used if `sampling` has none.
        sampling: options for extras/video_files.sample_indices. With a list of images, only fps is allowed: images per
            second (default 2), called `sample_fps` in qwen-vl-utils 0.0.14.
    """
    sampling = check_options("video", sampling)
    if isinstance(source, list | tuple):
        fps = sampling.pop("fps", FPS)
        frames = []
        if sampling:
            raise UserError(
                f"{min(sampling)} selects frames of a video file, but the video is a list of "
                "images, which are all used as frames; remove the option"
            )
        for frame in source:
            image = fetch_image(frame, folder)
            check_size(len(source), image.width, image.height)
            frames.append(image)
        return Video(frames, fps)
    return video_files().load(source, folder, sampling, frame_factor, defaults)


def outline_video(source: Source | list, folder=None, frame_factor=FRAME_FACTOR, defaults=None, **sampling) -> Video:
    """Return a video with blank frames of the right size, reading only the file header."""
    sampling = check_options("video", sampling)
    if isinstance(source, list | tuple):
        with open_image(source[0], folder) as image:
            return Video([image] * len(source), sampling.get("fps", FPS))
    return video_files().outline(source, folder, sampling, frame_factor, defaults)


def video_files():
    return load_extra("minivlmrl.extras.video_files", "a video file")


def check_size(nframes: int, width: int, height: int):
    check_ratio(width, height)
    if width * height > MAX_IMAGE_PIXELS:
        raise UserError(
            f"the frames have {width} x {height} pixels, which is more than the limit of "
            f"{MAX_IMAGE_PIXELS}; scale the video down"
        )
    if nframes * width * height > MAX_VIDEO_PIXELS:
        raise UserError(
            f"{nframes} frames of {width} x {height} pixels have more pixels in total than the "
            f"limit of {MAX_VIDEO_PIXELS}; use fewer or smaller frames"
        )


def frame_size(processor: ImageProcessor, nframes: int, height: int, width: int, **options: int) -> tuple[int, int]:
    """Compute the resized height and width of video frames, in pixels.

    Args:
        options: min_pixels and max_pixels bound the pixels in a frame (default: those of 128 and 768 tokens).
            total_pixels bounds the pixels in a video (default: those of 115200 tokens), where two frames count once: a
            frame may have 2 * total_pixels / nframes pixels. resized_height and resized_width set a fixed size.

    Source: fetch_video in qwen-vl-utils, for a video file. A list of frames is resized once here;
    qwen-vl-utils 0.0.14 resizes it twice.
    """
    options = check_options("video", options)
    factor = processor.factor
    if "resized_height" in options:
        return smart_resize(
            options["resized_height"], options["resized_width"], factor, processor.min_pixels, processor.max_pixels
        )
    if processor.videos is not None:
        return processor.videos.frame_size(processor, nframes, height, width, **options)
    nframes = math.ceil(nframes / processor.temporal_patch_size) * processor.temporal_patch_size
    min_pixels = options.get("min_pixels", MIN_FRAME_TOKENS * factor**2)
    pixel_share = options.get("total_pixels", TOTAL_TOKENS * factor**2) / nframes * FRAME_FACTOR
    pixel_limit = max(min(MAX_FRAME_TOKENS * factor**2, pixel_share), int(min_pixels * 1.05))
    max_pixels = min(options.get("max_pixels", pixel_limit), pixel_limit)
    return smart_resize(height, width, factor, min_pixels, max_pixels)
