"""Which frames of a video the model sees: the rules and constants of qwen-vl-utils."""

import math

import torch

FPS = 2.0  # frames a second that are taken when nothing else is asked
FRAME_FACTOR = 2  # the number of frames taken is a multiple
MIN_FRAMES, MAX_FRAMES = 4, 768


def sample_indices(
    total_frames: int, video_fps: float, *, video_start=None, video_end=None, **sampling: float | None
) -> tuple[list[int], float]:
    """Choose frames of a file, evenly spread, the first and the last among them; also return their rate a second.

    Example: 6 of 100 frames are 0, 20, 40, 59, 79, 99.
    Source: qwen-vl-utils' readers (float32 linspace, rounded half to even).
    """
    first, last = frame_range(total_frames, video_fps, video_start, video_end)
    count = last - first + 1
    nframes = smart_nframes(count, video_fps, **sampling)
    return torch.linspace(first, last, nframes).round().long().tolist(), nframes / count * video_fps


def frame_range(
    total_frames: int, video_fps: float, video_start: float | None = None, video_end: float | None = None
) -> tuple[int, int]:
    """Return the first and last frame between two times in seconds; those outside the video are moved to its ends.

    Source: qwen-vl-utils' calculate_video_frame_range.
    """
    if total_frames <= 0 or not 0 < video_fps < math.inf:
        raise ValueError(f"a video of {total_frames} frames at {video_fps} a second has nothing to show")
    first, last, duration = 0, total_frames - 1, total_frames / video_fps
    if video_start is not None:
        first = math.ceil(min(number("video_start", video_start, zero=True), duration) * video_fps)
    if video_end is not None:
        last = min(math.floor(min(number("video_end", video_end, zero=True), duration) * video_fps), last)
    if first >= last and (video_start, video_end) != (None, None):
        video = f"the video has {total_frames} frames, {video_fps:.6g} a second: {duration:.6g} seconds"
        raise ValueError(f"no two frames lie between video_start {video_start} and video_end {video_end}; {video}")
    return first, last


def smart_nframes(
    total_frames: int, video_fps: float, *, fps=None, nframes=None, min_frames=None, max_frames=None
) -> int:
    """Choose how many frames to take, an even number.

    Example: of 100 frames at 30 a second, 2 a second would be 6.67; 6 are taken.

    Args:
        fps: frames to take of a second, 2 if not given.
        nframes: frames to take, instead of fps.
        min_frames, max_frames: bounds when fps decides, 4 and 768 if not given; max_frames wins over min_frames.
    Source: qwen-vl-utils' smart_nframes.
    """
    if nframes is not None:
        if (fps, min_frames, max_frames) != (None, None, None):
            raise ValueError("nframes fixes the number of frames: give it without fps, min_frames and max_frames")
        chosen = round(_whole("nframes", nframes) / FRAME_FACTOR) * FRAME_FACTOR
    else:
        least = _whole("min_frames", MIN_FRAMES if min_frames is None else min_frames)
        most = _whole("max_frames", min(MAX_FRAMES, total_frames) if max_frames is None else max_frames)
        least = math.ceil(least / FRAME_FACTOR) * FRAME_FACTOR
        most = math.floor(most / FRAME_FACTOR) * FRAME_FACTOR
        chosen = total_frames / video_fps * number("fps", FPS if fps is None else fps)
        chosen = math.floor(min(max(chosen, least), most, total_frames) / FRAME_FACTOR) * FRAME_FACTOR
    if not FRAME_FACTOR <= chosen <= total_frames:
        raise ValueError(f"{chosen} frames would be taken of a video of {total_frames}; need {FRAME_FACTOR} or more")
    return chosen


def number(name: str, value: float, zero: bool = False) -> float:
    """Check that an option is a number above 0, or 0 if that is allowed too."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and value < 1e9
    if not known or not (value > 0 or (zero and value == 0)):
        raise ValueError(f"{name} {value!r:.40}: need a number {'from 0 on' if zero else 'above 0'}, below 1e9")
    return value


def _whole(name: str, value: int) -> int:
    if number(name, value) != int(value):
        raise ValueError(f"{name} {value!r}: need a whole number")
    return int(value)
