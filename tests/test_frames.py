"""Which frames of a video the model sees: the rules of qwen-vl-utils."""

import pytest
from record_vision import attempt, digest, recorded, sampling_cases

from minivlmrl.data.frames import frame_range, sample_indices, smart_nframes


@pytest.mark.parametrize(
    ("total", "video_fps", "options", "expected"),
    [
        (100, 30, {}, 6),
        (100, 30, {"fps": 10, "min_frames": 16, "max_frames": 32}, 32),
        (100, 30, {"nframes": 24}, 24),
        (100, 30, {"nframes": 25}, 24),  # 12.5 pairs: Python rounds half to even
        (100, 30, {"nframes": 23}, 24),
        (100, 30, {"nframes": 3}, 4),
        (100, 30, {"nframes": 101}, 100),
        (10, 30, {"fps": 1}, 4),
        (3, 30, {"fps": 2}, 2),
        (1000, 29.97, {"fps": 1.5}, 50),
        (300, 25, {"fps": 4, "max_frames": 7}, 6),
        (100, 30, {"min_frames": 7, "max_frames": 5}, 4),  # the upper bound wins
        (100_000, 25, {}, 768),
    ],
)
def test_smart_nframes(total, video_fps, options, expected):
    assert smart_nframes(total, video_fps, **options) == expected


@pytest.mark.parametrize(
    ("total", "options", "message"),
    [
        (100, {"nframes": 1}, "0 frames would be taken of a video of 100"),
        (99, {"nframes": 100}, "100 frames would be taken of a video of 99"),
        (1, {}, "0 frames would be taken of a video of 1"),
        (100, {"max_frames": 1}, "0 frames would be taken"),
        (100, {"fps": 1, "nframes": 4}, "nframes fixes the number of frames"),
        (100, {"max_frames": 8, "nframes": 4}, "nframes fixes the number of frames"),
        (100, {"fps": 0}, "fps 0: need a number above 0"),
        (100, {"fps": float("nan")}, "fps nan"),
        (100, {"fps": "2"}, "fps '2'"),
        (100, {"fps": True}, "fps True"),
        (100, {"nframes": 4.5}, r"nframes 4\.5: need a whole number"),
        (100, {"min_frames": -1}, "min_frames -1"),
        (100, {"max_frames": [8]}, r"max_frames \[8\]"),
        (100, {"fps": 10**400}, "fps 1000"),
    ],
)
def test_a_wrong_number_of_frames_is_refused(total, options, message):
    with pytest.raises(ValueError, match=message):
        smart_nframes(total, 30, **options)


@pytest.mark.parametrize(
    ("first", "last", "count", "expected"),
    [
        (0, 99, 6, [0, 20, 40, 59, 79, 99]),
        (0, 7, 4, [0, 2, 5, 7]),
        (0, 29, 4, [0, 10, 19, 29]),
        (10, 57, 12, [10, 14, 19, 23, 27, 31, 36, 40, 44, 48, 53, 57]),
    ],
)
def test_frames_are_spread_evenly(first, last, count, expected):
    between = {"video_start": first, "video_end": last} if first else {}
    indices, fps = sample_indices(last + 1, 1.0, nframes=count, **between)
    assert indices == expected
    assert fps == count / (last - first + 1)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(None, None, (0, 99)), (0.51, 1.49, (16, 44)), (None, 2.0, (0, 60)), (3.2, None, (96, 99)), (0, 1e8, (0, 99))],
)
def test_frames_between_two_times(start, end, expected):
    assert frame_range(100, 30, start, end) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"video_start": 1.0, "video_end": 1.0},
            "no two frames lie between video_start 1.0 and video_end 1.0; .*3.33333 s",
        ),
        ({"video_start": 50}, "no two frames lie between video_start 50 and video_end None"),
        ({"video_end": 0}, "no two frames lie between video_start None and video_end 0"),
        ({"video_start": -1}, "video_start -1: need a number from 0 on"),
        ({"video_end": "1"}, "video_end '1'"),
    ],
)
def test_a_wrong_stretch_of_time_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        frame_range(100, 30, **options)


@pytest.mark.parametrize(("total", "video_fps"), [(0, 30), (100, 0), (100, float("inf")), (100, float("nan"))])
def test_a_video_without_frames_or_rate_is_refused(total, video_fps):
    with pytest.raises(ValueError, match="has nothing to show"):
        frame_range(total, video_fps)


def test_sampling_equals_qwen_vl_utils():
    """2,000 videos and options: the frames, their rate to the last bit, and which are refused."""
    cases = recorded("qwen_vl_utils_0.0.14")["sampling"]
    assert len(cases) == 2000
    for (total, video_fps, options), expected in zip(sampling_cases(), cases, strict=True):
        made = attempt(sample_indices, total, video_fps, **options)
        found = made and [len(made[0]), digest(made[0]), made[1]]
        assert found == expected, (total, video_fps, options)
