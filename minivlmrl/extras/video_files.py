"""Read sampled frames from video files, with PyAV."""

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import torch

from minivlmrl.data.image_settings import FPS, SAMPLING
from minivlmrl.data.media import MAX_IMAGE_PIXELS, Source, open_source
from minivlmrl.data.video import FRAME_FACTOR, Video, check_size
from minivlmrl.errors import UserError, error_context, optional_dependency, pluralize

MIN_FRAMES, MAX_FRAMES = 4, 768  # default limits: frames sampled per video


def load(source: Source, folder, sampling: dict, frame_factor: int, defaults: dict | None) -> Video:
    """Open a video, and decode the frames chosen by the sampling options."""
    name, file = open_source(source, folder)
    try:
        return sample(file, with_defaults(sampling, defaults) | {"frame_factor": frame_factor})
    except Exception as error:  # damaged files can make PyAV raise any exception
        error_text = str(error) or type(error).__name__
        if hasattr(error, "strerror"):
            error_text = f"the file cannot be read as a video ({getattr(error, 'strerror', None) or error_text})"
        raise UserError(f"{name}: {error_text}") from error


def outline(source: Source, folder, sampling: dict, frame_factor: int, defaults: dict | None) -> Video:
    """Return a video with blank frames instead of decoded ones, to count its tokens."""
    name, file = open_source(source, folder)
    with error_context(name), opened_video(file) as (container, stream, video_fps):
        total_frames = stream.frames or count_frames(container, stream)
        size = stream.codec_context.width, stream.codec_context.height
    options = with_defaults(sampling, defaults)
    indices, fps = sample_indices(total_frames, video_fps, frame_factor, **options)
    frames = [PIL.Image.new("1", size)] * len(indices)
    return Video(frames, fps, [index / video_fps for index in indices])


def with_defaults(sampling: dict, defaults: dict | None) -> dict:
    """Use the model's default sampling options, unless the user sets any."""
    if sampling.keys() & SAMPLING:
        return sampling
    return (defaults or {}) | sampling


def sample(file: Path | io.BytesIO, sampling: dict) -> Video:
    """Decode evenly spaced frames from a video file."""
    with opened_video(file) as (container, stream, video_fps):
        total_frames = count_frames(container, stream)
    while True:
        indices, fps = sample_indices(total_frames, video_fps, **sampling)
        frames, num_decoded = decode(file, indices)
        if len(frames) == len(indices):
            return Video(frames, fps, [index / video_fps for index in indices])
        # fewer than counted: frames before the first key frame cannot be decoded
        total_frames = num_decoded


def count_frames(container, stream) -> int:
    """Count the frames of a video without decoding; raise UserError for a truncated or damaged file."""
    total_frames = 0
    end_seconds = 0.0
    for packet in container.demux():
        if packet.is_corrupt:
            raise UserError("the video file is truncated or damaged")
        is_of_stream = packet.stream_index == stream.index
        if is_of_stream and packet.size > 0 and not packet.is_discard:
            total_frames += 1  # one frame per packet
        if packet.pts is not None:
            packet_end = packet.pts + (packet.duration or 0)
            end_seconds = max(end_seconds, float(packet_end * packet.time_base))
    # a Matroska file that ends before the duration in its header is truncated
    claimed_seconds = (container.duration or 0) / 1e6
    missing_seconds = claimed_seconds + (container.start_time or 0) / 1e6 - end_seconds
    if "matroska" in container.format.name and missing_seconds > max(0.5, 0.05 * claimed_seconds):
        raise UserError(
            f"the video file is truncated, because it ends after {end_seconds:.6g} of {claimed_seconds:.6g} seconds"
        )
    return total_frames


@contextlib.contextmanager
def opened_video(file: Path | io.BytesIO) -> Iterator[tuple]:
    """Open a video file, and yield PyAV's container, its best video stream and the frame rate."""
    with optional_dependency("video", "reading video files requires PyAV"):
        import av

    # pass an open file, not its name: FFmpeg would read a name such as concat:x.mp4|y.mp4 as two files
    opened = file.open("rb") if isinstance(file, Path) else io.BytesIO(file.getbuffer())
    # a playlist must not open other files or URLs
    options = {"protocol_whitelist": "none"}
    with opened, av.open(opened, container_options=options, metadata_errors="replace") as container:
        stream = container.streams.best("video")
        if not isinstance(stream, av.VideoStream):
            raise UserError("the file has no video stream")
        if stream.codec_context is None:
            raise UserError("FFmpeg cannot decode the format of the video; convert the video")
        check_size(1, stream.codec_context.width, stream.codec_context.height)
        # frames may be larger than the header says
        stream.codec_context.options = {"max_pixels": str(MAX_IMAGE_PIXELS)}
        yield container, stream, float(stream.average_rate or stream.guessed_rate or 0)


def decode(file: Path | io.BytesIO, indices: Sequence[int]) -> tuple[list[PIL.Image.Image], int]:
    """Decode the frames with given indices to upright RGB images; also return how many frames were decoded."""
    frames = []
    num_decoded = 0
    with opened_video(file) as (container, stream, _):
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise UserError(f"frame {num_decoded} is damaged")
            if num_decoded == indices[len(frames)]:
                check_size(len(indices), frame.width, frame.height)
                # phones store frames unrotated, with a rotation angle
                quarter_turns = round(frame.rotation / 90)
                if abs(frame.rotation - 90 * quarter_turns) > 1:
                    raise UserError(f"the video's rotation is {frame.rotation} degrees, not a multiple of 90")
                pixels = frame.to_ndarray(format="rgb24")
                frames.append(PIL.Image.fromarray(np.rot90(pixels, quarter_turns)))
            num_decoded += 1
            if len(frames) == len(indices):
                break
    return frames, num_decoded


def sample_indices(
    total_frames: int, video_fps: float, frame_factor: int = FRAME_FACTOR, **sampling: float
) -> tuple[list[int], float]:
    """Choose evenly spaced frames, including the first and the last.

    Example: 6 frames out of 100 are 0, 20, 40, 59, 79 and 99.

    Args:
        sampling: smart_nframes options; also video_start and video_end in seconds, clipped to the duration.
    Returns:
        frame indices, and sampled frames per second
    Source: video readers in qwen-vl-utils; for frame_factor 1 (Qwen3-VL), Qwen3VLVideoProcessor in transformers.
    """
    if total_frames <= 0 or not 0 < video_fps < math.inf:
        raise UserError(
            f"the video has {pluralize(total_frames, 'frame')} at {video_fps} per second, so no frame can be sampled"
        )
    duration = total_frames / video_fps
    video_start = sampling.pop("video_start", 0.0)
    video_end = sampling.pop("video_end", duration)
    first_frame = math.ceil(min(video_start, duration) * video_fps)
    last_frame = math.floor(min(video_end, duration) * video_fps)
    last_frame = min(last_frame, total_frames - 1)
    if first_frame >= last_frame:
        raise UserError(
            f"no two frames lie between video_start {video_start} and video_end {video_end}; the video has "
            f"{pluralize(total_frames, 'frame')} at {video_fps:.6g} per second ({duration:.6g} seconds)"
        )
    num_frames = last_frame - first_frame + 1
    nframes = smart_nframes(num_frames, video_fps, frame_factor, sampling)
    if frame_factor == 1:
        indices = np.linspace(first_frame, last_frame, nframes).round().astype(int)  # float64, as in transformers
    else:
        indices = torch.linspace(first_frame, last_frame, nframes).round().long()  # float32, as in qwen-vl-utils
    return indices.tolist(), nframes / num_frames * video_fps


def smart_nframes(total_frames: int, video_fps: float, frame_factor: int, sampling: dict[str, float]) -> int:
    """Compute how many frames to sample from a video, a multiple of frame_factor.

    Example: 100 frames at 30 per second last 3.33 seconds; 2 frames per second give 6.67, rounded down to 6.

    Args:
        sampling: nframes (number of frames), or fps (frames per second, default 2) with the limits min_frames (default
            4) and max_frames (default 768, has priority).
    Source: smart_nframes in qwen-vl-utils.
    """
    if "nframes" in sampling:
        if sampling.keys() & {"fps", "min_frames", "max_frames"}:
            raise UserError("nframes cannot be combined with fps, min_frames or max_frames; use one of them")
        nframes = round(sampling["nframes"] / frame_factor) * frame_factor
    else:
        min_frames = sampling.get("min_frames", MIN_FRAMES)
        max_frames = sampling.get("max_frames", MAX_FRAMES)
        min_frames = math.ceil(min_frames / frame_factor) * frame_factor
        max_frames = math.floor(max_frames / frame_factor) * frame_factor
        wanted_frames = total_frames / video_fps * sampling.get("fps", FPS)
        wanted_frames = min(max(wanted_frames, min_frames), max_frames, total_frames)
        nframes = math.floor(wanted_frames / frame_factor) * frame_factor
    if not FRAME_FACTOR <= nframes <= total_frames:
        raise UserError(
            f"cannot sample {nframes} frames of a video of {pluralize(total_frames, 'frame')}; the number must "
            "be at least 2, and at most the number of frames of the video"
        )
    return nframes
