"""Video file or list of frames -> the frames that the model sees -> patches, as qwen-vl-utils.

A family whose rules are others has them in ImageProcessor.videos, see model/families/qwen3_vl.Videos.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from minivlmrl.config.parsing import optional_dependency
from minivlmrl.data.image import Grid, ImageProcessor, smart_resize, to_rgb
from minivlmrl.data.media import MAX_IMAGE_PIXELS, Source, check_options, fetch_image, open_source

FPS = 2.0  # frames a second that are taken when nothing else is asked
FRAME_FACTOR = 2  # the number of frames taken is a multiple
MIN_FRAMES, MAX_FRAMES = 4, 768
MIN_FRAME_TOKENS, MAX_FRAME_TOKENS = 128, 768  # decoder tokens a frame would be as an image
TOTAL_TOKENS = 115_200  # of all frames of a video together: 0.9 of 128000
MAX_VIDEO_PIXELS = 2**31  # of the sampled frames together, before and after resizing: 6 GiB as RGB


@dataclass
class Video:
    """Frames and how many of them a second holds."""

    frames: Sequence[PIL.Image.Image]  # of one size
    fps: float
    seconds: Sequence[float] | None = None  # when each is shown; None: from 0 on, at that rate

    def __post_init__(self):
        check_options("video", {"fps": self.fps})
        if not self.frames or 0 in self.frames[0].size:
            raise ValueError("a video without frames or pixels has nothing to show")
        first = self.frames[0]
        for number, frame in enumerate(self.frames):
            if frame.size != first.size:
                raise ValueError(
                    f"frame {number} has {frame.width} x {frame.height} pixels, "
                    f"frame 0 {first.width} x {first.height}"
                )

    def patches(
        self, processor: ImageProcessor, **options: int
    ) -> tuple[Tensor, Grid, float | list[float]]:
        """Make pixel_values, image_grid_thw (see image.patchify), and the seconds from t to t + 1;
        of a family that writes times, a list: when each t is shown.

        Frames are resized one by one: "torch" gives to the bit what transformers'
        Qwen2VLVideoProcessor makes of them, "pil" what its image processor makes of each.
        """
        depth = processor.temporal_patch_size
        num_frames = len(self.frames)
        frame_width, frame_height = self.frames[0].size
        height, width = frame_size(processor, num_frames, frame_height, frame_width, **options)
        _check_size(math.ceil(num_frames / depth) * depth, width, height)
        # converted one after the other: together they could fill the memory
        pixel_values, image_grid_thw = processor.patches(map(to_rgb, self.frames), height, width)
        if processor.videos is None:
            return pixel_values, image_grid_thw, depth / self.fps
        seconds = self.seconds
        if seconds is None:
            seconds = [i / self.fps for i in range(num_frames)]
        patch_times = []
        for first_frame in range(0, num_frames, depth):
            last_frame = min(first_frame + depth, num_frames) - 1
            patch_times.append((seconds[first_frame] + seconds[last_frame]) / 2)
        return pixel_values, image_grid_thw, patch_times


@dataclass
class VideoFile:
    """A video that is decoded when a model is to see it: families take other frames of a file."""

    load: Callable[..., Video]  # load_video of all but frame_factor

    def patches(self, processor: ImageProcessor, **options: int) -> tuple:
        """Load the frames, and see Video.patches."""
        factor = FRAME_FACTOR if processor.videos is None else 1
        return self.load(frame_factor=factor).patches(processor, **options)


def load_video(source: Source | list, folder=None, frame_factor=FRAME_FACTOR, **sampling) -> Video:
    """Read the frames of a video that the model is to see.

    Args:
        source, folder: see fetch_image; or a list of such frames, which is taken whole.
        sampling: see sample_indices. Of a list of frames fps alone may be given, the rate at which
            they were sampled, 2 if it is not (`sample_fps` of qwen-vl-utils 0.0.14).
    """
    sampling = check_options("video", sampling)
    if isinstance(source, list | tuple):
        fps = sampling.pop("fps", FPS)
        frames = []
        if sampling:
            raise ValueError(f"{min(sampling)} chooses frames of a file; a list is taken whole")
        for frame in source:
            image = fetch_image(frame, folder)
            _check_size(len(source), image.width, image.height)
            frames.append(image)
        return Video(frames, fps)
    name, file = open_source(source, folder)
    try:
        return _sample(file, sampling | {"frame_factor": frame_factor})
    except Exception as error:  # damaged files make PyAV raise anything
        error_text = str(error) or type(error).__name__
        if hasattr(error, "strerror"):  # of the system or of FFmpeg
            reason = getattr(error, "strerror", None) or error_text
            error_text = f"cannot be read as a video ({reason})"
        raise ValueError(f"{name}: {error_text}") from error


def _sample(file: Path | io.BytesIO, sampling: dict) -> Video:
    """Decode the frames that the options ask for: one pass counts, the next decodes."""
    with _opened(file) as (container, stream):
        video_fps = float(stream.average_rate or stream.guessed_rate or 0)
        total_frames = _count_frames(container, stream)
    while True:
        indices, fps = sample_indices(total_frames, video_fps, **sampling)
        frames, num_decoded = _decode(file, indices)
        if len(frames) == len(indices):
            return Video(frames, fps, [index / video_fps for index in indices])
        # fewer than packets: a stream that begins in the middle shows nothing until a key frame
        total_frames = num_decoded


def _count_frames(container, stream) -> int:
    """Count the packets of a stream, which are frames; refuse a file that is cut off."""
    total_frames = 0
    end_seconds = 0.0
    for packet in container.demux():
        if packet.is_corrupt:
            raise ValueError("cut off or damaged")
        is_ours = packet.stream_index == stream.index
        if is_ours and packet.size > 0 and not packet.is_discard:
            total_frames += 1
        if packet.pts is not None:
            packet_end = float((packet.pts + (packet.duration or 0)) * packet.time_base)
            end_seconds = max(end_seconds, packet_end)
    # in other containers the index tells that packets are missing
    claimed_seconds = (container.duration or 0) / 1e6
    missing_seconds = claimed_seconds + (container.start_time or 0) / 1e6 - end_seconds
    if "matroska" in container.format.name and missing_seconds > max(0.5, 0.05 * claimed_seconds):
        raise ValueError(
            f"cut off: it ends after {end_seconds:.6g} of {claimed_seconds:.6g} seconds"
        )
    return total_frames


@contextlib.contextmanager
def _opened(file: Path | io.BytesIO) -> Iterator[tuple]:
    """Open a file: PyAV's container and its video stream."""
    with optional_dependency("video", "video files need PyAV"):
        import av

    # opened by us: FFmpeg would take names like concat:a|b for more than a file
    opened = file.open("rb") if isinstance(file, Path) else io.BytesIO(file.getbuffer())
    # a playlist would make FFmpeg open other files and URLs
    options = {"protocol_whitelist": "none"}
    with opened, av.open(opened, container_options=options, metadata_errors="replace") as container:
        stream = container.streams.best("video")
        if not isinstance(stream, av.VideoStream):
            raise ValueError("has no video stream")
        if stream.codec_context is None:
            raise ValueError("is in a format that FFmpeg cannot decode")
        _check_size(1, stream.codec_context.width, stream.codec_context.height)
        # a frame may claim another size
        stream.codec_context.options = {"max_pixels": str(MAX_IMAGE_PIXELS)}
        yield container, stream


def _decode(file: Path | io.BytesIO, indices: Sequence[int]) -> tuple[list[PIL.Image.Image], int]:
    """Return the frames of these numbers, and how many were decoded for them."""
    frames = []
    num_decoded = 0
    with _opened(file) as (container, stream):
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise ValueError(f"frame {num_decoded} is damaged")
            if num_decoded == indices[len(frames)]:
                _check_size(len(indices), frame.width, frame.height)
                # phones store what their sensor saw, and how to turn it
                quarter_turns = round(frame.rotation / 90)
                if abs(frame.rotation - 90 * quarter_turns) > 1:
                    raise ValueError(f"is turned by {frame.rotation} degrees, no quarter turn")
                pixels = np.rot90(frame.to_ndarray(format="rgb24"), quarter_turns)
                frames.append(PIL.Image.fromarray(pixels))
            num_decoded += 1
            if len(frames) == len(indices):
                break
    return frames, num_decoded


def _check_size(nframes: int, width: int, height: int):
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(f"frames of {width} x {height} pixels are over {MAX_IMAGE_PIXELS}")
    if nframes * width * height > MAX_VIDEO_PIXELS:
        raise ValueError(
            f"{nframes} frames of {width} x {height} pixels are over {MAX_VIDEO_PIXELS} together; "
            "take fewer or smaller frames"
        )


def sample_indices(
    total_frames: int, video_fps: float, frame_factor: int = FRAME_FACTOR, **sampling: float
) -> tuple[list[int], float]:
    """Choose frames of a file, evenly spread, first and last among them; and their rate a second.

    Example: 6 of 100 frames are 0, 20, 40, 59, 79, 99.

    Args:
        sampling: see smart_nframes; video_start and video_end, seconds, are moved into the video.
    Source: qwen-vl-utils' readers (float32); with frame_factor 1 Qwen3VLVideoProcessor (float64).
    """
    if total_frames <= 0 or not 0 < video_fps < math.inf:
        raise ValueError(f"{total_frames} frames, {video_fps} a second: nothing to show")
    duration = total_frames / video_fps
    video_start = sampling.pop("video_start", 0.0)
    video_end = sampling.pop("video_end", duration)
    first_frame = math.ceil(min(video_start, duration) * video_fps)
    last_frame = min(math.floor(min(video_end, duration) * video_fps), total_frames - 1)
    if first_frame >= last_frame:
        raise ValueError(
            f"no two frames lie between video_start {video_start} and video_end {video_end}; "
            f"the video has {total_frames} frames, {video_fps:.6g} a second: {duration:.6g} seconds"
        )
    num_frames = last_frame - first_frame + 1
    nframes = smart_nframes(num_frames, video_fps, frame_factor, sampling)
    if frame_factor == 1:
        indices = np.linspace(first_frame, last_frame, nframes).round().astype(int)
    else:
        indices = torch.linspace(first_frame, last_frame, nframes).round().long()
    return indices.tolist(), nframes / num_frames * video_fps


def smart_nframes(
    total_frames: int, video_fps: float, frame_factor: int, sampling: dict[str, float]
) -> int:
    """Choose how many frames to take, a multiple of frame_factor.

    Example: of 100 frames at 30 a second, 2 a second would be 6.67; 6 are taken.

    Args:
        sampling: nframes, frames to take; or fps, frames to take of a second, 2 if not given, and
            bounds min_frames and max_frames, 4 and 768 if not given; max_frames wins.
    Source: qwen-vl-utils' smart_nframes.
    """
    if "nframes" in sampling:
        if sampling.keys() & {"fps", "min_frames", "max_frames"}:
            raise ValueError("nframes fixes the number of frames: no fps, min_frames, max_frames")
        nframes = round(sampling["nframes"] / frame_factor) * frame_factor
    else:
        min_frames = math.ceil(sampling.get("min_frames", MIN_FRAMES) / frame_factor) * frame_factor
        max_frames = (
            math.floor(sampling.get("max_frames", MAX_FRAMES) / frame_factor) * frame_factor
        )
        wanted_frames = total_frames / video_fps * sampling.get("fps", FPS)
        wanted_frames = min(max(wanted_frames, min_frames), max_frames, total_frames)
        nframes = math.floor(wanted_frames / frame_factor) * frame_factor
    if not FRAME_FACTOR <= nframes <= total_frames:
        raise ValueError(f"{nframes} frames would be taken of a video of {total_frames}")
    return nframes


def frame_size(
    processor: ImageProcessor, nframes: int, height: int, width: int, **options: int
) -> tuple[int, int]:
    """Choose the height and width that each frame of a video is seen with, in pixels.

    Args:
        nframes: of the video.
        options: min_pixels and max_pixels of a frame, by default 128 and 768 tokens' worth;
            total_pixels, by default 115200 tokens' worth, of which a frame gets its share twice,
            because two frames are one patch; resized_height and resized_width, as for an image.
    Source: qwen-vl-utils' fetch_video of a file; of a frame list, which 0.0.14 resizes twice, too.
    """
    options = check_options("video", options)
    factor = processor.factor
    if "resized_height" in options:
        height = options["resized_height"]
        width = options["resized_width"]
        return smart_resize(height, width, factor, processor.min_pixels, processor.max_pixels)
    if processor.videos is not None:
        return processor.videos.frame_size(processor, nframes, height, width, **options)
    nframes = math.ceil(nframes / processor.temporal_patch_size) * processor.temporal_patch_size
    min_pixels = options.get("min_pixels", MIN_FRAME_TOKENS * factor**2)
    pixel_share = options.get("total_pixels", TOTAL_TOKENS * factor**2) / nframes * FRAME_FACTOR
    pixel_limit = max(min(MAX_FRAME_TOKENS * factor**2, pixel_share), int(min_pixels * 1.05))
    max_pixels = min(options.get("max_pixels", pixel_limit), pixel_limit)
    return smart_resize(height, width, factor, min_pixels, max_pixels)
