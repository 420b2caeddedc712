"""Sample the frames of a video file, or read a list of frames, and compute their patches.

The rules are those of qwen-vl-utils. A model family with other rules has them in
ImageProcessor.videos, see model/families/qwen3_vl.Videos.
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

FPS = 2.0  # default number of sampled frames per second
FRAME_FACTOR = 2  # the number of sampled frames is a multiple of this
MIN_FRAMES, MAX_FRAMES = 4, 768
MIN_FRAME_TOKENS, MAX_FRAME_TOKENS = (
    128,
    768,
)  # bounds of a frame's area, in tokens that it would have as an image
TOTAL_TOKENS = 115_200  # bound for all frames of a video: 0.9 of 128000
MAX_VIDEO_PIXELS = 2**31  # bound for all sampled frames, before and after resizing: 6 GiB as RGB


@dataclass
class Video:
    """Sampled frames of a video, and their rate."""

    frames: Sequence[PIL.Image.Image]  # all of the same size
    fps: float  # sampled frames per second
    seconds: Sequence[float] | None = None  # time of each frame; None computes times from fps

    def __post_init__(self):
        check_options("video", {"fps": self.fps})
        if not self.frames or 0 in self.frames[0].size:
            raise ValueError("the video has no frames, or frames without pixels")
        first = self.frames[0]
        for number, frame in enumerate(self.frames):
            if frame.size != first.size:
                raise ValueError(
                    f"all frames must have the same size, but frame {number} has {frame.width} x "
                    f"{frame.height} pixels and frame 0 has {first.width} x {first.height}"
                )

    def patches(
        self, processor: ImageProcessor, **options: int
    ) -> tuple[Tensor, Grid, float | list[float]]:
        """Resize the frames and cut them into patches.

        With data.resize_backend: torch, the patches equal those of transformers'
        Qwen2VLVideoProcessor bit for bit; with pil, those of its image processor for each frame.

        Args:
            processor: image processor of the model.
            options: see frame_size.

        Returns:
            pixel_values, image_grid_thw (see image.patchify), and the seconds between two temporal
            patches. For families that write times into the prompt, it is a list instead, with the
            time in seconds of each temporal patch.
        """
        depth = processor.temporal_patch_size
        num_frames = len(self.frames)
        frame_width, frame_height = self.frames[0].size
        height, width = frame_size(processor, num_frames, frame_height, frame_width, **options)
        _check_size(math.ceil(num_frames / depth) * depth, width, height)
        # map() converts one frame at a time, because all of them could fill the memory
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
    """A video that is decoded only for its patches, because model families sample other frames."""

    load: Callable[..., Video]  # load_video with all arguments except frame_factor

    def patches(self, processor: ImageProcessor, **options: int) -> tuple:
        """Load the video, and compute its patches with Video.patches."""
        factor = FRAME_FACTOR if processor.videos is None else 1
        return self.load(frame_factor=factor).patches(processor, **options)


def load_video(source: Source | list, folder=None, frame_factor=FRAME_FACTOR, **sampling) -> Video:
    """Load the sampled frames of a video.

    Args:
        source: video file as in media.fetch_image, or a list of images, all of which are used.
        folder: folder that relative paths start from.
        frame_factor: the number of sampled frames is a multiple of it.
        sampling: see sample_indices. For a list of images only fps is allowed: the rate at which
            they were sampled, by default 2 (`sample_fps` of qwen-vl-utils 0.0.14).

    Raises:
        ValueError: the video cannot be read, is too large, or an option is wrong.
    """
    sampling = check_options("video", sampling)
    if isinstance(source, list | tuple):
        fps = sampling.pop("fps", FPS)
        frames = []
        if sampling:
            raise ValueError(
                f"{min(sampling)} selects frames of a video file; of a list, all frames are used"
            )
        for frame in source:
            image = fetch_image(frame, folder)
            _check_size(len(source), image.width, image.height)
            frames.append(image)
        return Video(frames, fps)
    name, file = open_source(source, folder)
    try:
        return _sample(file, sampling | {"frame_factor": frame_factor})
    except Exception as error:  # damaged files can make PyAV raise any exception
        error_text = str(error) or type(error).__name__
        if hasattr(error, "strerror"):  # an error of the system or of FFmpeg
            reason = getattr(error, "strerror", None) or error_text
            error_text = f"cannot be read as a video ({reason})"
        raise ValueError(f"{name}: {error_text}") from error


def _sample(file: Path | io.BytesIO, sampling: dict) -> Video:
    """Sample the frames of a file: the first pass counts frames, the second decodes them."""
    with _opened(file) as (container, stream):
        video_fps = float(stream.average_rate or stream.guessed_rate or 0)
        total_frames = _count_frames(container, stream)
    while True:
        indices, fps = sample_indices(total_frames, video_fps, **sampling)
        frames, num_decoded = _decode(file, indices)
        if len(frames) == len(indices):
            return Video(frames, fps, [index / video_fps for index in indices])
        # fewer frames than packets, because frames before the first key frame are not decoded
        total_frames = num_decoded


def _count_frames(container, stream) -> int:
    """Count the frames of a stream by its packets; raise ValueError for a truncated file."""
    total_frames = 0
    end_seconds = 0.0
    for packet in container.demux():
        if packet.is_corrupt:
            raise ValueError("the file is truncated or damaged")
        is_ours = packet.stream_index == stream.index
        if is_ours and packet.size > 0 and not packet.is_discard:
            total_frames += 1
        if packet.pts is not None:
            packet_end = float((packet.pts + (packet.duration or 0)) * packet.time_base)
            end_seconds = max(end_seconds, packet_end)
    # checked for Matroska only, because other containers detect missing packets by their index
    claimed_seconds = (container.duration or 0) / 1e6
    missing_seconds = claimed_seconds + (container.start_time or 0) / 1e6 - end_seconds
    if "matroska" in container.format.name and missing_seconds > max(0.5, 0.05 * claimed_seconds):
        raise ValueError(
            f"the file is truncated, it ends after {end_seconds:.6g} of {claimed_seconds:.6g} "
            "seconds"
        )
    return total_frames


@contextlib.contextmanager
def _opened(file: Path | io.BytesIO) -> Iterator[tuple]:
    """Open a file with PyAV; yield its container and video stream."""
    with optional_dependency("video", "video files need PyAV"):
        import av

    # opened here, because FFmpeg would open several files for a name like concat:a|b
    opened = file.open("rb") if isinstance(file, Path) else io.BytesIO(file.getbuffer())
    # no protocols, because FFmpeg would open the files and URLs of a playlist
    options = {"protocol_whitelist": "none"}
    with opened, av.open(opened, container_options=options, metadata_errors="replace") as container:
        stream = container.streams.best("video")
        if not isinstance(stream, av.VideoStream):
            raise ValueError("the file has no video stream")
        if stream.codec_context is None:
            raise ValueError("FFmpeg cannot decode the format of the video")
        _check_size(1, stream.codec_context.width, stream.codec_context.height)
        # each frame is checked too, because it can claim another size
        stream.codec_context.options = {"max_pixels": str(MAX_IMAGE_PIXELS)}
        yield container, stream


def _decode(file: Path | io.BytesIO, indices: Sequence[int]) -> tuple[list[PIL.Image.Image], int]:
    """Decode the frames with the given indices; return also the number of decoded frames."""
    frames = []
    num_decoded = 0
    with _opened(file) as (container, stream):
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise ValueError(f"frame {num_decoded} is damaged")
            if num_decoded == indices[len(frames)]:
                _check_size(len(indices), frame.width, frame.height)
                # phones store the unrotated picture together with its rotation
                quarter_turns = round(frame.rotation / 90)
                if abs(frame.rotation - 90 * quarter_turns) > 1:
                    raise ValueError(
                        f"the video is rotated by {frame.rotation} degrees, only multiples of 90 "
                        "work"
                    )
                pixels = np.rot90(frame.to_ndarray(format="rgb24"), quarter_turns)
                frames.append(PIL.Image.fromarray(pixels))
            num_decoded += 1
            if len(frames) == len(indices):
                break
    return frames, num_decoded


def _check_size(nframes: int, width: int, height: int):
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(
            f"frames of {width} x {height} pixels are larger than {MAX_IMAGE_PIXELS} pixels"
        )
    if nframes * width * height > MAX_VIDEO_PIXELS:
        raise ValueError(
            f"{nframes} frames of {width} x {height} pixels have more than {MAX_VIDEO_PIXELS} "
            "pixels together; use fewer or smaller frames"
        )


def sample_indices(
    total_frames: int, video_fps: float, frame_factor: int = FRAME_FACTOR, **sampling: float
) -> tuple[list[int], float]:
    """Choose evenly spaced frames of a file, including the first and the last.

    Example: 6 of 100 frames are 0, 20, 40, 59, 79, 99.

    Args:
        total_frames: number of frames of the file.
        video_fps: frames per second of the file.
        frame_factor: the number of sampled frames is a multiple of it.
        sampling: see smart_nframes; and video_start and video_end in seconds, which are clipped to
            the video.

    Returns:
        Indices of the frames, and their number per second.

    Source: qwen-vl-utils' readers (float32); with frame_factor 1 Qwen3VLVideoProcessor (float64).
    """
    if total_frames <= 0 or not 0 < video_fps < math.inf:
        raise ValueError(
            f"the video has {total_frames} frames at {video_fps} per second, no frame can be "
            "sampled"
        )
    duration = total_frames / video_fps
    video_start = sampling.pop("video_start", 0.0)
    video_end = sampling.pop("video_end", duration)
    first_frame = math.ceil(min(video_start, duration) * video_fps)
    last_frame = min(math.floor(min(video_end, duration) * video_fps), total_frames - 1)
    if first_frame >= last_frame:
        raise ValueError(
            f"no two frames lie between video_start {video_start} and video_end {video_end}; the "
            f"video has {total_frames} frames at {video_fps:.6g} per second ({duration:.6g} "
            "seconds)"
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
    """Compute the number of frames to sample, a multiple of frame_factor.

    Example: at 2 frames per second, a video of 100 frames at 30 per second would have 6.67 sampled
    frames, so 6 are sampled.

    Args:
        total_frames: number of frames of the file.
        video_fps: frames per second of the file.
        frame_factor: the result is a multiple of it.
        sampling: nframes, the number itself; or fps, the number per second (default 2), with the
            bounds min_frames (default 4) and max_frames (default 768), of which max_frames wins.

    Source: qwen-vl-utils' smart_nframes.
    """
    if "nframes" in sampling:
        if sampling.keys() & {"fps", "min_frames", "max_frames"}:
            raise ValueError(
                "nframes cannot be combined with fps, min_frames or max_frames; use one of them"
            )
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
        raise ValueError(f"cannot sample {nframes} frames of a video of {total_frames} frames")
    return nframes


def frame_size(
    processor: ImageProcessor, nframes: int, height: int, width: int, **options: int
) -> tuple[int, int]:
    """Compute the height and width in pixels that each frame of a video is resized to.

    Args:
        processor: image processor of the model.
        nframes: number of sampled frames.
        height, width: size of the frames in pixels.
        options: min_pixels and max_pixels of a frame (default: 128 and 768 tokens); total_pixels of
            all frames (default: 115200 tokens), of which a frame gets a double share, because two
            frames are one patch; or resized_height and resized_width, as for an image.

    Returns:
        Height and width.

    Source: qwen-vl-utils' fetch_video for a file. Frame lists are treated alike, although version
        0.0.14 resizes them twice.
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
