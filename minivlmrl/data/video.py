"""Sample a video file's frames, or read a frame list, and compute their patches.

Frames are selected and resized as in qwen-vl-utils. A model family with other rules defines these rules in
ImageProcessor.videos, for example in model/families/qwen3_vl.Videos.
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

from minivlmrl.data.image import Grid, ImageProcessor, RGBFrames, check_ratio, smart_resize
from minivlmrl.data.image_settings import FPS, MAX_FRAME_TOKENS, MIN_FRAME_TOKENS, SAMPLING, check_options
from minivlmrl.data.media import MAX_IMAGE_PIXELS, Source, fetch_image, open_image, open_source
from minivlmrl.errors import error_context, optional_dependency

FRAME_FACTOR = 2  # the sampled frame count is a multiple of this factor
MIN_FRAMES, MAX_FRAMES = 4, 768  # default bounds for the number of sampled frames
# default limit for all frames' total size, counted as for images: 0.9 * 128000
TOTAL_TOKENS = 115_200
# maximum number of pixels in all sampled frames, before and after resizing, which are 6 GiB as RGB
MAX_VIDEO_PIXELS = 2**31


@dataclass
class Video:
    """A video's sampled frames, and the frame rate after sampling."""

    frames: Sequence[PIL.Image.Image]  # all of the same size
    fps: float  # sampled frames per second
    # each frame's time in seconds; None computes the times from fps
    seconds: Sequence[float] | None = None

    def __post_init__(self):
        check_options("video", {"fps": self.fps})
        if not self.frames or 0 in self.frames[0].size:
            raise ValueError("the video must have frames with at least 1 x 1 pixels, but has none")
        first = self.frames[0]
        for number, frame in enumerate(self.frames):
            if frame.size != first.size:
                raise ValueError(
                    f"all frames must have the same size, but frame {number} has {frame.width} x "
                    f"{frame.height} pixels and frame 0 has {first.width} x {first.height}"
                )

    def read(self, _processor: ImageProcessor) -> "Video":
        """Return the video itself, whose frames are loaded already; see VideoFile."""
        return self

    def patches(self, processor: ImageProcessor, **options: int) -> tuple[Tensor, Grid, float | list[float]]:
        """Resize the frames as frame_size says with these options, and cut them into patches.

        With data.resize_backend=torch, the patches are identical, bit for bit, to those from transformers'
        Qwen2VLVideoProcessor. With pil, every frame is resized and normalised exactly as transformers' image processor
        does.

        Returns:
            pixel_values, image_grid_thw (see image.patchify), and the seconds between two temporal patches. For model
            families that write timestamps into the prompt, the third value is instead a list with each temporal patch's
            time in seconds.
        """
        depth = processor.temporal_patch_size
        num_frames = len(self.frames)
        frame_width, frame_height = self.frames[0].size
        height, width = frame_size(processor, num_frames, frame_height, frame_width, **options)
        _check_size(math.ceil(num_frames / depth) * depth, width, height)
        frames = RGBFrames(self.frames)
        pixel_values, image_grid_thw = processor.patches(frames, height, width)
        if processor.videos is None:
            return pixel_values, image_grid_thw, depth / self.fps
        seconds = self.seconds or [i / self.fps for i in range(num_frames)]
        ends = [(first, min(first + depth, num_frames) - 1) for first in range(0, num_frames, depth)]
        return pixel_values, image_grid_thw, [(seconds[first] + seconds[last]) / 2 for first, last in ends]


@dataclass
class VideoFile:
    """A video file that is decoded when its patches are computed.

    Decoding waits for the image processor, because model families sample different frames.
    """

    load: Callable[..., Video]  # load_video with all arguments except frame_factor and defaults

    def read(self, processor: ImageProcessor) -> Video:
        """Load the frames that the processor's model family samples."""
        if processor.videos is None:
            return self.load()
        return self.load(frame_factor=1, defaults=processor.videos.sampling)

    def patches(self, processor: ImageProcessor, **options: int) -> tuple:
        """Load the video, and compute its patches with Video.patches."""
        return self.read(processor).patches(processor, **options)


def load_video(source: Source | list, folder=None, frame_factor=FRAME_FACTOR, defaults=None, **sampling) -> Video:
    """Load a video's sampled frames.

    Args:
        source: video file, given as in media.fetch_image, or an image list. All images in a list are used.
        folder: folder that relative paths start from.
        frame_factor: the sampled frame count is a multiple of this factor.
        defaults: the folder's options for a video file without options that choose its frames.
        sampling: options, see sample_indices. The only option for an image list is fps, the rate
            at which the images were sampled (default 2; `sample_fps` of qwen-vl-utils 0.0.14).
    """
    sampling = check_options("video", sampling)
    if isinstance(source, list | tuple):
        fps = sampling.pop("fps", FPS)
        frames = []
        if sampling:
            raise ValueError(
                f"{min(sampling)} selects frames of a video file, but the video is a list of "
                "images, whose frames are all used; remove the option"
            )
        for frame in source:
            image = fetch_image(frame, folder)
            _check_size(len(source), image.width, image.height)
            frames.append(image)
        return Video(frames, fps)
    name, file = open_source(source, folder)
    try:
        return _sample(file, _with_defaults(sampling, defaults) | {"frame_factor": frame_factor})
    except Exception as error:  # damaged files can make PyAV raise any exception
        error_text = str(error) or type(error).__name__
        if hasattr(error, "strerror"):  # an error from the operating system or FFmpeg
            reason = getattr(error, "strerror", None) or error_text
            error_text = f"the file cannot be read as a video ({reason})"
        raise ValueError(f"{name}: {error_text}") from error


def outline_video(source: Source | list, folder=None, frame_factor=FRAME_FACTOR, defaults=None, **sampling) -> Video:
    """Return a video as load_video returns it, but with blank frames, and without decoding.

    A file's frame count is taken from its header. See load_video for the arguments.
    """
    sampling = check_options("video", sampling)
    if isinstance(source, list | tuple):
        with open_image(source[0], folder) as image:
            return Video([image] * len(source), sampling.get("fps", FPS))
    name, file = open_source(source, folder)
    with error_context(name), _opened(file) as (container, stream):
        video_fps = float(stream.average_rate or stream.guessed_rate or 0)
        total_frames = stream.frames or _count_frames(container, stream)
        size = stream.codec_context.width, stream.codec_context.height
    indices, fps = sample_indices(total_frames, video_fps, frame_factor, **_with_defaults(sampling, defaults))
    seconds = [index / video_fps for index in indices]
    return Video([PIL.Image.new("1", size)] * len(indices), fps, seconds)


def _with_defaults(sampling: dict, defaults: dict | None) -> dict:
    return sampling if sampling.keys() & SAMPLING else (defaults or {}) | sampling


def _sample(file: Path | io.BytesIO, sampling: dict) -> Video:
    """Sample a file's frames in two passes: one counts frames, the other decodes frames."""
    with _opened(file) as (container, stream):
        video_fps = float(stream.average_rate or stream.guessed_rate or 0)
        total_frames = _count_frames(container, stream)
    while True:
        indices, fps = sample_indices(total_frames, video_fps, **sampling)
        frames, num_decoded = _decode(file, indices)
        if len(frames) == len(indices):
            return Video(frames, fps, [index / video_fps for index in indices])
        # The file has fewer frames than packets, because frames before the first key frame cannot be decoded. Sample
        # again from the number of decoded frames.
        total_frames = num_decoded


def _count_frames(container, stream) -> int:
    """Count a video stream's frames, one per packet, and raise ValueError if the file is truncated or damaged."""
    total_frames = 0
    end_seconds = 0.0
    for packet in container.demux():
        if packet.is_corrupt:
            raise ValueError("the video file is truncated or damaged")
        is_ours = packet.stream_index == stream.index
        if is_ours and packet.size > 0 and not packet.is_discard:
            total_frames += 1
        if packet.pts is not None:
            packet_end = float((packet.pts + (packet.duration or 0)) * packet.time_base)
            end_seconds = max(end_seconds, packet_end)
    # The duration is checked for Matroska only, because other containers have an index, by which missing packets are
    # detected.
    claimed_seconds = (container.duration or 0) / 1e6
    missing_seconds = claimed_seconds + (container.start_time or 0) / 1e6 - end_seconds
    if "matroska" in container.format.name and missing_seconds > max(0.5, 0.05 * claimed_seconds):
        raise ValueError(
            f"the video file is truncated, because it ends after {end_seconds:.6g} of {claimed_seconds:.6g} seconds"
        )
    return total_frames


@contextlib.contextmanager
def _opened(file: Path | io.BytesIO) -> Iterator[tuple]:
    """Open a file with PyAV, and yield its container and its best video stream."""
    with optional_dependency("video", "reading video files requires PyAV"):
        import av

    # Open the file here instead of passing its name, because FFmpeg would open several files for a name like
    # concat:a|b.
    opened = file.open("rb") if isinstance(file, Path) else io.BytesIO(file.getbuffer())
    # Forbid all protocols, because FFmpeg would open the files and URLs that a playlist lists.
    options = {"protocol_whitelist": "none"}
    with opened, av.open(opened, container_options=options, metadata_errors="replace") as container:
        stream = container.streams.best("video")
        if not isinstance(stream, av.VideoStream):
            raise ValueError("the file has no video stream")
        if stream.codec_context is None:
            raise ValueError("FFmpeg cannot decode the format of the video; convert the video")
        _check_size(1, stream.codec_context.width, stream.codec_context.height)
        # FFmpeg also checks every frame, because a frame can declare another size than its stream
        stream.codec_context.options = {"max_pixels": str(MAX_IMAGE_PIXELS)}
        yield container, stream


def _decode(file: Path | io.BytesIO, indices: Sequence[int]) -> tuple[list[PIL.Image.Image], int]:
    """Decode the frames with the given indices, upright and in RGB, and count all decoded frames.

    There are fewer frames than indices if the file ends early.
    """
    frames = []
    num_decoded = 0
    with _opened(file) as (container, stream):
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise ValueError(f"frame {num_decoded} is damaged")
            if num_decoded == indices[len(frames)]:
                _check_size(len(indices), frame.width, frame.height)
                # phones store unrotated frames, with the angle by which to rotate them
                quarter_turns = round(frame.rotation / 90)
                if abs(frame.rotation - 90 * quarter_turns) > 1:
                    raise ValueError(
                        f"the rotation of the video is {frame.rotation} degrees, but it must be a multiple of 90"
                    )
                pixels = np.rot90(frame.to_ndarray(format="rgb24"), quarter_turns)
                frames.append(PIL.Image.fromarray(pixels))
            num_decoded += 1
            if len(frames) == len(indices):
                break
    return frames, num_decoded


def _check_size(nframes: int, width: int, height: int):
    check_ratio(width, height)
    if width * height > MAX_IMAGE_PIXELS:
        raise ValueError(
            f"the frames have {width} x {height} pixels, which is more than the limit of "
            f"{MAX_IMAGE_PIXELS}; scale the video down"
        )
    if nframes * width * height > MAX_VIDEO_PIXELS:
        raise ValueError(
            f"{nframes} frames of {width} x {height} pixels have together more pixels than the "
            f"limit of {MAX_VIDEO_PIXELS}; use fewer or smaller frames"
        )


def sample_indices(
    total_frames: int, video_fps: float, frame_factor: int = FRAME_FACTOR, **sampling: float
) -> tuple[list[int], float]:
    """Choose evenly spaced frames in a file, including the first and the last frame.

    Example: the indices of 6 frames out of 100 are 0, 20, 40, 59, 79 and 99.

    Args:
        sampling: smart_nframes' options; also video_start and video_end in seconds, which are clipped to the video's
            duration.

    Returns:
        Indices of the sampled frames, and the sampled frames per second.

    Source: qwen-vl-utils' video readers, which compute in float32; if frame_factor is 1, transformers'
        Qwen3VLVideoProcessor, which computes in float64.
    """
    if total_frames <= 0 or not 0 < video_fps < math.inf:
        raise ValueError(f"the video has {total_frames} frames at {video_fps} per second, so no frame can be sampled")
    duration = total_frames / video_fps
    video_start = sampling.pop("video_start", 0.0)
    video_end = sampling.pop("video_end", duration)
    first_frame = math.ceil(min(video_start, duration) * video_fps)
    last_frame = min(math.floor(min(video_end, duration) * video_fps), total_frames - 1)
    if first_frame >= last_frame:
        raise ValueError(
            f"no two frames lie between video_start {video_start} and video_end {video_end}; the video has "
            f"{total_frames} frames at {video_fps:.6g} per second ({duration:.6g} seconds)"
        )
    num_frames = last_frame - first_frame + 1
    nframes = smart_nframes(num_frames, video_fps, frame_factor, sampling)
    if frame_factor == 1:
        indices = np.linspace(first_frame, last_frame, nframes).round().astype(int)
    else:
        indices = torch.linspace(first_frame, last_frame, nframes).round().long()
    return indices.tolist(), nframes / num_frames * video_fps


def smart_nframes(total_frames: int, video_fps: float, frame_factor: int, sampling: dict[str, float]) -> int:
    """Compute how many frames to sample, a multiple of frame_factor.

    Example: 100 frames at 30 frames per second last 3.33 seconds. At 2 sampled frames per second this gives 6.67, which
    is rounded down to 6 frames.

    Args:
        sampling: either nframes, the number of frames to sample, or fps, the sampled
            frames per second (default 2). The option fps can be combined with the bounds min_frames (default 4) and
            max_frames (default 768); max_frames has priority over min_frames.

    Source: qwen-vl-utils' smart_nframes.
    """
    if "nframes" in sampling:
        if sampling.keys() & {"fps", "min_frames", "max_frames"}:
            raise ValueError("nframes cannot be combined with fps, min_frames or max_frames; use one of them")
        nframes = round(sampling["nframes"] / frame_factor) * frame_factor
    else:
        min_frames = math.ceil(sampling.get("min_frames", MIN_FRAMES) / frame_factor) * frame_factor
        max_frames = math.floor(sampling.get("max_frames", MAX_FRAMES) / frame_factor) * frame_factor
        wanted_frames = total_frames / video_fps * sampling.get("fps", FPS)
        wanted_frames = min(max(wanted_frames, min_frames), max_frames, total_frames)
        nframes = math.floor(wanted_frames / frame_factor) * frame_factor
    if not FRAME_FACTOR <= nframes <= total_frames:
        raise ValueError(
            f"cannot sample {nframes} frames of a video of {total_frames} frames; the number must "
            "be at least 2, and at most the number of frames of the video"
        )
    return nframes


def frame_size(processor: ImageProcessor, nframes: int, height: int, width: int, **options: int) -> tuple[int, int]:
    """Compute the height and width in pixels that each video frame is resized to.

    Args:
        options: min_pixels and max_pixels, the bounds for a frame's area in pixels (default:
            the area for 128 and 768 tokens), and total_pixels, the limit for all frames (default: the area of 115200
            tokens). A frame may use twice its share of total_pixels, because two frames form one temporal patch.
            Instead of these bounds, resized_height and resized_width can be given, as for an image.

    Returns:
        Height and width.

    Source: fetch_video in qwen-vl-utils, for a video file. Frame lists are resized in the same
        way here, although version 0.0.14 resizes them twice.
    """
    options = check_options("video", options)
    factor = processor.factor
    if "resized_height" in options:
        sides = options["resized_height"], options["resized_width"]
        return smart_resize(*sides, factor, processor.min_pixels, processor.max_pixels)
    if processor.videos is not None:
        return processor.videos.frame_size(processor, nframes, height, width, **options)
    nframes = math.ceil(nframes / processor.temporal_patch_size) * processor.temporal_patch_size
    min_pixels = options.get("min_pixels", MIN_FRAME_TOKENS * factor**2)
    pixel_share = options.get("total_pixels", TOTAL_TOKENS * factor**2) / nframes * FRAME_FACTOR
    pixel_limit = max(min(MAX_FRAME_TOKENS * factor**2, pixel_share), int(min_pixels * 1.05))
    max_pixels = min(options.get("max_pixels", pixel_limit), pixel_limit)
    return smart_resize(height, width, factor, min_pixels, max_pixels)
